"""A vLLM engine over a tiny random model, for benchmarks on any machine.

Import this before anything that imports torch or vLLM: it sets the environment that both read at import.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from agentic_rollout.verl_plugin.launch import CPU_ENVIRONMENT, LINE_ENVIRONMENT

os.environ.update(CPU_ENVIRONMENT | LINE_ENVIRONMENT["0.6"])  # no harm with a GPU
# One thread: a tiny model gains nothing from more, and threads that wait for each other suffer under any other load.
os.environ.update({"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "all", "VLLM_LOGGING_LEVEL": "ERROR"})

import torch

OUTPUTS = Path(__file__).resolve().parents[1] / "outputs" / "bench"


def build_llm(model: str | None, folder: Path, *, max_model_len: int, seed: int = 0) -> Any:
    """An engine set up as verl's in-worker rollout sets it up, over `model` or a tiny random Qwen2.

    Args:
        model: path of a model; None builds one in `folder`.
        folder: an empty folder.
        max_model_len: prompt and response together, in tokens.
        seed: for the weights and for sampling.
    """
    from vllm import LLM

    on_gpu = torch.cuda.is_available()
    if model is None:
        model = str(write_tiny_model(folder, seed))
    return LLM(
        model=model,
        dtype="bfloat16" if on_gpu else "float32",
        enforce_eager=True,
        enable_prefix_caching=True,
        block_size=16 if on_gpu else 32,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_model_len=max_model_len,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        seed=seed,
    )


def write_tiny_model(folder: Path, seed: int) -> Path:
    """Writes the demo's untrained model and its tokenizer to `folder`."""
    from agentic_rollout.demo.model import build_model, build_tokenizer
    from agentic_rollout.demo.search_task import search_language

    tokenizer = build_tokenizer(search_language(seed), folder)
    build_model(tokenizer, seed).save_pretrained(folder)
    return folder


def machine() -> dict[str, Any]:
    """What the figures were taken on: processors, load average over one minute, and accelerator."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"processors": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 2), "accelerator": device}


def quiet_logs() -> None:
    """Keeps the libraries' progress off the terminal."""
    logging.basicConfig(level=logging.WARNING)
    for name in ("vllm", "transformers", "bm25s"):
        logging.getLogger(name).setLevel(logging.ERROR)
