"""The examples of the documents work, and their tables know every setting."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentic_rollout.cli import build_parser
from agentic_rollout.codec import ByteCodec
from agentic_rollout.config import AgentSettings, LoopSettings, Settings
from agentic_rollout.engines.scripted import ScriptedEngine, scripted_turns
from agentic_rollout.formats import HermesSettings, build_format
from agentic_rollout.loop import AgentLoop, Prompt
from agentic_rollout.search.http import HttpSettings
from agentic_rollout.tools.access import AccessSettings
from agentic_rollout.tools.build import build_toolbox
from agentic_rollout.tools.mcp import McpSettings
from agentic_rollout.tools.python import PythonSettings
from agentic_rollout.tools.search import SearchSettings
from agentic_rollout.types import ToolStatus, Trajectory
from rollouts import run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CODEC = ByteCodec()


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The marked code blocks as importable files."""
    found = re.findall(r"<!-- example: (\w+\.py) -->\n```python\n(.*?)```", README, flags=re.DOTALL)
    for name, code in found:
        assert len([line for line in code.splitlines() if line.strip()]) <= 20
        (tmp_path / name).write_text(code)
    assert {name for name, _ in found} == {"my_tools.py", "my_formats.py"}
    (tmp_path / "glossary.txt").write_text("vesk: a harbour lamp\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def glossary_rollout(examples: Path, format_name: str, first_turn: str, answer_turn: str) -> Trajectory:
    """Looks a term up, then answers with what it has read."""

    def turns(context: str) -> str:
        return first_turn if first_turn not in context else answer_turn

    loop = AgentLoop(
        ScriptedEngine(scripted_turns(turns, CODEC), CODEC),
        build_toolbox({"search": {"type": "my_tools.Glossary", "path": str(examples / "glossary.txt")}}),
        build_format(format_name, key="format"),
        CODEC,
        LoopSettings(),
        prompt_length=64,
        response_length=512,
    )
    return run(loop.run(Prompt(tuple(CODEC.encode("What is a vesk? ")), "row")))


def test_example_tool_answers_the_model(examples: Path) -> None:
    trajectory = glossary_rollout(examples, "search_r1", "<search>Vesk</search>", "<answer>a harbour lamp</answer>")
    assert trajectory.answer == "a harbour lamp"
    assert [call.text for call in trajectory.tool_calls] == ["a harbour lamp"]


def test_example_tool_fails_with_a_type(examples: Path) -> None:
    trajectory = glossary_rollout(examples, "search_r1", "<search>Quorl</search>", "<answer>unknown</answer>")
    assert [call.status for call in trajectory.tool_calls] == [ToolStatus.ERROR]
    assert "no entry for 'quorl'" in CODEC.decode(trajectory.response_ids)


def test_example_format_acts_observes_and_answers(examples: Path) -> None:
    trajectory = glossary_rollout(examples, "my_formats.BracketFormat", "[lookup: vesk]", "[final: a harbour lamp]")
    assert trajectory.answer == "a harbour lamp"
    assert "\n[result: a harbour lamp]\n" in CODEC.decode(trajectory.response_ids)


def test_settings_table_is_complete() -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", README.partition("## Settings")[2], flags=re.MULTILINE))
    assert documented >= set(AgentSettings.model_fields)


@pytest.mark.parametrize("settings", [SearchSettings, HttpSettings, AccessSettings])
def test_settings_of_search_are_documented(settings: type[Settings]) -> None:
    documented = set(re.findall(r"\w+", (ROOT / "docs" / "search.md").read_text()))
    assert set(settings.model_fields) <= documented


def test_documented_commands_are_accepted() -> None:
    text = "".join((ROOT / "docs" / name).read_text() for name in ("search.md", "tools.md"))
    commands = re.findall(r"^agentic-rollout (.+?)(?: +#.*)?$", text, flags=re.MULTILINE)
    assert len(commands) >= 10
    for command in commands:
        build_parser().parse_args(command.split())


@pytest.mark.parametrize("settings", [PythonSettings, McpSettings, HermesSettings])
def test_settings_of_tools_are_documented(settings: type[Settings]) -> None:
    documented = set(re.findall(r"\w+", (ROOT / "docs" / "tools.md").read_text()))
    assert set(settings.model_fields) <= documented
