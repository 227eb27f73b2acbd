"""What verl's entry point `verl.plugins` loads, in every process that imports verl 0.9.

verl swallows whatever a plugin raises, and would only later say that it knows no rollout `agent`. So a failure is
logged here, with its cause, before it goes on.
"""

from __future__ import annotations

import importlib
import logging
import os

from agentic_rollout.verl_plugin.lines import installed_line
from agentic_rollout.verl_plugin.registration import register

logger = logging.getLogger(__name__)


def load() -> None:
    """Registers the rollout, and the CPU platform where verl is told to use it (`VERL_PLATFORM=cpu`)."""
    _keep_warnings()
    register()
    if os.environ.get("VERL_PLATFORM", "").lower() == "cpu":
        importlib.import_module(installed_line().cpu_module)


def _keep_warnings() -> None:
    """Keeps a dependency of vLLM's server from silencing every warning of the process, unless the user has chosen.

    On import, model-hosting-container-standards raises the root logger and its handlers to this level, ERROR if unset.
    """
    if "LOG_LEVEL" not in os.environ:
        os.environ.setdefault("SAGEMAKER_CONTAINER_LOG_LEVEL", "WARNING")


try:
    load()
except Exception:
    logger.exception("agentic-rollout could not be loaded into verl: rollout.name=agent will not be found")
    raise
