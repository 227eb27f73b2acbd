"""Trajectories as JSON lines: what the model sampled, what it was shown, and what every token was worth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from agentic_rollout.codec import TextCodec
from agentic_rollout.types import Segment, StopReason, ToolCall, ToolStatus, Trajectory

_MAX_DEPTH = 100


def trajectory_record(trajectory: Trajectory, codec: TextCodec, **facts: Any) -> dict[str, Any]:
    """One trajectory as a JSON object; `facts` are further keys, e.g. the step or the data set's index."""
    return {
        **facts,
        "stop_reason": trajectory.stop_reason,
        "answer": trajectory.answer,
        "invalid_turns": trajectory.invalid_turns,
        "prompt": codec.decode(trajectory.prompt_ids),
        "prompt_ids": list(trajectory.prompt_ids),
        "segments": [
            {
                "sampled": segment.sampled,
                "text": codec.decode(segment.token_ids),
                "token_ids": list(segment.token_ids),
                "logprobs": None if segment.logprobs is None else list(segment.logprobs),
            }
            for segment in trajectory.segments
        ],
        "tool_calls": [
            {
                "name": call.name,
                "arguments": dict(call.arguments),
                "status": call.status,
                "text": call.text,
                "latency_s": call.latency_s,
                "error": call.error,
            }
            for call in trajectory.tool_calls
        ],
    }


def parse_trajectory(record: Mapping[str, Any]) -> Trajectory:
    """The trajectory of a record; the inverse of `trajectory_record`."""
    return Trajectory(
        prompt_ids=tuple(record["prompt_ids"]),
        segments=[
            Segment(
                tuple(segment["token_ids"]),
                segment["sampled"],
                None if segment["logprobs"] is None else tuple(segment["logprobs"]),
            )
            for segment in record["segments"]
        ],
        stop_reason=None if record["stop_reason"] is None else StopReason(record["stop_reason"]),
        tool_calls=[ToolCall(**{**call, "status": ToolStatus(call["status"])}) for call in record["tool_calls"]],
        answer=record["answer"],
        invalid_turns=record["invalid_turns"],
    )


def write_trace(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes one record a line, creating folders; an existing file is replaced."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for record in records:
            file.write(_json(record) + b"\n")


def append_trace(path: str | Path, record: Mapping[str, Any]) -> None:
    """Adds one record to a file, at once, so that records of concurrent trajectories do not mix."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(_json(record) + b"\n")


def read_trace(path: str | Path) -> Iterator[dict[str, Any]]:
    """Reads records one by one."""
    with Path(path).open("rb") as file:
        for line in file:
            record: dict[str, Any] = orjson.loads(line)
            yield record


def _json(record: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY, default=str)
    except TypeError:  # a call's arguments are whatever a model wrote
        return orjson.dumps(_plain(record), option=orjson.OPT_SERIALIZE_NUMPY, default=str)


def _plain(value: Any, depth: int = 0) -> Any:
    """What JSON and its readers can hold: no lone surrogates, integers of 64 bits, nesting within limits."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return str(value)
    if isinstance(value, Mapping | list | tuple) and depth == _MAX_DEPTH:
        return "…"
    if isinstance(value, Mapping):
        return {_plain(str(name)): _plain(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    return value
