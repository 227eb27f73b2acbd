from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path

import pytest

from agentic_rollout import errors
from agentic_rollout.errors import AgenticRolloutError, SettingsError, ToolError

CLASSES = {name: cls for name, cls in vars(errors).items() if inspect.isclass(cls)}


def test_all_errors_have_one_base() -> None:
    assert all(issubclass(cls, AgenticRolloutError) for cls in CLASSES.values())


def test_docstring_draws_every_error_of_the_package() -> None:
    """Those of the demo too, which are read from the source: to import it takes torch."""
    source = "".join(path.read_text(encoding="utf-8") for path in Path(errors.__file__).parent.rglob("*.py"))
    defined = re.findall(r"^class (\w+)\(AgenticRolloutError\):", source, re.MULTILINE)
    drawn = [line.split()[1] for line in (errors.__doc__ or "").splitlines() if "──" in line]
    assert sorted(drawn) == sorted(defined)


@pytest.mark.parametrize("name", sorted(set(CLASSES) - {"SettingsError"}))
def test_error_survives_the_way_between_processes(name: str) -> None:
    copy = pickle.loads(pickle.dumps(CLASSES[name]("what happened")))
    assert type(copy) is CLASSES[name]
    assert str(copy) == "what happened"


def test_settings_error_keeps_its_parts_between_processes() -> None:
    error = SettingsError("agent.max_turns", 0, "at least 1", "Raise it.")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) == "agent.max_turns: got 0, expected at least 1. Raise it."
    assert (copy.key, copy.value, copy.expected, copy.remedy) == ("agent.max_turns", 0, "at least 1", "Raise it.")


def test_tool_error_keeps_its_status_between_processes() -> None:
    assert pickle.loads(pickle.dumps(ToolError("busy", status="timeout"))).status == "timeout"
