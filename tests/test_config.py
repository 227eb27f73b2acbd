from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, ValidationError, model_validator

from agentic_rollout.config import AGENT_KEY, AgentSettings, Settings, build_settings
from agentic_rollout.errors import SettingsError

AGENT_CONFIGS = Path(__file__).parents[1] / "configs" / "agent"


def settings_error(values: Any) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        build_settings(AgentSettings, values)
    return caught.value


@pytest.mark.parametrize("values", [None, {}])
def test_nothing_given_means_defaults(values: dict[str, Any] | None) -> None:
    assert build_settings(AgentSettings, values) == AgentSettings()


def test_values_are_taken_over() -> None:
    settings = build_settings(AgentSettings, {"max_turns": 2, "tools": {"search": {"type": "search"}}, "seed": 7})
    assert (settings.max_turns, settings.tools, settings.seed) == (2, {"search": {"type": "search"}}, 7)


@pytest.mark.parametrize(
    ("key", "nearest"), [("max_turn", "max_turns"), ("tool", "tools"), ("on_tool_failures", "on_tool_failure")]
)
def test_unknown_key_is_refused_with_the_nearest(key: str, nearest: str) -> None:
    error = settings_error({key: 3})
    assert error.key == f"{AGENT_KEY}.{key}"
    assert f"Did you mean '{nearest}'?" in str(error)


def test_unknown_key_without_likeness_is_told_to_go() -> None:
    error = settings_error({"zzz": 3})
    assert error.remedy == "Remove it."
    assert "max_turns" in error.expected


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("max_turns", 0, "greater than or equal to 1"),
        ("max_turns", "many", "integer"),
        ("max_turns", 2.5, "integer"),
        ("max_turn_tokens", 0, "greater than or equal to 1"),
        ("max_observation_tokens", None, "integer"),
        ("reserve_answer_tokens", 0, "greater than or equal to 1"),
        ("final_turn", "perhaps", "boolean"),
        ("on_invalid", "retry", "'feedback' or 'stop'"),
        ("on_eos", "", "'feedback' or 'stop'"),
        ("on_tool_failure", "feedback", "'show' or 'stop'"),
        ("tools", ["search"], "dictionary"),
    ],
)
def test_wrong_value_is_named_with_key_value_and_remedy(key: str, value: object, expected: str) -> None:
    error = settings_error({key: value})
    assert error.key == f"{AGENT_KEY}.{key}"
    assert error.value == value
    assert expected in error.expected
    assert str(error).startswith(f"{error.key}: got {value!r}, expected ")
    # The remedy says what the setting means.
    assert (AgentSettings.model_fields[key].description or "missing") in error.remedy


def test_value_that_hydra_marks_as_missing_counts_as_not_given() -> None:
    class Needy(Settings):
        corpus: str

    with pytest.raises(SettingsError, match=r"expected a value\. Set it") as caught:
        build_settings(Needy, {"corpus": "???"}, key="agent.tools.search")
    assert (caught.value.key, caught.value.value) == ("agent.tools.search.corpus", None)


def test_wrong_value_inside_a_tool_is_named_by_its_full_path() -> None:
    assert settings_error({"tools": {"search": "corpus.jsonl"}}).key == f"{AGENT_KEY}.tools.search"


@pytest.mark.parametrize("values", ["search", 3, ["max_turns"]])
def test_anything_but_a_mapping_is_refused(values: object) -> None:
    error = settings_error(values)
    assert (error.key, error.value) == (AGENT_KEY, values)


def test_settings_cannot_be_changed() -> None:
    settings = AgentSettings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.max_turns = 5  # type: ignore[misc]
    assert settings.max_turns == 4


def test_settings_do_not_follow_the_mapping_they_came_from() -> None:
    tools: dict[str, dict[str, Any]] = {"search": {"type": "search"}}
    settings = build_settings(AgentSettings, {"tools": tools})
    tools["search"]["type"] = "other"
    tools["more"] = {}
    assert settings.tools == {"search": {"type": "search"}}


def test_every_setting_says_what_it_means() -> None:
    assert [name for name, field in AgentSettings.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("path", sorted(AGENT_CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configuration_is_valid(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    values = yaml.safe_load(path.read_text())
    settings = build_settings(AgentSettings, values)
    assert settings.model_dump(include=set(values)) == values


class Limits(Settings):
    """A group of settings inside others."""

    low: int = Field(default=0, ge=0, description="the least")
    high: int = 9

    @model_validator(mode="after")
    def _in_order(self) -> Limits:
        if self.low > self.high:
            raise ValueError("low to be at most high")
        return self


class Grouped(Settings):
    limits: Limits = Limits()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lowe": 1}, "agent.limits.lowe: got 1, expected one of the settings high, low. Did you mean 'low'?"),
        (
            {"low": -1},
            "agent.limits.low: got -1, expected greater than or equal to 0. Correct this setting (the least).",
        ),
        ({"low": 10}, "agent.limits: got {'low': 10}, expected low to be at most high. Correct this setting."),
    ],
)
def test_setting_of_a_group_is_named_in_full(values: dict[str, int], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        build_settings(Grouped, {"limits": values}, key="agent")
    assert str(caught.value) == message


def test_contradiction_without_a_key_is_told() -> None:
    with pytest.raises(SettingsError, match=r"agent: got .* expected low to be at most high"):
        build_settings(Limits, {"low": 10}, key="agent")
