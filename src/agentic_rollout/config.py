"""Settings: one mapping from the user, validated into frozen models.

The mapping is `actor_rollout_ref.rollout.engine_kwargs.agent` in verl's configuration. A key that is not known is
refused with the nearest one that is.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentic_rollout.errors import SettingsError

AGENT_KEY = "actor_rollout_ref.rollout.engine_kwargs.agent"

MISSING = "???"  # how Hydra writes a value that the user still has to give

Recovery = Literal["feedback", "stop"]


class Settings(BaseModel):
    """Base of all settings: immutable, and closed against unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LoopSettings(Settings):
    """Limits and rules of one trajectory. Token counts are in tokens of the model's own tokenizer."""

    max_turns: int = Field(default=4, ge=1, description="turns in which tools may be used")
    final_turn: bool = Field(default=True, description="after the last of them, one more turn without tools")
    final_instruction: str = Field(default="", description="text shown before the final turn")
    max_turn_tokens: int | None = Field(default=None, ge=1, description="limit of one generation")
    max_observation_tokens: int = Field(default=512, ge=1, description="limit of one observation, its tags included")
    reserve_answer_tokens: int = Field(default=32, ge=1, description="room an observation must leave for an answer")
    on_invalid: Recovery = Field(default="feedback", description="a turn without a valid action: go on or stop")
    on_eos: Recovery = Field(default="stop", description="the model ends the text without an action: go on or stop")
    on_tool_failure: Literal["show", "stop"] = Field(
        default="show", description="a tool failed: the model is shown the failure, or the trajectory stops"
    )


class AgentSettings(LoopSettings):
    """Everything under `engine_kwargs.agent`."""

    format: str | dict[str, Any] = Field(
        default="search_r1",
        description="built-in action format, or dotted path of your own, or {type: …, its settings}",
    )
    tools: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="name -> {type: built-in or dotted path, …its own settings}"
    )
    seed: int | None = Field(default=None, description="makes sampling repeatable; null follows verl's engine seed")
    trace_dir: str | None = Field(default=None, description="folder for trajectories as JSON lines")
    mask_observations: bool = Field(default=True, description="False trains on observations: for study only")


SettingsT = TypeVar("SettingsT", bound=BaseModel)


def build_settings(cls: type[SettingsT], values: Mapping[str, Any] | None, *, key: str = AGENT_KEY) -> SettingsT:
    """Validates a mapping into `cls`.

    Args:
        cls: the settings model.
        values: what the user wrote; None counts as empty.
        key: the mapping's own name, which error messages lead with.

    Raises:
        SettingsError: names the first key that is unknown or has a wrong value.
    """
    if values is not None and not isinstance(values, Mapping):
        raise SettingsError(key, values, "a mapping", "Write one setting per line under this key.")
    given = {str(name): value for name, value in (values or {}).items() if value != MISSING}
    try:
        return cls(**given)
    except ValidationError as error:
        raise _settings_error(cls, key, error) from None


def _settings_error(cls: type[BaseModel], key: str, error: ValidationError) -> SettingsError:
    problem = error.errors(include_url=False)[0]
    path = [str(part) for part in problem["loc"]]  # empty where settings contradict each other
    full = ".".join([key, *path])
    name = path[-1] if path else ""
    cls = _group(cls, path[:-1])
    if problem["type"] == "extra_forbidden":
        known = sorted(cls.model_fields)
        nearest = difflib.get_close_matches(name, known, n=1)
        remedy = f"Did you mean {nearest[0]!r}?" if nearest else "Remove it."
        return SettingsError(full, problem["input"], f"one of the settings {', '.join(known)}", remedy)
    if problem["type"] == "missing":
        return SettingsError(full, None, "a value", "Set it: it has no default.")
    expected = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    field = cls.model_fields.get(name)
    meaning = f" ({field.description})" if field is not None and field.description else ""
    return SettingsError(full, problem["input"], expected, f"Correct this setting{meaning}.")


def _group(cls: type[BaseModel], names: Sequence[str]) -> type[BaseModel]:
    """The model of a group of settings inside others."""
    for name in names:
        field = cls.model_fields.get(name)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            break
        cls = field.annotation
    return cls
