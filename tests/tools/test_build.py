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


CORPUS = {"type": "search", "source": "c"}


@pytest.fixture(autouse=True)
def _own_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file as a module that settings can name."""
    monkeypatch.setitem(sys.modules, "own_tools", sys.modules[__name__])


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_TOKEN", "SERPER_API_KEY", "SERPAPI_API_KEY", "GOOGLE_API_KEY", "GOOGLE_CX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("A_KEY", " k3y\n")
    monkeypatch.setenv("BAD_KEY", "k3y\r\nX-Other: 1")


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
        ({"type": "serach"}, "agent.tools.search.type", "serach"),
        ({"type": "own_tools.Missing"}, "agent.tools.search.type", "own_tools.Missing"),
        ({"type": "own_tools.NoTool"}, "agent.tools.search.type", "own_tools.NoTool"),
        ({"type": "own_tools.Echo", "time": 3}, "agent.tools.search", {"time": 3}),
        ({"type": "search"}, "agent.tools.search.source", None),
        ({**CORPUS, "source": ""}, "agent.tools.search.source", ""),
        ({**CORPUS, "topk": 0}, "agent.tools.search.topk", 0),
        ({**CORPUS, "timeout_s": 0}, "agent.tools.search.timeout_s", 0),
        ({**CORPUS, "cache_size": -1}, "agent.tools.search.cache_size", -1),
        ({**CORPUS, "top_k": 3}, "agent.tools.search.top_k", 3),
        ({**CORPUS, "http": {"attempts": 0}}, "agent.tools.search.http.attempts", 0),
        ({**CORPUS, "http": {"retries": 3}}, "agent.tools.search.http.retries", 3),
        ({**CORPUS, "http": 3}, "agent.tools.search.http", 3),
        ({**CORPUS, "source": "http://"}, "agent.tools.search.source", "http://"),
        ({**CORPUS, "source": "http://h", "token_env": "NO_TOKEN"}, "agent.tools.search.token_env", "NO_TOKEN"),
        ({**CORPUS, "source": "serper"}, "agent.tools.search.api_key_env", "SERPER_API_KEY"),
        ({**CORPUS, "source": "serpapi"}, "agent.tools.search.api_key_env", "SERPAPI_API_KEY"),
        ({**CORPUS, "source": "google"}, "agent.tools.search.api_key_env", "GOOGLE_API_KEY"),
        ({**CORPUS, "source": "google", "api_key_env": "A_KEY"}, "agent.tools.search.engine_id_env", "GOOGLE_CX"),
        ({**CORPUS, "source": "serper", "api_key_env": "BAD_KEY"}, "agent.tools.search.api_key_env", "BAD_KEY"),
    ],
)
def test_wrong_setting_of_a_tool_is_named_by_its_full_path(settings: dict[str, Any], key: str, value: object) -> None:
    error = settings_error(settings)
    assert (error.key, error.value) == (key, value)
    assert error.remedy


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"type": "serach"}, "Did you mean 'search'?"),
        ({**CORPUS, "top_k": 3}, "Did you mean 'topk'?"),
        ({**CORPUS, "http": {"attempt": 3}}, "Did you mean 'attempts'?"),
        ({**CORPUS, "source": "serper"}, "Export SERPER_API_KEY"),
        ({"type": "own_tools.Echo", "time": 3}, "unexpected keyword argument 'time'"),
        ({"type": "own_tools.NoTool"}, "a member 'call'"),
    ],
)
def test_message_helps(settings: dict[str, Any], hint: str) -> None:
    assert hint in str(settings_error(settings))


def test_corpus_that_is_not_there_is_told_as_such() -> None:
    with pytest.raises(CorpusError, match="no/such/file"):
        build_toolbox({"search": {"type": "search", "source": "no/such/file"}})


def test_key_given_in_place_of_a_variables_name_is_not_repeated() -> None:
    error = settings_error({**CORPUS, "source": "serper", "api_key_env": "5f3a-k3y-1b2c"})
    assert error.key == "agent.tools.search.api_key_env"
    assert "k3y" not in str(error)


@pytest.mark.parametrize("source", ["serper", "serpapi", "http://h:1", "https://h/retrieve"])
def test_service_is_built_without_asking_it(source: str) -> None:
    settings = {**CORPUS, "source": source, "api_key_env": "A_KEY", "token_env": "A_KEY"}
    assert build_toolbox({"search": settings}).names == ("search",)
