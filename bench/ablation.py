"""The demo with and without the observation mask: same seeds, both curves in one picture.

`mask_observations: false` trains the policy on the passages that the search tool returned. Results go to
outputs/ablation/: one folder per run, `ablation.png` and `ablation.json`. Runs that are already there are kept.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

from agentic_rollout.demo.report import Metrics, plot_curves
from agentic_rollout.demo.run import DemoSettings, run_demo
from agentic_rollout.demo.train import read_metrics

logger = logging.getLogger(__name__)

PANELS = [
    ("validation exact match", "/em/mean"),
    ("searches per question", "/tool_calls/mean"),
    ("policy loss", "actor/pg_loss"),
    ("KL to the reference (in the loss)", "actor/kl_loss"),
    ("entropy", "actor/entropy"),
    ("gradient norm", "actor/grad_norm"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("outputs/ablation"))
    options = parser.parse_args()
    console = Console()
    runs: dict[str, list[Metrics]] = {}
    for masked, label in ((True, "observations masked"), (False, "trained on observations")):
        runs[label] = [_metrics(seed, masked, options, console) for seed in options.seeds]
    plot_curves(runs, options.out / "ablation.png", panels=PANELS)
    summary = {label: {title: _ends(seeds, name) for title, name in PANELS} for label, seeds in runs.items()}
    (options.out / "ablation.json").write_text(json.dumps(summary, indent=2) + "\n")
    console.print(_table(summary))
    console.print(f"in {options.out}: ablation.png, ablation.json")


def _metrics(seed: int, masked: bool, options: argparse.Namespace, console: Console) -> Metrics:
    out = options.out / f"{'masked' if masked else 'unmasked'}_seed{seed}"
    if not (out / "summary.json").is_file():
        run_demo(DemoSettings(seed=seed, steps=options.steps, mask_observations=masked, out=out), console)
    return read_metrics(out / "metrics.jsonl")


def _ends(seeds: list[Metrics], name: str) -> dict[str, float]:
    """The first and the last value of a metric, and its largest magnitude: means over the seeds."""
    curves = [[v for row in run.values() for k, v in row.items() if name in k] for run in seeds]
    return {
        "first": mean(curve[0] for curve in curves),
        "last": mean(curve[-1] for curve in curves),
        "largest": mean(max(curve, key=abs) for curve in curves),
    }


def _table(summary: dict[str, dict[str, dict[str, float]]]) -> Table:
    table = Table(title="means over the seeds: first -> last (largest)", title_justify="left")
    table.add_column("")
    for label in summary:
        table.add_column(label, justify="right")
    for title, _ in PANELS:
        cells = [summary[label][title] for label in summary]
        table.add_row(title, *(f"{c['first']:.3g} -> {c['last']:.3g} ({c['largest']:.3g})" for c in cells))
    return table


if __name__ == "__main__":
    main()
