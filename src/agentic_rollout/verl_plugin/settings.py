"""The agent's settings as they come from verl's configuration, on either line."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from omegaconf import OmegaConf

from agentic_rollout.config import AGENT_KEY, AgentSettings, build_settings
from agentic_rollout.errors import SettingsError

logger = logging.getLogger(__name__)


class RolloutSection(Protocol):
    """What is read of `actor_rollout_ref.rollout`, a dataclass of verl's or the configuration itself."""

    engine_kwargs: Mapping[str, Any]
    prompt_length: int
    response_length: int
    max_model_len: int | None


def agent_settings(config: RolloutSection) -> AgentSettings:
    """The validated settings of `rollout.engine_kwargs.agent`, in accord with verl's own.

    Raises:
        SettingsError: a setting is unknown, has a wrong value, or contradicts one of verl's.
    """
    values = config.engine_kwargs.get("agent")
    if OmegaConf.is_config(values):
        values = OmegaConf.to_container(values, resolve=True)
    settings = build_settings(AgentSettings, values)
    budget = config.prompt_length + config.response_length
    if config.max_model_len is not None and config.max_model_len < budget:
        raise SettingsError(
            "actor_rollout_ref.rollout.max_model_len",
            config.max_model_len,
            f"at least data.max_prompt_length + data.max_response_length = {budget}",
            "Raise it, or leave it null.",
        )
    if settings.trace_dir is not None:
        _check_trace_dir(Path(settings.trace_dir))
    if not settings.tools:
        logger.warning("%s.tools is empty: every call of a tool will fail", AGENT_KEY)
    if not settings.mask_observations:
        logger.warning(
            "%s.mask_observations is False: the policy is trained on text it did not write. For study only.", AGENT_KEY
        )
    return settings


def _check_trace_dir(folder: Path) -> None:
    """Makes the folder now: that it cannot be written must not come out after the first rollout."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = f"It cannot be made ({error.strerror}); choose another, or leave it null."
        raise SettingsError(f"{AGENT_KEY}.trace_dir", str(folder), "a folder that can be written", remedy) from error
