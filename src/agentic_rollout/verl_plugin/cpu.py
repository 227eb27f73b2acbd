"""Runs verl 0.6 on a machine without a GPU; does nothing where there is one.

Load it with `VERL_USE_EXTERNAL_MODULES=agentic_rollout.verl_plugin.cpu`, which verl imports in every process. It gives
`torch.cpu` and gloo what verl expects of an accelerator and NCCL; no file of verl or torch is touched.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import transformers

logger = logging.getLogger(__name__)


def install() -> None:
    """Mends what verl needs on a CPU. Idempotent."""
    if torch.cuda.is_available() or getattr(torch.cpu, "_agentic_rollout", False):
        return
    torch.cpu._agentic_rollout = True  # type: ignore[attr-defined]
    _complete_torch_cpu()
    _use_gloo_alone()
    _keep_offload_unpinned()
    _attend_without_flash()
    logger.info("verl runs on the CPU")


def _complete_torch_cpu() -> None:
    """The functions of an accelerator's namespace that `torch.cpu` lacks."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    missing: dict[str, Any] = {
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": torch.set_rng_state,
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "mem_get_info": lambda *_: (memory, memory),
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: None,
    }
    for name, function in missing.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, function)


def _use_gloo_alone() -> None:
    """verl asks for `cpu:gloo,cpu:nccl`, which names one device twice; and it gathers scalars, which gloo refuses."""
    _wrap(dist, "init_process_group", _with_gloo)
    _wrap(dist, "all_gather", _gather_scalars)


def _with_gloo(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if args:
        args = ("gloo", *args[1:])
    else:
        kwargs["backend"] = "gloo"
    return original(*args, **kwargs)


def _gather_scalars(
    original: Callable[..., Any], tensor_list: list[torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    return original(tensor_list, tensor.reshape(1) if tensor.dim() == 0 else tensor, *args, **kwargs)


def _wrap(module: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(module, name)
    setattr(module, name, functools.wraps(original)(functools.partial(wrapper, original)))


def _keep_offload_unpinned() -> None:
    """Offloading to the CPU is what a CPU has anyway; page-locked memory it has not."""
    fsdp.CPUOffloadPolicy = lambda *_, **__: fsdp.OffloadPolicy()  # type: ignore[misc,assignment]


def _attend_without_flash() -> None:
    """verl builds its critic with flash attention, whatever the configuration says."""
    original = transformers.AutoModelForTokenClassification.from_pretrained

    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("attn_implementation") == "flash_attention_2":
            kwargs["attn_implementation"] = "sdpa"
        return original(*args, **kwargs)

    transformers.AutoModelForTokenClassification.from_pretrained = from_pretrained


def prepare_engine(tensor_parallel_size: int) -> None:
    """Lets a tensor-parallel engine live in verl's own workers, one rank in each. Idempotent.

    vLLM's CPU platform would replace the executor that verl chose by one that starts processes of its own, and would
    want a NUMA node for every rank. Called when an engine is about to be built, as vLLM is too slow to import in
    processes that have none.
    """
    if tensor_parallel_size > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(["all"] * tensor_parallel_size))
        _keep_external_launcher()


def _keep_external_launcher() -> None:
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__
    if original.__module__ == __name__:
        return

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        chosen = vllm_config.parallel_config.distributed_executor_backend
        original(cls, vllm_config)
        vllm_config.parallel_config.distributed_executor_backend = chosen

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


install()
