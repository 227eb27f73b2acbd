"""`make demo`: the main job at the size of a toy, from nothing to a learning curve."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import orjson
from rich.console import Console

from agentic_rollout.config import AGENT_KEY
from agentic_rollout.demo.prepare import DemoFiles, Prepared, prepare
from agentic_rollout.demo.report import (
    DRIFT,
    VALIDATION_CALLS,
    VALIDATION_EM,
    Summary,
    largest_drift,
    plot_curves,
    show,
    validation_curve,
)
from agentic_rollout.demo.search_task import SearchTask
from agentic_rollout.demo.task import Task
from agentic_rollout.demo.tasks import TASKS
from agentic_rollout.demo.train import TrainerError, TrainerRun, find_metric, read_metrics
from agentic_rollout.errors import SettingsError
from agentic_rollout.verl_plugin.launch import cpu_platform

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What `make demo` can be told."""

    task: str = "search"  # a key of TASKS
    seed: int = 0
    steps: int = 30
    mask_observations: bool = True
    search: Literal["embedded", "http"] = "embedded"
    out: Path = Path("outputs/demo")
    cache: Path = Path(".cache/demo")
    overrides: tuple[str, ...] = ()


def run_demo(settings: DemoSettings, console: Console) -> Summary:
    """Prepares, trains, and reports; leaves everything in `settings.out`.

    Raises:
        SettingsError: there is no such task, or it has no search server.
        WarmStartError: the warm start misses its gate.
        TrainerError: verl's trainer fails.
    """
    started = time.monotonic()
    task = _task(settings)
    out = settings.out.resolve()
    clear_results(out)
    console.rule(f"[bold]{task.title}, seed {settings.seed}")
    prepared = prepare(task, settings.seed, settings.cache.resolve())
    warm = prepared.warm_start
    console.print(
        f"{'reused' if prepared.reused else 'warm-started'} model: calls its tool in {warm.call_rate:.0%} of its "
        f"trajectories; {warm.call_exact:.0%} of its calls and, after reading, {warm.answer_exact:.0%} of its "
        "answers are right"
    )
    console.rule("[bold]verl's stock trainer, GRPO, rollout.name=agent")
    with _tool_overrides(settings, prepared.files, out) as tool:
        run = TrainerRun(task.config, trainer_overrides(settings, prepared.files, tool, out), out)
        _train(run, settings.steps, console, calls=task.calls)
    metrics = read_metrics(run.metrics)
    summary = _summarize(settings, prepared, metrics, minutes=(time.monotonic() - started) / 60)
    summary.write(out / "summary.json", calls=task.calls)
    plot_curves(
        {f"seed {settings.seed}": [metrics]},
        out / "learning_curve.png",
        panels=[("validation exact match", VALIDATION_EM), (f"{task.calls} per question", VALIDATION_CALLS)],
    )
    show(console, summary, metrics, out / "trajectories", calls=task.calls)
    console.print(
        f"in {settings.out}: summary.json, learning_curve.png, metrics.jsonl, trajectories/, trainer.log",
        soft_wrap=True,
    )
    return summary


def clear_results(out: Path) -> None:
    """Removes what an earlier run left in `out`, so that nothing of it is taken for this one's."""
    shutil.rmtree(out / "trajectories", ignore_errors=True)
    for name in ("summary.json", "learning_curve.png", "metrics.jsonl", "trainer.log", "search_server.log"):
        (out / name).unlink(missing_ok=True)


def _task(settings: DemoSettings) -> type[Task]:
    if settings.task not in TASKS:
        raise SettingsError("task", settings.task, " or ".join(TASKS), "Choose one.")
    if settings.search != "embedded" and settings.task != SearchTask.name:
        raise SettingsError("search", settings.search, "embedded", f"The task {settings.task} does not search.")
    return TASKS[settings.task]


@contextmanager
def _tool_overrides(settings: DemoSettings, files: DemoFiles, out: Path) -> Iterator[list[str]]:
    """What the task's tool is told: the search tool, to search the corpus itself or a server over it."""
    if settings.task != SearchTask.name:
        yield []
    elif settings.search == "embedded":
        yield [_search_source(str(files.corpus))]
    else:
        with _search_server(files, out) as address:
            yield [_search_source(address)]


def _search_source(source: str) -> str:
    return f"{AGENT_KEY}.tools.search.source={source}"


@contextmanager
def _search_server(files: DemoFiles, out: Path) -> Iterator[str]:
    """The address of a server over the corpus, in a process of its own."""
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "agentic_rollout.cli", "serve-search", str(files.corpus), "--port", "0"]
    with (out / "search_server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            raise TrainerError(f"the search server did not start; see {out / 'search_server.log'}")
        yield str(orjson.loads(line)["listening"])
    finally:
        server.terminate()
        server.communicate()


def trainer_overrides(settings: DemoSettings, files: DemoFiles, tool: Sequence[str], out: Path) -> list[str]:
    """What the demo adds to its task's configuration: paths, sizes and seeds; the user's own settings come last."""
    return [
        f"platform={cpu_platform()}",
        f"data.train_files={files.train}",
        f"data.val_files={files.validation}",
        f"actor_rollout_ref.model.path={files.model}",
        f"actor_rollout_ref.model.tokenizer_path={files.tokenizer}",
        *tool,
        f"+{AGENT_KEY}.trace_dir={out / 'trajectories'}",
        f"+{AGENT_KEY}.seed={settings.seed}",
        f"+{AGENT_KEY}.mask_observations={settings.mask_observations}",
        f"data.seed={settings.seed}",
        f"trainer.total_training_steps={settings.steps}",
        f"trainer.default_local_dir={out / 'checkpoints'}",
        *settings.overrides,
    ]


def _train(run: TrainerRun, steps: int, console: Console, *, calls: str) -> None:
    with console.status("starting Ray, verl and vLLM (about a minute) …") as status:
        for step, metrics in run.follow():
            console.print(_step_line(step, steps, metrics, calls=calls), highlight=False, soft_wrap=True)
            status.update(f"step {step + 1} of {steps} …" if step < steps else "shutting down …")


def _step_line(step: int, steps: int, metrics: dict[str, float], *, calls: str) -> str:
    parts = [f"step {step:3d}/{steps}"]
    for label, fragment, style in (
        ("reward", "critic/score/mean", "{:.2f}"),
        (calls, "tool_call_counts/mean", "{:.2f}"),
        ("turns", "num_turns/mean", "{:.2f}"),
        ("drift", DRIFT, "{:.0e}"),
        ("seconds", "timing_s/step", "{:.1f}"),
        ("[bold]validation exact match", VALIDATION_EM, "{:.2f}[/bold]"),
    ):
        value = find_metric(metrics, fragment)
        if value is not None:
            parts.append(f"{label} {style.format(value)}")
    return "  ".join(parts)


def _summarize(
    settings: DemoSettings, prepared: Prepared, metrics: dict[int, dict[str, float]], *, minutes: float
) -> Summary:
    exact_match = validation_curve(metrics)
    return Summary(
        verl=version("verl"),
        task=settings.task,
        seed=settings.seed,
        em_before=exact_match[0][1],
        em_after=exact_match[-1][1],
        calls_per_question=validation_curve(metrics, VALIDATION_CALLS)[-1][1],
        rollout_probs_diff_max=largest_drift(metrics),
        minutes=round(minutes, 2),
        steps=max(metrics),
        mask_observations=settings.mask_observations,
        warm_start_reused=prepared.reused,
        search=settings.search if settings.task == SearchTask.name else None,
    )
