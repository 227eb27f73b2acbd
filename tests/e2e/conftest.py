"""Small tasks, briefly trained models, and verl's stock trainer as a subprocess."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agentic_rollout.config import AGENT_KEY
from agentic_rollout.demo.prepare import DemoFiles
from agentic_rollout.verl_plugin.launch import LINE_ENVIRONMENT
from lines import NAME as LINE

if LINE == "0.9":
    os.environ.update(LINE_ENVIRONMENT[LINE])  # verl chooses its platform once, at the first import in this process

if TYPE_CHECKING:
    from agentic_rollout.demo.task import Task
    from agentic_rollout.demo.warmstart import Phase


@dataclass(frozen=True)
class TrainerResult:
    """What one run of the trainer left."""

    metrics: dict[int, dict[str, float]]
    log: str
    folder: Path


RunTrainer = Callable[..., TrainerResult]


@pytest.fixture(scope="session")
def tiny_task(tmp_path_factory: pytest.TempPathFactory) -> DemoFiles:
    from agentic_rollout.demo.search_task import SearchTask
    from agentic_rollout.demo.warmstart import PHASES

    steps = 120 if LINE == "0.6" else 240  # enough for some right answers: one torch learns as another does not
    return _write_task(SearchTask(0, entities=16), PHASES[1:2], steps, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_code_task(tmp_path_factory: pytest.TempPathFactory) -> DemoFiles:
    from agentic_rollout.demo.code_task import CodeTask
    from agentic_rollout.demo.warmstart import PHASES

    return _write_task(CodeTask(0), PHASES[:2], 240, tmp_path_factory.mktemp("tiny_code"))


def _write_task(task: Task, phases: Sequence[Phase], steps: int, folder: Path) -> DemoFiles:
    from agentic_rollout.demo.model import build_model, build_tokenizer
    from agentic_rollout.demo.task import write_questions
    from agentic_rollout.demo.warmstart import Practice, Trainer, save

    files = DemoFiles(folder)
    task.write_files(folder)
    write_questions(task, files.train, files.validation)
    tokenizer = build_tokenizer(task.language(), files.tokenizer)
    model = build_model(tokenizer, 0)
    Trainer(model, Practice(tokenizer, task, 0), task.recipe, progress=False).train(phases, steps)
    save(model, tokenizer, files.model)
    return files


@pytest.fixture
def search_server(tiny_task: DemoFiles) -> Iterator[str]:
    """The address of a server over the task's corpus, in a process of its own."""
    command = [sys.executable, "-m", "agentic_rollout.cli", "serve-search", str(tiny_task.corpus), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["listening"]
        process.terminate()
        process.communicate()
        assert process.returncode == 0


@pytest.fixture
def run_trainer(tiny_task: DemoFiles, tmp_path: Path) -> RunTrainer:
    from agentic_rollout.demo.train import TrainerRun, read_metrics
    from agentic_rollout.verl_plugin.launch import cpu_platform

    def run(
        name: str, overrides: Sequence[str], *, base: str = "demo_search", task: DemoFiles = tiny_task
    ) -> TrainerResult:
        """Runs `base` on a tiny task with checkpoints and traces in a folder of the test's own."""
        folder = tmp_path / name
        settings = [
            *([f"platform={cpu_platform()}"] if base.startswith("demo") else []),
            f"data.train_files={task.train}",
            f"data.val_files={task.validation}",
            f"actor_rollout_ref.model.path={task.model}",
            f"actor_rollout_ref.model.tokenizer_path={task.tokenizer}",
            *([f"{AGENT_KEY}.tools.search.source={task.corpus}"] if task.corpus.is_file() else []),
            f"+{AGENT_KEY}.trace_dir={folder / 'trajectories'}",
            "data.train_batch_size=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
            "actor_rollout_ref.rollout.n=4",
            "trainer.total_training_steps=2",
            "trainer.test_freq=2",
            "trainer.val_before_train=false",
            f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
        ]
        trainer = TrainerRun(base, [*settings, *overrides], folder)
        for _ in trainer.follow():
            pass
        return TrainerResult(read_metrics(trainer.metrics), trainer.log.read_text(), folder)

    return run
