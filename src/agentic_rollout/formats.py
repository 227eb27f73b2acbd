"""Action formats: what the model's text means, and how an observation is written.

A format is pure: text in, actions and texts out. To add one, write a class with these members and give its dotted path
as the setting `format`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from agentic_rollout.errors import SettingsError
from agentic_rollout.imports import load_object
from agentic_rollout.types import (
    Action,
    Answer,
    Call,
    Invalid,
    Observation,
    ToolCall,
    ToolRequest,
    ToolStatus,
)


class ActionFormat(Protocol):
    """How a model writes actions and reads observations."""

    @property
    def stop(self) -> Sequence[str]:
        """Strings that end a turn; they stay part of it."""
        ...

    def parse(self, text: str) -> Action:
        """The action in the text of one turn. Never raises: a turn without a valid action is `Invalid`."""
        ...

    def render(self, calls: Sequence[ToolCall]) -> Observation:
        """The observation for the finished tool calls of one turn; prefix and suffix do not depend on them."""
        ...

    def render_invalid(self, problem: str) -> Observation:
        """What the model is told after an invalid action."""
        ...


class SearchR1Format:
    """Search-R1's tags: `<search>` and `<answer>` act, `<information>` observes, `<think>` is free text.

    The first complete action tag of a turn counts, as generation stops there. Tags that a model writes inside
    `<think>` do not hide an action: the sampler stops at them all the same.
    """

    stop = ("</search>", "</answer>")
    _action = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)

    def parse(self, text: str) -> Action:
        match = self._action.search(text)
        if match is None:
            return Invalid("it has neither <search>…</search> nor <answer>…</answer>")
        tag, content = match.group(1), match.group(2).strip()
        if not content:
            return Invalid(f"<{tag}> is empty")
        if tag == "answer":
            return Answer(content)
        return Call((ToolRequest("search", {"query": content}),))

    def render(self, calls: Sequence[ToolCall]) -> Observation:
        body = "\n".join(
            call.text.strip() if call.status is ToolStatus.OK else f"Search failed: {call.text.strip()}"
            for call in calls
        )
        return Observation("\n\n<information>", body, "</information>\n\n")

    def render_invalid(self, problem: str) -> Observation:
        body = (
            f"That action cannot be carried out: {problem}. Write a query between <search> and </search> to look "
            "something up, or the final answer between <answer> and </answer>."
        )
        return Observation("\n", body, "\n")


FORMATS = {"search_r1": SearchR1Format}


def build_format(name: str, *, key: str) -> ActionFormat:
    """The built-in format of that name, or an instance of the class at that dotted path.

    Raises:
        SettingsError: there is no such format, the class wants arguments, or it lacks a member.
    """
    cls = FORMATS.get(name) or load_object(name, key=key, known=FORMATS)
    try:
        instance: ActionFormat = cls()
    except TypeError as error:
        raise SettingsError(key, name, "a class that is called without arguments", f"It said: {error}.") from error
    for member in ("stop", "parse", "render", "render_invalid"):
        if not hasattr(instance, member):
            raise SettingsError(
                key, name, f"a format with a member {member!r}", "See ActionFormat in agentic_rollout.formats."
            )
    return instance
