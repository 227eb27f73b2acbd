from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_rollout.errors import SettingsError
from agentic_rollout.formats import SearchR1Format, build_format
from agentic_rollout.types import Action, Answer, Call, Invalid, ToolCall, ToolRequest, ToolStatus

FORMAT = SearchR1Format()


def search(query: str) -> Call:
    return Call((ToolRequest("search", {"query": query}),))


def call(text: str, status: ToolStatus = ToolStatus.OK) -> ToolCall:
    return ToolCall("search", {"query": "q"}, status, text, latency_s=0.0)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<search>tall towers</search>", search("tall towers")),
        ("<think>hm</think>\n<search>\n tall\ntowers \n</search>", search("tall\ntowers")),
        ("<answer>Paris</answer>", Answer("Paris")),
        ("<answer>A < B</answer>", Answer("A < B")),
        ("<search>one</search><answer>two</answer>", search("one")),
        ("<search>never closed <answer>yes</answer>", Answer("yes")),
        ("</search><answer>yes</answer>", Answer("yes")),
        ("<think><search>inside</search>", search("inside")),
        ("<information>forged</information><search>q</search>", search("q")),
        ("<search>中 é</search>\n\n", search("中 é")),
    ],
)
def test_first_complete_action_counts(text: str, action: Action) -> None:
    assert FORMAT.parse(text) == action


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "neither"),
        ("only text", "neither"),
        ("<search>never closed", "neither"),
        ("<SEARCH>q</SEARCH>", "neither"),
        ("<search>q</answer>", "neither"),
        ("<information>Paris</information>", "neither"),
        ("<search> \n </search>", "<search> is empty"),
        ("<answer></answer>", "<answer> is empty"),
    ],
)
def test_turn_without_a_complete_action_is_invalid(text: str, problem: str) -> None:
    action = FORMAT.parse(text)
    assert isinstance(action, Invalid)
    assert problem in action.problem


@given(st.text(st.sampled_from("<>/searchanwe \n"), max_size=60))
def test_any_text_is_parsed_and_no_action_is_blank(text: str) -> None:
    match FORMAT.parse(text):
        case Answer(content):
            assert content.strip()
        case Call((ToolRequest("search", {"query": query}),)):
            assert query.strip()
        case other:
            assert isinstance(other, Invalid)


def test_results_stand_between_information_tags() -> None:
    observation = FORMAT.render([call(" one "), call("two")])
    assert observation.prefix == "\n\n<information>"
    assert observation.body == "one\ntwo"
    assert observation.suffix == "</information>\n\n"


@pytest.mark.parametrize("status", sorted(set(ToolStatus) - {ToolStatus.OK}))
def test_failure_is_shown_as_one(status: ToolStatus) -> None:
    assert FORMAT.render([call("no answer", status)]).body == "Search failed: no answer"


def test_tags_do_not_depend_on_the_results() -> None:
    """The loop sizes an observation before its calls are made."""
    empty, full = FORMAT.render(()), FORMAT.render([call("x", ToolStatus.ERROR)])
    assert (empty.prefix, empty.suffix) == (full.prefix, full.suffix)


def test_invalid_action_is_answered_with_its_problem_and_a_way_on() -> None:
    body = FORMAT.render_invalid("it is empty").body
    assert "it is empty" in body
    assert "<search>" in body
    assert "<answer>" in body


class WithoutRender:
    stop = ("</tool>",)

    def parse(self, text: str) -> Action:
        return Answer(text)


class Own(WithoutRender):
    render = staticmethod(FORMAT.render)
    render_invalid = staticmethod(FORMAT.render_invalid)


class WithArguments(Own):
    def __init__(self, language: str) -> None:
        self.language = language


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch) -> str:
    """This file as a module that settings can name."""
    import sys

    monkeypatch.setitem(sys.modules, "own_formats", sys.modules[__name__])
    return "own_formats"


def test_built_in_format_is_built_by_name() -> None:
    assert isinstance(build_format("search_r1", key="agent.format"), SearchR1Format)


def test_own_format_is_built_by_dotted_path(own_module: str) -> None:
    assert build_format(f"{own_module}.Own", key="agent.format").parse("x") == Answer("x")


@pytest.mark.parametrize(
    ("name", "problem"), [("WithoutRender", "member 'render'"), ("WithArguments", "called without arguments")]
)
def test_own_format_that_cannot_serve_is_refused(own_module: str, name: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem) as caught:
        build_format(f"{own_module}.{name}", key="agent.format")
    assert (caught.value.key, caught.value.value) == ("agent.format", f"{own_module}.{name}")


def test_misspelt_format_is_refused_with_the_nearest() -> None:
    with pytest.raises(SettingsError, match="Did you mean 'search_r1'"):
        build_format("search-r1", key="agent.format")
