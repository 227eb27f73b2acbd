"""Formats in which the model writes code: by tags, with search beside it, and in Markdown fences."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_rollout.config import LoopSettings
from agentic_rollout.engines.scripted import ScriptedEngine
from agentic_rollout.errors import SettingsError
from agentic_rollout.formats import (
    ActionFormat,
    CodeFormat,
    FencedCodeFormat,
    SearchCodeFormat,
    SearchR1Format,
    build_format,
)
from agentic_rollout.loop import AgentLoop, Prompt
from agentic_rollout.tools.base import BaseTool, Toolbox
from agentic_rollout.types import (
    Action,
    Answer,
    Call,
    Invalid,
    StopReason,
    ToolCall,
    ToolRequest,
    ToolStatus,
    Trajectory,
)
from rollouts import CODEC, EOS, ScriptedTool, observations, play, run, spoken

TAGS = CodeFormat()
BOTH = SearchCodeFormat()
FENCED = FencedCodeFormat()


class Echo(BaseTool):
    """Shows the code that it was given, its lines numbered."""

    async def call(self, arguments: Any, context: Any) -> str:
        return "".join(f"  {number}: {line}\n" for number, line in enumerate(arguments["code"].splitlines(), start=1))


def python(code: str) -> Call:
    return Call((ToolRequest("python", {"code": code}),))


def record(text: str, status: ToolStatus = ToolStatus.OK, *, tool: str = "python") -> ToolCall:
    return ToolCall(tool, {}, status, text, latency_s=0.0)


def roll_out(action_format: ActionFormat, turns: list[str], **changes: Any) -> Trajectory:
    loop = AgentLoop(
        ScriptedEngine(play({0: [spoken(turn) for turn in turns]}), CODEC, eos_token_id=EOS),
        Toolbox({"search": ScriptedTool(), "python": Echo()}),
        action_format,
        CODEC,
        LoopSettings(**changes),
        prompt_length=4,
        response_length=2000,
    )
    return run(loop.run(Prompt((0,), "row")))


# Tags


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<code>print(1)</code>", python("print(1)")),
        ("<think>hm</think>\n<code>\nif x:\n    y\n</code>", python("if x:\n    y")),
        ("<code>\n\n    indented = 1\n</code>", python("    indented = 1")),
        ("<code> a = 1\nb = 2 </code>", python("a = 1\nb = 2")),
        ("<code>\n```python\nif x:\n    y\n```\n</code>", python("if x:\n    y")),
        ("<code>```py\nx\n```</code>", python("x")),
        ("<code>\n```\nx\n```\n</code>", python("x")),
        ("<code>s = '''\n```python\n'''</code>", python("s = '''\n```python\n'''")),
        ("<answer> 7 </answer>", Answer("7")),
        ("<code>1</code><answer>2</answer>", python("1")),
    ],
)
def test_code_tag_calls_python_and_keeps_the_layout(text: str, action: Action) -> None:
    assert TAGS.parse(text) == action


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<search>q</search>", "it has neither <code>…</code> nor <answer>…</answer>"),
        ("<code>never closed", "it has neither"),
        ("<code> \n </code>", "<code> is empty"),
        ("<code>\n</code>", "<code> is empty"),
    ],
)
def test_turn_without_code_or_answer_is_invalid(text: str, problem: str) -> None:
    action = TAGS.parse(text)
    assert isinstance(action, Invalid)
    assert problem in action.problem


def test_output_keeps_its_indentation() -> None:
    observation = TAGS.render([record("\n\n  a\n b\n\n")])
    assert (observation.prefix, observation.body, observation.suffix) == (
        "\n\n<observation>",
        "  a\n b",
        "</observation>\n\n",
    )


def test_failed_execution_is_shown_as_one() -> None:
    assert TAGS.render([record(" no sandbox ", ToolStatus.UNAVAILABLE)]).body == "Execution failed: no sandbox"


def test_each_tag_calls_its_tool_and_is_observed_in_its_own() -> None:
    turns = ["<search>rivers</search>", "<code>\nx = 1\n</code>", "<search>towns</search>", "<answer>7</answer>"]
    trajectory = roll_out(BOTH, turns)
    assert trajectory.answer == "7"
    assert [call.name for call in trajectory.tool_calls] == ["search", "python", "search"]
    assert observations(trajectory) == [
        "\n\n<information>about rivers</information>\n\n",
        "\n\n<observation>  1: x = 1</observation>\n\n",
        "\n\n<information>about towns</information>\n\n",
    ]


@given(st.text(st.sampled_from("ab \n"), max_size=80), st.integers(32, 60), st.sampled_from(["search", "code"]))
def test_closing_tag_of_each_tool_survives(content: str, limit: int, tag: str) -> None:
    trajectory = roll_out(BOTH, [f"<{tag}>x{content}</{tag}>", "<answer>7</answer>"], max_observation_tokens=limit)
    (shown,) = observations(trajectory)
    name = {"search": "information", "code": "observation"}[tag]
    assert shown.startswith(f"\n\n<{name}>")
    assert shown.endswith(f"</{name}>\n\n")
    assert len(shown) <= limit


def test_observation_limit_counts_the_longest_tags_of_any_tool() -> None:
    settings: dict[str, Any] = {"search": {"tool": "search", "argument": "query", "observation": "o"}}
    settings["code"] = {"tool": "python", "argument": "code", "observation": "o" * 100}
    action_format = build_format({"type": "tags", "tags": settings}, key="format")
    with pytest.raises(SettingsError, match="at least 210"):
        roll_out(action_format, ["<answer>7</answer>"], max_observation_tokens=209)


def test_advice_names_every_tag() -> None:
    assert BOTH.render_invalid("it is empty").body == (
        "That action cannot be carried out: it is empty. Write a query between <search> and </search> to look "
        "something up, Python code between <code> and </code> to run it, or the final answer between <answer> and "
        "</answer>."
    )
    assert SearchR1Format().render_invalid("it is empty").body == (
        "That action cannot be carried out: it is empty. Write a query between <search> and </search> to look "
        "something up, or the final answer between <answer> and </answer>."
    )


@given(st.text(st.sampled_from("<>/searchcodanw \n`"), max_size=60))
def test_any_text_is_parsed_by_every_format(text: str) -> None:
    for action_format in (TAGS, BOTH, FENCED):
        match action_format.parse(text):
            case Answer(content):
                assert content.strip()
            case Call(requests):
                assert all(value.strip() for request in requests for value in request.arguments.values())
            case other:
                assert isinstance(other, Invalid)


# Fences


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("Let me see.\n```python\nif x:\n    y\n```\n", python("if x:\n    y")),
        ("```py\nx\n```\n", python("x")),
        ("```Python title='a'\nx\n```\n\n", python("x")),
        ("```python\nx\n```", python("x")),
        ("```python\nx\n```<|im_end|>", python("x")),
        ("```json\n{}\n```\n```python\nx\n```\n", python("x")),
        ("`x` and ```y``` are inline\n```python\nx\n```\n", python("x")),
        ("<answer>7</answer>", Answer("7")),
        ("<answer>7</answer>\n```python\nx\n```\n", Answer("7")),
        ("```python\nx\n```\n<answer>7</answer>", python("x")),
        ("As data:\n```json\n{}\n```\n", Call(())),
        ("A block:\n```\n", Call(())),
        ("end of a block\n```\n", Call(())),
    ],
)
def test_closed_block_of_python_is_a_call(text: str, action: Action) -> None:
    assert FENCED.parse(text) == action


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "neither"),
        ("```python\nx", "neither"),
        ("```python\nx```", "neither"),
        ("```python\n\n```\n", "the ```python block is empty"),
        ("<answer> </answer>", "<answer> is empty"),
    ],
)
def test_turn_without_a_closed_block_is_invalid(text: str, problem: str) -> None:
    action = FENCED.parse(text)
    assert isinstance(action, Invalid)
    assert problem in action.problem


def test_generation_stops_at_the_end_of_a_block_and_goes_on_after_its_output() -> None:
    turns = ["First:\n```python\nx = 1\n```\nThe output is 5.", "So <answer>1</answer>"]
    trajectory = roll_out(FENCED, turns)
    assert [CODEC.decode(segment.token_ids) for segment in trajectory.segments] == [
        "First:\n```python\nx = 1\n```\n",
        "\n```output\n  1: x = 1\n```\n",
        "So <answer>1</answer>",
    ]


def test_text_goes_on_after_a_block_of_another_language() -> None:
    trajectory = roll_out(FENCED, ["Data:\n```json\n{}\n```\n", "```python\nx\n```\n", "<answer>1</answer>"])
    assert [segment.sampled for segment in trajectory.segments] == [True, True, False, True]
    assert (trajectory.answer, trajectory.invalid_turns) == ("1", 0)
    assert [call.arguments for call in trajectory.tool_calls] == [{"code": "x"}]


def test_text_that_goes_on_and_on_ends_with_the_turns() -> None:
    trajectory = roll_out(FENCED, ["more\n```\n"], max_turns=3)
    assert (trajectory.stop_reason, trajectory.num_turns) == (StopReason.MAX_TURNS, 4)


# Settings


def test_tags_can_be_set() -> None:
    tags = {"calc": {"tool": "sums", "argument": "expression", "observation": "result", "failure": "No: "}}
    action_format = build_format({"type": "tags", "tags": tags}, key="format")
    assert action_format.stop == ("</calc>", "</answer>")
    assert action_format.parse("<calc> 1+1 </calc>") == Call((ToolRequest("sums", {"expression": "1+1"}),))
    assert action_format.render([record("x", ToolStatus.ERROR, tool="sums")]).body == "No: x"


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ({"type": "tags"}, "format.tags"),
        ({"type": "tags", "tags": {}}, "format.tags"),
        (
            {"type": "tags", "tags": {"a b": {"tool": "t", "argument": "a", "observation": "o"}}},
            "format.tags.a b.[key]",
        ),
        ({"type": "tags", "tags": {"answer": {"tool": "t", "argument": "a", "observation": "o"}}}, "format.tags"),
        ({"type": "tags", "tags": {"a": {"tool": "t", "argument": "a"}}}, "format.tags.a.observation"),
        ({"type": "code_r1", "tag": "x"}, "format"),
        ({"tags": {}}, "format.type"),
        ({"type": "code-r1"}, "format"),
    ],
)
def test_wrong_setting_of_a_format_is_named(setting: dict[str, Any], key: str) -> None:
    with pytest.raises(SettingsError) as caught:
        build_format(setting, key="format")
    assert caught.value.key == key
