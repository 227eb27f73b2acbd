"""Code in Markdown fences, as chat models write it anyway."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from agentic_rollout.formats.layout import trim_lines
from agentic_rollout.types import Action, Answer, Call, Invalid, Observation, ToolCall, ToolRequest, ToolStatus

_CLOSED = "\n```\n"
_ANSWERED = "</answer>"

_PYTHON = frozenset({"python", "py", "python3"})
_OPENING = re.compile(r"```[ \t]*(\w*)")
_CLOSING = re.compile(r"```[ \t]*(?:<[^>\n]*>)*\s*")  # the name of an end-of-sequence token may follow
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class _Block(NamedTuple):
    code: str
    end: int  # characters of the text up to the closing fence


class FencedCodeFormat:
    r"""A closed ```` ```python ```` block calls the tool `python`, ```` ```output ```` observes, `<answer>` answers.

    What stop strings can do here, and what not: a sampler compares strings and knows no state, and the line that
    closes a block of Python is also the line that closes any other block, or opens one without a language. So
    generation stops after every such line, "\n```\n"; never at an opening "```python", nor at fences in the middle of
    a line. Where it has stopped and no block of Python has ended, no tool is asked (an empty `Call`): the text goes on
    in the next turn, which costs one of `max_turns`. A closing fence that is the last thing before the end of the text
    counts as well. Three backticks on a line of their own inside the code, as in a long string, end it.
    """

    stop: Sequence[str] = (_CLOSED, _ANSWERED)

    def parse(self, text: str) -> Action:
        block, answer = _python_block(text), _ANSWER.search(text)
        if answer is not None and (block is None or answer.end() < block.end):
            content = answer[1].strip()
            return Answer(content) if content else Invalid("<answer> is empty")
        if block is not None:
            code = trim_lines(block.code)
            return Call((ToolRequest("python", {"code": code}),)) if code else Invalid("the ```python block is empty")
        if _CLOSED in text:
            return Call(())
        return Invalid("it has neither a closed ```python block nor <answer>…</answer>")

    def render(self, calls: Sequence[ToolCall]) -> Observation:
        if not calls:
            return Observation("", "", "")
        body = "\n".join(
            trim_lines(call.text) if call.status is ToolStatus.OK else f"Execution failed: {call.text.strip()}"
            for call in calls
        )
        return Observation("\n```output\n", body, "\n```\n")

    def render_invalid(self, problem: str) -> Observation:
        body = (
            f"That action cannot be carried out: {problem}. Write Python code between a line ```python and a line ``` "
            "to run it, or the final answer between <answer> and </answer>."
        )
        return Observation("\n", body, "\n")


def _python_block(text: str) -> _Block | None:
    """The first closed block of Python; blocks are read in order, so that no end is taken for a beginning."""
    language: str | None = None  # of the block that is open
    start = position = 0
    for line in text.splitlines(keepends=True):
        opening = _OPENING.match(line)
        position += len(line)
        if language is None and opening is not None:
            language, start = opening[1].lower(), position
        elif language is not None and _CLOSING.fullmatch(line):
            if language in _PYTHON:
                return _Block(text[start : position - len(line)], position)
            language = None
    return None
