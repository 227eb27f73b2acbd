"""What the demo trains on: a task's questions and files, and a warm-started model. Cached by what made them."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

import orjson

from agentic_rollout.demo.model import build_model, build_tokenizer
from agentic_rollout.demo.search_task import CORPUS_FILE
from agentic_rollout.demo.task import Task, write_questions
from agentic_rollout.demo.warmstart import WarmStartReport, save, warm_start

_PREPARING = ("code_task", "model", "prepare", "search_task", "task", "warmstart", "world")  # modules of this package


@dataclass(frozen=True, slots=True)
class DemoFiles:
    """Where the prepared parts lie."""

    folder: Path

    @property
    def corpus(self) -> Path:
        return self.folder / CORPUS_FILE

    @property
    def train(self) -> Path:
        return self.folder / "train.parquet"

    @property
    def validation(self) -> Path:
        return self.folder / "validation.parquet"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer alone: beside a Qwen2, transformers 5 would split texts as Qwen2's own does."""
        return self.folder / "tokenizer"

    @property
    def report(self) -> Path:
        return self.folder / "warm_start.json"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A task and a model ready for reinforcement learning."""

    files: DemoFiles
    warm_start: WarmStartReport
    reused: bool


def prepare(task: type[Task], seed: int, cache: Path) -> Prepared:
    """Builds everything for one seed of a task, or finds it in `cache`.

    Raises:
        WarmStartError: the warm start misses its gate.
    """
    files = DemoFiles(cache / f"{task.name}-seed{seed}-{_fingerprint()}")
    if files.report.is_file():
        return Prepared(files, WarmStartReport(**orjson.loads(files.report.read_bytes())), reused=True)
    unfinished = DemoFiles(files.folder.with_suffix(".unfinished"))
    shutil.rmtree(unfinished.folder, ignore_errors=True)
    report = _build(task(seed), seed, unfinished)
    unfinished.folder.rename(files.folder)  # at once, so that an interrupted run leaves nothing that looks complete
    return Prepared(files, report, reused=False)


def _build(task: Task, seed: int, files: DemoFiles) -> WarmStartReport:
    task.write_files(files.folder)
    write_questions(task, files.train, files.validation)
    tokenizer = build_tokenizer(task.language(), files.tokenizer)
    model = build_model(tokenizer, seed)
    report = warm_start(task, model, tokenizer, seed=seed)
    save(model, tokenizer, files.model)
    files.report.write_bytes(orjson.dumps(dataclasses.asdict(report)))
    return report


def _fingerprint() -> str:
    """Changes whenever the code that prepares changes."""
    digest = hashlib.blake2b(digest_size=6)
    for name in _PREPARING:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()
