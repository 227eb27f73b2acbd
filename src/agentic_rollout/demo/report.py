"""The demo's results: a summary, a table, a learning curve, and two trajectories to read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from agentic_rollout.demo.train import find_metric
from agentic_rollout.trace import read_trace

Metrics = Mapping[int, dict[str, float]]

VALIDATION_EM = "/em/mean"
VALIDATION_CALLS = "/tool_calls/mean"
DRIFT = "training/rollout_probs_diff_max"
PHASES = {
    "rollout": "timing_s/gen",
    "log-probs": "timing_s/old_log_prob",
    "reference": "timing_s/ref",
    "update": "timing_s/update_actor",
    "whole step": "timing_s/step",
}


@dataclass(frozen=True, slots=True)
class Summary:
    """What `summary.json` holds. There, `calls_per_question` is named for the calls: `searches_per_question`, say."""

    verl: str
    task: str
    seed: int
    em_before: float
    em_after: float
    calls_per_question: float
    rollout_probs_diff_max: float
    minutes: float
    steps: int
    mask_observations: bool
    warm_start_reused: bool
    search: str | None  # where searches went; None for a task that does not search

    def write(self, path: Path, *, calls: str) -> None:
        """Writes the file; `calls` is what calls of the task's tool are called, such as searches."""
        renamed = {"calls_per_question": f"{calls}_per_question"}
        values = {renamed.get(key, key): value for key, value in asdict(self).items()}
        path.write_bytes(orjson.dumps(values, option=orjson.OPT_INDENT_2) + b"\n")


def validation_curve(metrics: Metrics, fragment: str = VALIDATION_EM) -> list[tuple[int, float]]:
    """(step, value) wherever the trainer validated."""
    values = ((step, find_metric(row, fragment)) for step, row in sorted(metrics.items()))
    return [(step, value) for step, value in values if value is not None]


def largest_drift(metrics: Metrics) -> float:
    """The largest difference of token probabilities between sampler and actor; NaN if none was logged."""
    return max((row[DRIFT] for row in metrics.values() if DRIFT in row), default=math.nan)


def results_table(summary: Summary, metrics: Metrics, *, calls: str) -> Table:
    """Before and after, and where the time went."""
    table = Table(title="What reinforcement learning changed", title_justify="left")
    table.add_column("")
    for column in ("before", "after"):
        table.add_column(column, justify="right")
    rows = {
        "validation exact match": VALIDATION_EM,
        f"{calls} per question": VALIDATION_CALLS,
        "turns per question": "val-aux/num_turns/mean",
        "well-formed trajectories": "/format/mean",
    }
    for label, fragment in rows.items():
        curve = validation_curve(metrics, fragment)
        table.add_row(label, f"{curve[0][1]:.2f}", f"{curve[-1][1]:.2f}")
    table.add_section()
    steps = [row for row in metrics.values() if PHASES["whole step"] in row]
    for label, name in PHASES.items():
        seconds = [row[name] for row in steps if name in row]
        if seconds:
            table.add_row(f"seconds per step: {label}", "", f"{sum(seconds) / len(seconds):.2f}")
    table.add_section()
    table.add_row("largest drift of token probabilities", "", f"{summary.rollout_probs_diff_max:.1e}")
    table.add_row("minutes", "", f"{summary.minutes:.1f}")
    return table


def pick_trajectories(traces: Path) -> list[dict[str, Any]]:
    """One question before and after training: guessed at first and asked of the tool in the end, if there is one."""
    files = sorted((traces / "validate").glob("step_*.jsonl"))
    guessed = {row["index"]: row for row in read_trace(files[0]) if not row["tool_calls"]}
    last = list(read_trace(files[-1]))
    after = next((row for row in last if row["tool_calls"] and row["answer"] and row["index"] in guessed), last[0])
    before = guessed.get(after["index"])
    return [after] if before is None else [before, after]


def trajectory_panel(record: Mapping[str, Any]) -> Panel:
    """A trajectory with sampled text in green and observed text in grey."""
    text = Text(record["prompt"], style="bold")
    for segment in record["segments"]:
        text.append(segment["text"], style="green" if segment["sampled"] else "dim italic")
    sampled = sum(len(s["token_ids"]) for s in record["segments"] if s["sampled"])
    observed = sum(len(s["token_ids"]) for s in record["segments"] if not s["sampled"])
    legend = Text.assemble(
        ("sampled, trained on", "green"),
        f": {sampled} tokens   ",
        ("observed, masked", "dim italic"),
        f": {observed} tokens",
    )
    title = f"step {record['step']}: {record['stop_reason']}"
    return Panel(Group(text, Text(), legend), title=title, title_align="left")


def show(console: Console, summary: Summary, metrics: Metrics, traces: Path, *, calls: str) -> None:
    """Prints the table and two trajectories."""
    console.print(results_table(summary, metrics, calls=calls))
    for record in pick_trajectories(traces):
        console.print(trajectory_panel(record))


def plot_curves(runs: Mapping[str, Sequence[Metrics]], path: Path, *, panels: Sequence[tuple[str, str]]) -> None:
    """Draws one panel per (title, metric fragment) into a PNG.

    Args:
        runs: label -> the metrics of one run, or of several seeds: a thin line each, and their mean as a thick one.
        path: of the picture.
        panels: the first one shows shares, 0 to 1.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.6 * columns, 3.4 * rows), layout="constrained", squeeze=False
    )
    for axis, (title, fragment) in zip(axes.flat, panels, strict=False):
        for number, (label, seeds) in enumerate(runs.items()):
            _plot_run(axis, [validation_curve(metrics, fragment) for metrics in seeds], f"C{number}", label)
        axis.set(title=title, xlabel="training step")
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    axes[0][0].set_ylim(0, 1)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(runs))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _plot_run(axis: Any, curves: Sequence[Sequence[tuple[int, float]]], color: str, label: str) -> None:
    shared = min(len(curve) for curve in curves)
    steps = [step for step, _ in curves[0][:shared]]
    means = [sum(curve[i][1] for curve in curves) / len(curves) for i in range(shared)]
    if len(curves) > 1:
        for curve in curves:
            axis.plot(*zip(*curve, strict=True), color=color, alpha=0.3, linewidth=1)
    axis.plot(steps, means, color=color, linewidth=2, marker="o" if shared < 20 else "", label=label)
