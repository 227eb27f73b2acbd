"""The nouns that flow through the package. Standard library only.

A `Trajectory` holds `Segment`s, and a segment is either sampled by the model or observed from the environment. Ids,
mask and log-probabilities of the response are derived from the segments, so they cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from agentic_rollout.errors import InvariantError


class StopReason(StrEnum):
    """Why a trajectory ended."""

    ANSWERED = "answered"  # the model gave an answer
    MAX_TURNS = "max_turns"  # the last allowed turn ended without an answer
    LENGTH = "length"  # no room is left for an observation and an answer
    EOS = "eos"  # the model ended the text without an action
    INVALID = "invalid"  # the turn held no valid action, and the settings end such a trajectory
    TOOL_FAILURE = "tool_failure"  # a tool failed, and the settings end such a trajectory


class FinishReason(StrEnum):
    """Why one generation ended."""

    STOP = "stop"  # a stop string, which is part of the completion
    EOS = "eos"  # an end-of-sequence token, which is part of the completion
    LENGTH = "length"  # `max_tokens` were generated


class ToolStatus(StrEnum):
    """How one tool call ended."""

    OK = "ok"
    # The model's own mistakes.
    UNKNOWN_TOOL = "unknown_tool"  # the model asked for a tool that is not there
    BAD_ARGUMENTS = "bad_arguments"  # the model's arguments do not fit the tool
    FORBIDDEN = "forbidden"  # the settings do not allow what the model asked for
    MALFORMED = "malformed"  # the model's call is not written as the format wants it
    # Failures of the tool, or of the service behind it.
    ERROR = "error"  # the tool raised
    TIMEOUT = "timeout"  # no answer within the deadline
    REFUSED = "refused"  # no connection could be made
    DISCONNECTED = "disconnected"  # the connection broke before the whole reply was there
    RATE_LIMITED = "rate_limited"  # the service said that there were too many requests (429)
    HTTP_4XX = "http_4xx"  # the service rejected the request: a wrong key, a wrong body
    HTTP_5XX = "http_5xx"  # the service failed
    BAD_REPLY = "bad_reply"  # the reply is not what was agreed on: no JSON, a wrong number of results
    UNAVAILABLE = "unavailable"  # not asked, because the service has just failed repeatedly (circuit breaker)

    @property
    def is_tool_failure(self) -> bool:
        """Whether the tool failed, rather than succeeded or was misused by the model."""
        return self not in (
            ToolStatus.OK,
            ToolStatus.UNKNOWN_TOOL,
            ToolStatus.BAD_ARGUMENTS,
            ToolStatus.FORBIDDEN,
            ToolStatus.MALFORMED,
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of one origin: the only place where a mask originates.

    Attributes:
        token_ids: the tokens, at least one.
        sampled: True for the model's own tokens, False for an observation.
        logprobs: natural-log probabilities that the sampler gave its tokens; None where it gave none.
    """

    token_ids: tuple[int, ...]
    sampled: bool
    logprobs: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise InvariantError("a segment has no token")
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise InvariantError(
                f"a segment of {len(self.token_ids)} tokens has {len(self.logprobs)} log-probabilities"
            )
        if self.logprobs is not None and not self.sampled:
            raise InvariantError("an observation has log-probabilities")


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returns for one turn: its tokens verbatim."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """One tool call as the model wrote it.

    Attributes:
        name: the tool; empty where it cannot be read.
        arguments: empty where they cannot be read.
        problem: what is wrong with the way the call is written. Such a call is not made; it is answered with this
            text, so that its good neighbours of the same turn are not lost.
    """

    name: str
    arguments: Mapping[str, Any]
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's final answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """The model asks for one or several tools, to be run in parallel; for none, if its text just goes on."""

    requests: tuple[ToolRequest, ...]


@dataclass(frozen=True, slots=True)
class Invalid:
    """A turn without a valid action."""

    problem: str


Action = Answer | Call | Invalid


@dataclass(frozen=True, slots=True)
class Observation:
    """An observation as text: only bodies are ever cut, so every closing tag survives.

    Attributes:
        prefix: opening tags.
        body: what was observed; or several observations, one after the other, each within tags of its own.
        suffix: closing tags.
    """

    prefix: str
    body: str | tuple[Observation, ...]
    suffix: str

    def split(self) -> tuple[list[str], list[str]]:
        """All tags and all bodies, in turns: n + 1 texts that stay whole, around n that may be cut."""
        if isinstance(self.body, str):
            return [self.prefix, self.suffix], [self.body]
        tags, bodies = [self.prefix], list[str]()
        for part in self.body:
            (first, *rest), inner = part.split()
            tags[-1] += first
            tags += rest
            bodies += inner
        tags[-1] += self.suffix
        return tags, bodies


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The record of one finished tool call.

    Attributes:
        name: the tool that the model asked for.
        arguments: as the model gave them.
        status: how it ended.
        text: the result or the failure, as the model is shown it.
        latency_s: wall time of the call in seconds, waiting included.
        error: class name of the exception behind a failure.
    """

    name: str
    arguments: Mapping[str, Any]
    status: ToolStatus
    text: str
    latency_s: float
    error: str | None = None


@dataclass(slots=True)
class Trajectory:
    """A prompt and everything that followed it."""

    prompt_ids: tuple[int, ...]
    segments: list[Segment] = field(default_factory=list)
    stop_reason: StopReason | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    answer: str | None = None
    invalid_turns: int = 0

    @property
    def response_ids(self) -> tuple[int, ...]:
        """Tokens after the prompt, sampled and observed."""
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def response_mask(self) -> tuple[int, ...]:
        """1 for each sampled token, 0 for each observed one; as long as `response_ids`."""
        return tuple(int(segment.sampled) for segment in self.segments for _ in segment.token_ids)

    @property
    def response_logprobs(self) -> tuple[float, ...] | None:
        """The sampler's log-probabilities, 0.0 for observed tokens; None if a sampled segment has none."""
        logprobs: list[float] = []
        for segment in self.segments:
            if segment.logprobs is not None:
                logprobs.extend(segment.logprobs)
            elif segment.sampled:
                return None
            else:
                logprobs.extend([0.0] * len(segment.token_ids))
        return tuple(logprobs)

    @property
    def response_length(self) -> int:
        """Number of tokens after the prompt."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def num_turns(self) -> int:
        """Number of generations."""
        return sum(segment.sampled for segment in self.segments)
