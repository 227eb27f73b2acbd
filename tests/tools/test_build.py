from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest

from agentic_rollout.errors import CorpusError, SettingsError
from agentic_rollout.tools.base import BaseTool, ToolContext
from agentic_rollout.tools.build import build_toolbox
from agentic_rollout.types import ToolRequest
from rollouts import run


class Echo(BaseTool):
    """A user's own tool."""

    def __init__(self, *, times: int = 1) -> None:
        self.times = times

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        return str(arguments["text"]) * self.times


class NoTool:
    timeout_s = 1.0


@pytest.fixture(autouse=True)
def _own_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file as a module that settings can name."""
    monkeypatch.setitem(sys.modules, "own_tools", sys.modules[__name__])


def settings_error(settings: dict[str, Any]) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        build_toolbox({"search": settings}, key="agent.tools")
    return caught.value


def test_no_tools_make_an_empty_toolbox() -> None:
    assert build_toolbox({}).names == ()


def test_own_tool_is_built_by_dotted_path_with_its_own_settings() -> None:
    toolbox = build_toolbox({"echo": {"type": "own_tools.Echo", "times": 3}})
    record = run(toolbox.call(ToolRequest("echo", {"text": "ab"}), ToolContext("row")))
    assert (toolbox.names, record.text) == (("echo",), "ababab")


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        ({}, "agent.tools.search.type", None),
        ({"type": 7}, "agent.tools.search.type", 7),
        ({"type": "bm52"}, "agent.tools.search.type", "bm52"),
        ({"type": "own_tools.Missing"}, "agent.tools.search.type", "own_tools.Missing"),
        ({"type": "own_tools.NoTool"}, "agent.tools.search.type", "own_tools.NoTool"),
        ({"type": "own_tools.Echo", "time": 3}, "agent.tools.search", {"time": 3}),
        ({"type": "bm25"}, "agent.tools.search.corpus", None),
        ({"type": "bm25", "corpus": "c", "topk": 0}, "agent.tools.search.topk", 0),
        ({"type": "bm25", "corpus": "c", "b": 1.5}, "agent.tools.search.b", 1.5),
        ({"type": "bm25", "corpus": "c", "timeout_s": 0}, "agent.tools.search.timeout_s", 0),
        ({"type": "bm25", "corpus": "c", "top_k": 3}, "agent.tools.search.top_k", 3),
    ],
)
def test_wrong_setting_of_a_tool_is_named_by_its_full_path(settings: dict[str, Any], key: str, value: object) -> None:
    error = settings_error(settings)
    assert (error.key, error.value) == (key, value)
    assert error.remedy


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"type": "bm52"}, "Did you mean 'bm25'?"),
        ({"type": "bm25", "corpus": "c", "top_k": 3}, "Did you mean 'topk'?"),
        ({"type": "own_tools.Echo", "time": 3}, "unexpected keyword argument 'time'"),
        ({"type": "own_tools.NoTool"}, "a member 'call'"),
    ],
)
def test_message_helps(settings: dict[str, Any], hint: str) -> None:
    assert hint in str(settings_error(settings))


def test_corpus_that_is_not_there_is_told_as_such() -> None:
    with pytest.raises(CorpusError, match="no/such/file"):
        build_toolbox({"search": {"type": "bm25", "corpus": "no/such/file"}})
