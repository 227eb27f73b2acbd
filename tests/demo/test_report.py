from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import orjson

from agentic_rollout.codec import ByteCodec
from agentic_rollout.demo.report import (
    Summary,
    largest_drift,
    pick_trajectories,
    plot_curves,
    trajectory_panel,
    validation_curve,
)
from agentic_rollout.demo.run import clear_results
from agentic_rollout.demo.train import find_metric, parse_step, read_metrics
from agentic_rollout.trace import trajectory_record, write_trace
from agentic_rollout.types import Segment, StopReason, ToolCall, ToolStatus, Trajectory

CODEC = ByteCodec()
METRICS: dict[int, dict[str, float]] = {
    0: {"val-aux/demo/em/mean@2": 0.25},
    1: {"training/rollout_probs_diff_max": 3e-7},
    2: {"training/rollout_probs_diff_max": 2e-6, "val-aux/demo/em/mean@2": 0.75},
}


def test_step_line_of_the_console_is_read() -> None:
    line = "(TaskRunner pid=7) step:12 - training/rollout_probs_diff_max:1.5e-08 - num_turns/mean:np.float64(1.5)\n"
    assert parse_step(line) == (12, {"training/rollout_probs_diff_max": 1.5e-08, "num_turns/mean": 1.5})


def test_other_lines_are_not_steps() -> None:
    assert parse_step("Training Progress:  10%|█ | 3/30 [00:10<01:00]") is None


def test_curve_and_drift_come_from_the_steps_that_have_them() -> None:
    assert validation_curve(METRICS) == [(0, 0.25), (2, 0.75)]
    assert largest_drift(METRICS) == 2e-6
    assert math.isnan(largest_drift({0: {}}))
    assert find_metric(METRICS[2], "/em/mean") == 0.75


def test_metrics_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "data": row}) + "\n" for step, row in METRICS.items()))
    assert read_metrics(path) == METRICS


def test_summary_has_the_documented_keys(tmp_path: Path) -> None:
    Summary("0.6.1", "search", 1, 0.3, 0.9, 1.0, math.nan, 6.5, 30, False, True, "http").write(
        tmp_path / "summary.json", calls="searches"
    )
    summary = orjson.loads((tmp_path / "summary.json").read_bytes())
    documented = (
        "verl task seed em_before em_after searches_per_question rollout_probs_diff_max minutes steps search".split()
    )
    assert set(documented) <= set(summary)
    assert summary["rollout_probs_diff_max"] is None
    assert summary["searches_per_question"] == 1.0


def record(index: int, step: int, *, searched: bool) -> dict[str, Any]:
    call = ToolCall("search", {"query": "q"}, ToolStatus.OK, "found", 0.1)
    answer = Segment(tuple(CODEC.encode("<answer>x</answer>")), True)
    found = [Segment(tuple(CODEC.encode("<search>q</search>")), True), Segment(tuple(CODEC.encode("found")), False)]
    trajectory = Trajectory((63,), [*(found if searched else []), answer], StopReason.ANSWERED, answer="x")
    trajectory.tool_calls.extend([call] if searched else [])
    return trajectory_record(trajectory, CODEC, index=index, step=step)


def test_shown_trajectories_are_one_question_guessed_then_searched(tmp_path: Path) -> None:
    folder = tmp_path / "validate"
    first = [record(0, 0, searched=True), record(1, 0, searched=False)]
    write_trace(folder / "step_000000_rank_0.jsonl", first)
    write_trace(folder / "step_000030_rank_0.jsonl", [record(index, 30, searched=True) for index in (0, 1)])
    before, after = pick_trajectories(tmp_path)
    assert (before["index"], before["step"], before["tool_calls"]) == (1, 0, [])
    assert (after["index"], after["step"]) == (1, 30)
    assert after["tool_calls"]
    assert trajectory_panel(after).title == "step 30: answered"


def test_results_of_an_earlier_run_are_not_taken_for_this_one(tmp_path: Path) -> None:
    write_trace(tmp_path / "trajectories" / "validate" / "step_000030_rank_0.jsonl", [record(0, 30, searched=True)])
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "mine.txt").write_text("kept")
    clear_results(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_learning_curve_is_a_png(tmp_path: Path) -> None:
    panels = [("exact match", "/em/mean"), ("drift", "rollout_probs_diff_max")]
    plot_curves({"one": [METRICS], "several": [METRICS, METRICS]}, tmp_path / "curve.png", panels=panels)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
