"""What a tool tells about itself, and how its arguments are checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from agentic_rollout.errors import SettingsError, ToolError
from agentic_rollout.tools.base import BaseTool, Toolbox, ToolContext
from agentic_rollout.tools.build import build_toolbox
from agentic_rollout.tools.function import FunctionTool
from agentic_rollout.tools.schemas import json_schema, signature_schema, tool_schema
from agentic_rollout.tools.search import SearchTool
from agentic_rollout.types import ToolCall, ToolRequest, ToolStatus
from rollouts import run


class Place(BaseModel):
    """Where something is."""

    title: str
    floor: int = 0


async def weather(
    city: str,
    days: Annotated[int, Field(ge=1, le=7)] = 1,
    unit: Literal["C", "F"] = "C",
    place: Place | None = None,
    model_json: bool = False,
) -> str:
    """Forecasts the weather.

    For the whole day.

    Args:
        city: its name,
            in English.
        days (int): how many.

    Returns:
        The forecast.
    """
    return f"{city} {days!r} {unit} {place!r} {model_json}"


WEATHER = signature_schema(weather)
FORECAST: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"enum": ["C", "F"]},
        "at": {"type": "object", "properties": {"hour": {"type": "integer"}}, "required": ["hour"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}


class Forecast(BaseTool):
    """Forecasts."""

    schema: Mapping[str, Any] = {"description": "Forecasts the weather.", "parameters": FORECAST}

    def __init__(self) -> None:
        self.calls: list[Mapping[str, Any]] = []

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        self.calls.append(arguments)
        return "rain"


class Bare(BaseTool):
    """Takes anything.

    And says nothing about it.
    """

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        return str(dict(arguments))


def call(toolbox: Toolbox, name: str, arguments: Mapping[str, Any]) -> ToolCall:
    return run(toolbox.call(ToolRequest(name, arguments), ToolContext("row 7")))


# Schemas


def test_signature_and_docstring_make_the_schema() -> None:
    assert WEATHER.description == "Forecasts the weather.\n\nFor the whole day."
    properties = WEATHER.parameters["properties"]
    assert properties["city"] == {"type": "string", "description": "its name, in English."}
    assert properties["days"] == {"type": "integer", "minimum": 1, "maximum": 7, "default": 1}
    assert properties["unit"] == {"type": "string", "enum": ["C", "F"], "default": "C"}
    assert properties["model_json"] == {"type": "boolean", "default": False}
    assert set(WEATHER.parameters["$defs"]["Place"]["properties"]) == {"title", "floor"}
    assert WEATHER.parameters["required"] == ["city"]
    assert WEATHER.parameters["additionalProperties"] is False


def test_description_in_the_signature_counts_before_the_docstrings() -> None:
    def search(query: Annotated[str, Field(description="what to look for")]) -> str:
        """Searches.

        Args:
            query: words.
        """
        return query

    assert signature_schema(search).parameters["properties"]["query"]["description"] == "what to look for"


def test_toolbox_lists_its_tools_as_chat_templates_take_them() -> None:
    bare, forecast = Toolbox({"bare": Bare(), "forecast": Forecast()}).schemas()
    assert bare == {
        "type": "function",
        "function": {
            "name": "bare",
            "description": "Takes anything.\n\nAnd says nothing about it.",
            "parameters": {"type": "object"},
        },
    }
    function = {"name": "forecast", "description": "Forecasts the weather.", "parameters": FORECAST}
    assert forecast == {"type": "function", "function": function}


def test_search_tells_its_query() -> None:
    assert tool_schema(SearchTool.__new__(SearchTool)).parameters["required"] == ["query"]


@pytest.mark.parametrize(
    ("schema", "problem"),
    [("text", "a mapping"), ({"parameters": None}, "a mapping"), ({"parameters": {"type": "objekt"}}, "a JSON schema")],
)
def test_schema_that_is_none_is_refused(schema: object, problem: str) -> None:
    tool = Bare()
    tool.schema = schema  # type: ignore[attr-defined]
    with pytest.raises(SettingsError, match=problem):
        Toolbox({"bare": tool})


def variadic(*words: str) -> str:
    return " ".join(words)


def positional(word: str, /) -> str:
    return word


def odd(word: Toolbox) -> str:
    return str(word)


@pytest.mark.parametrize("function", [variadic, positional, odd])
def test_signature_that_json_cannot_fill_is_refused(function: Any) -> None:
    with pytest.raises(SettingsError, match="parameters with types that JSON can hold"):
        signature_schema(function)


# Checks

WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "'city' is missing"),
    ({"city": 7}, "'city' must be"),
    ({"city": None}, "not null"),
    ({"city": ["Rome"]}, "not an array"),
    ({"city": {"name": "Rome"}}, "not an object"),
    ({"city": "Rome", "days": "two"}, 'not the string "two"'),
    ({"city": "Rome", "days": 0}, "'days': "),
    ({"city": "Rome", "unit": "K"}, "'unit'"),
    ({"City": "Rome"}, "there is no argument 'City', did you mean 'city'?"),
    ({"city": "Rome", "xyz": 1}, "there is no argument 'xyz'"),
    ({"city": "x" * 9999, "days": "y" * 9999}, "not a string"),
]


@pytest.mark.parametrize("tool", [Forecast(), FunctionTool(weather)], ids=["JSON schema", "signature"])
@pytest.mark.parametrize(("arguments", "problem"), WRONG)
def test_wrong_arguments_are_told_before_the_tool_is_called(tool: Any, arguments: dict[str, Any], problem: str) -> None:
    record = call(Toolbox({"weather": tool}), "weather", arguments)
    assert (record.status, record.error) == (ToolStatus.BAD_ARGUMENTS, "ToolError")
    assert problem in record.text
    assert "The arguments are: city (string), days (integer, optional), unit (one of" in record.text
    assert len(record.text) < 1000
    assert not getattr(tool, "calls", ())


def test_nested_argument_is_named_by_its_path() -> None:
    for schema, arguments in [
        (json_schema("", FORECAST), {"city": "Rome", "at": {}}),
        (json_schema("", FORECAST), {"city": "Rome", "at": {"hour": "noon"}}),
    ]:
        with pytest.raises(ToolError, match=r"'at\.hour' (is missing|must be integer, not the string \"noon\")"):
            schema.check(arguments)
    with pytest.raises(ToolError, match=r"'place\.Place\.title' is missing|'place\.title' is missing"):
        WEATHER.check({"city": "Rome", "place": {}})


def test_only_the_first_problems_are_told() -> None:
    with pytest.raises(ToolError, match=r"'a'.*; .*'b'.*; .*'c'.*; 2 more\."):
        json_schema("", {"type": "object"} | {"properties": {n: {"type": "null"} for n in "abcde"}}).check(
            dict.fromkeys("abcde", 1)
        )


def test_schema_that_refers_elsewhere_fetches_nothing_and_checks_nothing() -> None:
    schema = json_schema("", {"properties": {"x": {"$ref": "http://127.0.0.1:1/schema.json"}}})
    assert schema.check({"x": 1}) == {"x": 1}


@given(st.dictionaries(st.text(max_size=3), st.none() | st.integers() | st.text(max_size=3) | st.lists(st.none())))
def test_any_arguments_are_taken_or_told(arguments: dict[str, Any]) -> None:
    for tool in (Forecast(), FunctionTool(weather)):
        record = call(Toolbox({"weather": tool}), "weather", arguments)
        assert record.status is ToolStatus.BAD_ARGUMENTS  # no city among the names


# Functions as tools


def test_function_gets_the_arguments_as_its_types() -> None:
    arguments = {"city": "Rome", "days": "3", "place": {"title": "roof"}}
    record = call(Toolbox({"weather": FunctionTool(weather)}), "weather", arguments)
    assert record.text == "Rome 3 C Place(title='roof', floor=0) False"
    assert record.arguments == arguments


def whoami(context: ToolContext, loud: bool = False) -> str:
    return context.trajectory_id.upper() if loud else context.trajectory_id


def test_function_without_a_coroutine_runs_in_a_thread_and_may_want_the_context() -> None:
    import asyncio

    toolbox = Toolbox({"whoami": FunctionTool(whoami)})
    assert toolbox.schemas()[0]["function"]["parameters"]["properties"].keys() == {"loud"}
    record = asyncio.run(toolbox.call(ToolRequest("whoami", {"loud": True}), ToolContext("row 7")))
    assert record.text == "ROW 7"


def test_function_that_returns_no_text_has_failed() -> None:
    async def nothing() -> None:
        return None

    assert call(Toolbox({"nothing": FunctionTool(nothing)}), "nothing", {}).status is ToolStatus.ERROR


def test_function_is_a_tool_by_its_dotted_path(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "own_functions", sys.modules[__name__])
    toolbox = build_toolbox({"weather": {"type": "own_functions.weather", "timeout_s": 3}})
    assert call(toolbox, "weather", {"city": "Rome"}).text == "Rome 1 C None False"
    with pytest.raises(SettingsError, match="unexpected keyword argument 'time'"):
        build_toolbox({"weather": {"type": "own_functions.weather", "time": 3}})
