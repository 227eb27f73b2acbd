"""Our tools as verl 0.9 loads them for its own agent loop."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentic_rollout.errors import SettingsError
from agentic_rollout.verl_plugin.launch import config_dir
from lines import verl09

pytestmark = [
    verl09,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # verl, Ray and vLLM warn on import
]


@pytest.fixture(autouse=True)
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"id": "1", "contents": '"Rhône"\nThe river of Lyon is the Rhône.'}) + "\n")
    monkeypatch.setenv("SEARCH_SOURCE", str(path))
    return path


def load(file: str, functions: str | None = None) -> dict[str, Any]:
    from verl.tools.tool_registry import load_all_tools

    folder = config_dir() / "tools"
    tools = load_all_tools(None if functions else str(folder / file), str(folder / functions) if functions else None)
    return {tool.name: tool for tool in tools}


def call(tool: Any, **arguments: Any) -> tuple[str, dict[str, Any]]:
    async def run() -> tuple[str, dict[str, Any]]:
        instance, _ = await tool.create(create_kwargs={})
        response, reward, facts = await tool.execute(instance, arguments, agent_data=None)
        await tool.release(instance)
        assert reward == 0.0
        return response.text, facts

    return asyncio.run(run())


def test_shipped_file_of_native_tools_is_loaded_and_works() -> None:
    tools = load("tool_agent.yaml")
    assert set(tools) == {"search", "python"}
    text, facts = call(tools["search"], query="river of Lyon")
    assert "The river of Lyon is the Rhône." in text
    assert facts["status"] == "ok"
    assert call(tools["python"], code="print(6 * 7)")[0].strip() == "42"
    schema = tools["search"].tool_schema.model_dump(exclude_none=True)
    assert schema["function"]["name"] == "search"
    assert list(schema["function"]["parameters"]["properties"]) == ["query"]


def test_a_failed_call_is_shown_and_typed() -> None:
    text, facts = call(load("tool_agent.yaml")["search"], question="river")
    assert facts == {**facts, "status": "bad_arguments", "failed": True}
    assert "query" in text


def test_shipped_file_of_function_tools_is_loaded_and_works() -> None:
    tools = load("", "functions.py")
    assert set(tools) == {"search", "python"}
    assert "Rhône" in asyncio.run(tools["search"].call({"query": "river of Lyon"}))
    assert asyncio.run(tools["python"].call({"code": "print(6 * 7)"})).strip() == "42"


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"tool": {"type": "python"}}, "tools.config.name"),
        ({"name": "python"}, "tools.config.tool"),
        ({"name": "python", "tool": {"type": "pyhton"}}, "tools.config.python.type"),
    ],
)
def test_wrong_settings_are_named(config: dict[str, Any], key: str) -> None:
    from agentic_rollout.verl_plugin.tools import VerlTool

    with pytest.raises(SettingsError, match=key):
        VerlTool(config)
