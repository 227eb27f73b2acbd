"""Formats in which the model acts by tags: `<search>…</search>`, `<code>…</code>`, `<answer>…</answer>`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, field_validator

from agentic_rollout.config import Settings
from agentic_rollout.formats.layout import strip_code, trim_lines
from agentic_rollout.types import Action, Answer, Call, Invalid, Observation, ToolCall, ToolRequest, ToolStatus

TagName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]


class ToolTag(Settings):
    """What one tag calls, and where its result stands."""

    tool: str = Field(description="name of the tool that the tag calls")
    argument: str = Field(description="the tool's argument that gets the tag's content")
    observation: TagName = Field(description="tag around the result")
    content: Literal["text", "code"] = Field(default="text", description="code keeps its indentation, its output too")
    failure: str = Field(default="Failed: ", description="what the text of a failed call begins with")
    usage: str = Field(default="the tool's input between {tag}", description="advice after an invalid action")


class TagSettings(Settings):
    """Settings of the format `tags`."""

    tags: dict[TagName, ToolTag] = Field(min_length=1, description="name of the tag -> what it calls")

    @field_validator("tags")
    @classmethod
    def _answer_is_taken(cls, tags: dict[str, ToolTag]) -> dict[str, ToolTag]:
        if "answer" in tags:
            raise ValueError("tags other than `answer`, which answers")
        return tags


SEARCH_TAG = ToolTag(
    tool="search",
    argument="query",
    observation="information",
    failure="Search failed: ",
    usage="a query between {tag} to look something up",
)
CODE_TAG = ToolTag(
    tool="python",
    argument="code",
    observation="observation",
    content="code",
    failure="Execution failed: ",
    usage="Python code between {tag} to run it",
)


class TagFormat:
    """Tags act, `<answer>` answers, a tag of its tool's own observes, and everything else is free text.

    The first complete action tag of a turn counts, as generation stops there. Tags that a model writes inside
    `<think>`, or inside another tag, do not hide an action: the sampler stops at them all the same.

    Args:
        tags: name of the tag -> what it calls; at least one.
    """

    def __init__(self, tags: Mapping[str, ToolTag]) -> None:
        names = [*tags, "answer"]
        self.stop: Sequence[str] = tuple(f"</{name}>" for name in names)
        self._tags = dict(tags)
        self._by_tool = {tag.tool: tag for tag in tags.values()}
        self._action = re.compile(rf"<({'|'.join(names)})>(.*?)</\1>", re.DOTALL)
        *others, last = (f"<{name}>…</{name}>" for name in names)
        self._no_action = f"it has neither {', '.join(others)} nor {last}"
        self._usage = ", ".join(tag.usage.replace("{tag}", f"<{name}> and </{name}>") for name, tag in tags.items())

    def parse(self, text: str) -> Action:
        match = self._action.search(text)
        if match is None:
            return Invalid(self._no_action)
        name, content = match.groups()
        if not content.strip():
            return Invalid(f"<{name}> is empty")
        if name == "answer":
            return Answer(content.strip())
        tag = self._tags[name]
        content = strip_code(content) if tag.content == "code" else content.strip()
        return Call((ToolRequest(tag.tool, {tag.argument: content}),))

    def render(self, calls: Sequence[ToolCall]) -> Observation:
        tag = next(iter(self._tags.values()))
        if calls:
            tag = self._by_tool.get(calls[0].name, tag)  # one turn's calls are of one tag
        trim = trim_lines if tag.content == "code" else str.strip
        body = "\n".join(
            trim(call.text) if call.status is ToolStatus.OK else f"{tag.failure}{call.text.strip()}" for call in calls
        )
        return Observation(f"\n\n<{tag.observation}>", body, f"</{tag.observation}>\n\n")

    def render_invalid(self, problem: str) -> Observation:
        body = (
            f"That action cannot be carried out: {problem}. Write {self._usage}, or the final answer between <answer> "
            "and </answer>."
        )
        return Observation("\n", body, "\n")


class SearchR1Format(TagFormat):
    """Search-R1's tags: `<search>` calls the tool `search`, observed in `<information>`."""

    def __init__(self) -> None:
        super().__init__({"search": SEARCH_TAG})


class CodeFormat(TagFormat):
    """code-r1's tags: `<code>` calls the tool `python`, observed in `<observation>`."""

    def __init__(self) -> None:
        super().__init__({"code": CODE_TAG})


class SearchCodeFormat(TagFormat):
    """Search and code in one trajectory, chosen by the tags."""

    def __init__(self) -> None:
        super().__init__({"search": SEARCH_TAG, "code": CODE_TAG})
