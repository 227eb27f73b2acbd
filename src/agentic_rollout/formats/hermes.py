"""Tool calls as JSON within `<tool_call>` tags, as Hermes and Qwen models are trained to write them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated

import orjson
from pydantic import Field

from agentic_rollout.config import Settings
from agentic_rollout.types import Action, Answer, Call, Invalid, Observation, ToolCall, ToolRequest, ToolStatus

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)
_CUT_OFF = "the turn was cut off before its end"
_CONTEXT_CHARS = 20


class HermesSettings(Settings):
    """Settings of the format `hermes`; the markers are those of the chat template (by default ChatML: Qwen, Hermes)."""

    turn_end: str = Field(default="<|im_end|>", min_length=1, description="what ends a turn")
    other_ends: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=("<|endoftext|>",), description="further end-of-sequence tokens"
    )
    between_turns: str = Field(default="\n", description="between the end of a turn and the next")
    user_start: str = Field(default="<|im_start|>user\n", description="how a turn of the user begins")
    assistant_start: str = Field(default="<|im_start|>assistant\n", description="how a turn of the model begins")
    max_calls: int = Field(default=8, ge=1, description="calls of one turn that are made")
    answer_tag: str | None = Field(
        default=None,
        pattern=r"^\w+$",
        description="a turn without a call must answer within this tag; null: it answers",
    )


class HermesFormat:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as often as the model likes; `<tool_response>` observes.

    A turn ends at the end-of-sequence token, not at a stop string, so that several calls fit into it; they run side by
    side, and each result keeps its own tags, in the order of the calls. A turn without a call is the final answer. What
    the model thinks, up to `</think>`, is no action.

    A call that cannot be read is answered with what is wrong, next to the results of the others; where no call of the
    turn can be read, the turn is invalid. A turn that a token limit cuts off is invalid too, whatever it holds.

    The turn's own end has been sampled; the markers of the turns that follow are tokens of the environment. Leave the
    setting `final_instruction` empty, or word it as the beginning of the model's last turn: that is where it stands.
    """

    stop: Sequence[str] = ()

    def __init__(self, settings: HermesSettings | None = None) -> None:
        self._settings = settings or HermesSettings()
        self._ends = (self._settings.turn_end, *self._settings.other_ends)

    def parse(self, text: str) -> Action:
        end = next((end for end in self._ends if text.endswith(end)), None)
        if end is None:
            return Invalid(_CUT_OFF)
        text = text.removesuffix(end)
        thoughts, closing, after = text.partition("</think>")  # a template may have opened the tag
        spoken = after if closing else thoughts
        if not closing and "<think>" in text:
            return Invalid("<think> is not closed")
        requests = [_parse_call(match) for match in _CALL.finditer(spoken)]
        if not requests:
            return self._parse_answer(spoken)
        problems = [request.problem for request in requests if request.problem is not None]
        if len(problems) == len(requests):
            return Invalid("; ".join(problems[: self._settings.max_calls]))
        return Call(_limited(requests, self._settings.max_calls))

    def render(self, calls: Sequence[ToolCall]) -> Observation:
        parts = tuple(
            Observation("\n" * (index > 0) + "<tool_response>\n", _shown(call), "\n</tool_response>")
            for index, call in enumerate(calls)
        )
        return self._user_turn(parts)

    def render_invalid(self, problem: str) -> Observation:
        answer = "the final answer"
        if self._settings.answer_tag is not None:
            answer += f" between <{self._settings.answer_tag}> and </{self._settings.answer_tag}>"
        body = (
            f"That turn cannot be carried out: {problem}. Write each tool call as JSON between <tool_call> and "
            f'</tool_call>, with the keys "name" and "arguments", or {answer}.'
        )
        return self._user_turn(body, before=self._settings.turn_end if problem == _CUT_OFF else "")

    def _user_turn(self, body: str | tuple[Observation, ...], *, before: str = "") -> Observation:
        markers = self._settings
        return Observation(
            before + markers.between_turns + markers.user_start,
            body,
            markers.turn_end + markers.between_turns + markers.assistant_start,
        )

    def _parse_answer(self, text: str) -> Action:
        text = _THINKING.sub("", text).strip()
        tag = self._settings.answer_tag
        if tag is not None:
            match = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
            if match is None:
                return Invalid(f"it has neither <tool_call>…</tool_call> nor <{tag}>…</{tag}>")
            text = match[1].strip()
        return Answer(text) if text else Invalid("it has neither a tool call nor an answer")


def _parse_call(match: re.Match[str]) -> ToolRequest:
    content, closing = match.groups()
    try:
        call = orjson.loads(content.strip())
    except orjson.JSONDecodeError as error:
        if not closing:
            return ToolRequest("", {}, "<tool_call> is not closed")
        return ToolRequest("", {}, f"the text in <tool_call> is no valid JSON: {_place(error)}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolRequest("", {}, 'a tool call must be a JSON object with the keys "name" and "arguments"')
    name, arguments = call["name"], call.get("arguments", {})
    surplus = sorted(call.keys() - {"name", "arguments"})
    if isinstance(arguments, str):
        problem = 'the value of "arguments" must be a JSON object, not a string that holds one'
    elif not isinstance(arguments, Mapping):
        shown = orjson.dumps(arguments).decode()[:_CONTEXT_CHARS]
        problem = f'the value of "arguments" must be a JSON object, not {shown}'
    elif "arguments" not in call and surplus:
        problem = f'the arguments must be a JSON object under the key "arguments"; the keys are {", ".join(surplus)}'
    else:
        return ToolRequest(name, arguments)
    return ToolRequest(name, {}, problem)


def _place(error: orjson.JSONDecodeError) -> str:
    """What is wrong with JSON, and where, as the model may find it."""
    before = error.doc[max(0, error.pos - _CONTEXT_CHARS) : error.pos]
    return f"{error.msg} at character {error.pos}" + (f", after {before!r}" if before else "")


def _limited(requests: Sequence[ToolRequest], limit: int) -> tuple[ToolRequest, ...]:
    """The first calls, and one more that answers all others with why they are not made."""
    surplus = len(requests) - limit
    if surplus <= 0:
        return tuple(requests)
    problem = f"at most {limit} tool calls are made in one turn; {surplus} more had to be left out"
    return (*requests[:limit], ToolRequest("", {}, problem))


def _shown(call: ToolCall) -> str:
    text = call.text.strip()
    return text if call.status is ToolStatus.OK else f"Error: {text}"
