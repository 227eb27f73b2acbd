"""Starting verl's stock trainer as a subprocess, for the demo and the end-to-end tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from agentic_rollout.verl_plugin.lines import installed_line

MAIN = "verl.trainer.main_ppo"

# What verl, vLLM and Ray need on a machine without a GPU; then what one line of verl needs besides.
CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "TORCHDYNAMO_DISABLE": "1",  # compiling a tiny model takes longer than running it
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait must not spin: any other process would slow them tenfold
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "HF_HUB_OFFLINE": "1",
}

LINE_ENVIRONMENT = {
    "0.6": {
        "VERL_USE_EXTERNAL_MODULES": "agentic_rollout.verl_plugin.cpu",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    },
    "0.9": {
        "VERL_PLATFORM": "cpu",  # registered by our entry point
        "VERL_ENGINE_DEVICE": "cuda",  # verl's FSDP engine has no entry for a CPU; this one runs there
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    },
}


def config_dir() -> Path:
    """The folder of Hydra configurations, in a checkout or in an installed package."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "configs", package.parents[1] / "configs"):
        if (folder / "search_grpo.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no configs/ beside {package} or two folders above it; reinstall agentic-rollout")


def trainer_command(config_name: str, overrides: Sequence[str]) -> list[str]:
    """The command line of verl's stock entry point with one of our primary configurations."""
    folder = config_dir()
    command = [sys.executable, "-m", MAIN, "--config-dir", str(folder), "--config-name", config_name]
    return [*command, f"custom_reward_function.path={folder / 'reward.py'}", *overrides]


def cpu_platform() -> str:
    """The option of the group `platform` that runs the installed verl without a GPU."""
    return f"cpu_verl{installed_line().name.replace('.', '')}"


def cpu_environment(threads: int | None = None) -> dict[str, str]:
    """This process's environment with what a machine without a GPU needs; set variables are kept."""
    environment = {**CPU_ENVIRONMENT, **LINE_ENVIRONMENT[installed_line().name], **os.environ}
    environment.setdefault("OMP_NUM_THREADS", str(threads or os.cpu_count() or 1))
    return environment
