from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_rollout.trace import parse_trajectory, read_trace, trajectory_record, write_trace
from agentic_rollout.types import Segment, StopReason, ToolCall, ToolStatus, Trajectory
from rollouts import CODEC, ScriptedTool, roll_out

TOKENS = st.lists(st.integers(0, 256), min_size=1, max_size=5).map(tuple)
LOGPROBS = st.floats(-100, 0)
SEGMENTS = st.one_of(
    TOKENS.map(lambda ids: Segment(ids, False)),
    TOKENS.map(lambda ids: Segment(ids, True)),
    TOKENS.flatmap(
        lambda ids: st.lists(LOGPROBS, min_size=len(ids), max_size=len(ids)).map(
            lambda logprobs: Segment(ids, True, tuple(logprobs))
        )
    ),
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
TOOL_CALLS = st.builds(
    ToolCall,
    name=TEXTS,
    arguments=st.dictionaries(TEXTS, TEXTS, max_size=2),
    status=st.sampled_from(ToolStatus),
    text=TEXTS,
    latency_s=st.floats(0, 100),
    error=st.none() | TEXTS,
)
TRAJECTORIES = st.builds(
    Trajectory,
    prompt_ids=TOKENS,
    segments=st.lists(SEGMENTS, max_size=4),
    stop_reason=st.none() | st.sampled_from(StopReason),
    tool_calls=st.lists(TOOL_CALLS, max_size=2),
    answer=st.none() | TEXTS,
    invalid_turns=st.integers(0, 5),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "train" / "step_000001.jsonl"


@given(st.lists(TRAJECTORIES, max_size=3))
def test_trajectories_come_back_as_they_were_written(path: Path, trajectories: list[Trajectory]) -> None:
    write_trace(path, (trajectory_record(trajectory, CODEC) for trajectory in trajectories))
    assert [parse_trajectory(record) for record in read_trace(path)] == trajectories


def test_rollout_comes_back_with_the_same_ids_mask_and_logprobs(path: Path) -> None:
    trajectory = roll_out(["<search>q</search>", "no tag", "<answer>é</answer>"]).trajectory
    write_trace(path, [trajectory_record(trajectory, CODEC)])
    (record,) = read_trace(path)
    copy = parse_trajectory(record)
    assert copy == trajectory
    assert copy.response_mask == trajectory.response_mask
    assert copy.response_logprobs == trajectory.response_logprobs


def test_record_is_readable_without_the_tokenizer() -> None:
    trajectory = roll_out(["<search>q</search>", "<answer>é</answer>"], tool=ScriptedTool("found {}".format)).trajectory
    record = trajectory_record(trajectory, CODEC, step=3)
    assert record["step"] == 3
    assert [(segment["sampled"], segment["text"]) for segment in record["segments"]] == [
        (True, "<search>q</search>"),
        (False, "\n\n<information>found q</information>\n\n"),
        (True, "<answer>é</answer>"),
    ]


def test_facts_may_be_numpy_scalars(path: Path) -> None:
    """verl's columns hold them."""
    record = trajectory_record(Trajectory((1,)), CODEC, index=np.int64(7), level=np.str_("hard"))
    write_trace(path, [record])
    (read,) = read_trace(path)
    assert (read["index"], read["level"]) == (7, "hard")


def test_writing_again_replaces_the_file(path: Path) -> None:
    write_trace(path, [{"row": 1}, {"row": 2}])
    write_trace(path, [{"row": 3}])
    assert list(read_trace(path)) == [{"row": 3}]


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ({"query": "a\ud800b"}, {"query": "a?b"}),
        ({"\ud800": [{"x": "\udfff"}, 1, None]}, {"?": [{"x": "?"}, 1, None]}),
        ({"n": 10**30}, {"n": "1" + "0" * 30}),
        ({"deep": nested(90)}, {"deep": nested(90)}),
        ({7: (1.5, True)}, {"7": [1.5, True]}),
    ],
)
def test_arguments_that_json_cannot_hold_are_written_in_the_nearest_way(
    path: Path, arguments: Any, written: Any
) -> None:
    assert trace_of(path, arguments) == written


def test_arguments_nested_without_end_are_cut(path: Path) -> None:
    assert str(trace_of(path, {"deep": nested(900)})).count("[") < 100


def trace_of(path: Path, arguments: Any) -> Any:
    call = ToolCall("search", arguments, ToolStatus.OK, "found", latency_s=0.0)
    write_trace(path, [trajectory_record(Trajectory((1,), tool_calls=[call]), CODEC, index=np.int64(7))])
    (record,) = read_trace(path)
    assert record["index"] == 7
    return record["tool_calls"][0]["arguments"]
