"""What the demo trains on: a world, its corpus and questions, and a warm-started model. Cached by what made them."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

import orjson

from agentic_rollout.demo import model as model_module
from agentic_rollout.demo import warmstart as warmstart_module
from agentic_rollout.demo import world as world_module
from agentic_rollout.demo.model import build_model, build_tokenizer, tokenizer_texts
from agentic_rollout.demo.warmstart import WarmStartReport, save, warm_start
from agentic_rollout.demo.world import build_world, write_corpus, write_questions


@dataclass(frozen=True, slots=True)
class DemoFiles:
    """Where the prepared parts lie."""

    folder: Path

    @property
    def corpus(self) -> Path:
        return self.folder / "corpus.jsonl"

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
    def report(self) -> Path:
        return self.folder / "warm_start.json"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A world and a model ready for reinforcement learning."""

    files: DemoFiles
    warm_start: WarmStartReport
    reused: bool


def prepare(seed: int, cache: Path) -> Prepared:
    """Builds everything for one seed, or finds it in `cache`.

    Raises:
        WarmStartError: the warm start misses its gate.
    """
    files = DemoFiles(cache / f"seed{seed}-{_fingerprint()}")
    if files.report.is_file():
        return Prepared(files, WarmStartReport(**orjson.loads(files.report.read_bytes())), reused=True)
    unfinished = DemoFiles(files.folder.with_suffix(".unfinished"))
    shutil.rmtree(unfinished.folder, ignore_errors=True)
    report = _build(seed, unfinished)
    unfinished.folder.rename(files.folder)  # at once, so that an interrupted run leaves nothing that looks complete
    return Prepared(files, report, reused=False)


def _build(seed: int, files: DemoFiles) -> WarmStartReport:
    world = build_world(seed)
    write_corpus(world, files.corpus)
    write_questions(world, files.train, files.validation)
    tokenizer = build_tokenizer(tokenizer_texts(seed), files.model)
    model = build_model(tokenizer, seed)
    report = warm_start(world, model, tokenizer, seed=seed)
    save(model, tokenizer, files.model)
    files.report.write_bytes(orjson.dumps(dataclasses.asdict(report)))
    return report


def _fingerprint() -> str:
    """Changes whenever the code that prepares changes."""
    digest = hashlib.blake2b(digest_size=6)
    for module in (world_module, model_module, warmstart_module):
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()
