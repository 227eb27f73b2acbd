"""What vLLM's entry point `vllm.general_plugins` loads, in every process of a vLLM server."""

from __future__ import annotations

import os


def keep_weights_reloadable() -> None:
    """Lets verl 0.9 load new weights into a server on a CPU; does nothing where verl does not run on one.

    There, vLLM packs linear weights for its kernels and drops the originals, into which verl would load: the first
    weight update would fail, and its sender wait for ever.
    """
    if os.environ.get("VERL_PLATFORM", "").lower() != "cpu":
        return
    import torch
    from vllm.model_executor.layers import utils

    def use_plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]

    utils.dispatch_cpu_unquantized_gemm = use_plain_linear
