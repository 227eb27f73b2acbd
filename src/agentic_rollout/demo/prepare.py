"""What the demo trains on: a world, its corpus and questions, and a warm-started model. Cached by what made them."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
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

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DemoFiles:
    """Where the prepared parts lie."""

    folder: Path
    report: WarmStartReport
    reused: bool

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


def prepare(seed: int, cache: Path) -> DemoFiles:
    """Builds everything for one seed, or finds it in `cache`.

    Raises:
        WarmStartError: the warm start misses its gate.
    """
    folder = cache / f"seed{seed}-{_fingerprint()}"
    report_path = folder / "warm_start.json"
    if report_path.is_file():
        return DemoFiles(folder, WarmStartReport(**orjson.loads(report_path.read_bytes())), reused=True)
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    report = _build(seed, unfinished)
    (unfinished / report_path.name).write_bytes(orjson.dumps(dataclasses.asdict(report)))
    unfinished.rename(folder)  # at once, so that an interrupted run leaves nothing that looks complete
    return DemoFiles(folder, report, reused=False)


def _build(seed: int, folder: Path) -> WarmStartReport:
    world = build_world(seed)
    files = DemoFiles(folder, report=None, reused=False)  # type: ignore[arg-type]
    write_corpus(world, files.corpus)
    write_questions(world, files.train, files.validation)
    tokenizer = build_tokenizer(tokenizer_texts(seed), files.model)
    model = build_model(tokenizer, seed)
    report = warm_start(world, model, tokenizer, seed=seed)
    save(model, tokenizer, files.model)
    return report


def _fingerprint() -> str:
    """Changes whenever the code that prepares changes."""
    digest = hashlib.blake2b(digest_size=6)
    for module in (world_module, model_module, warmstart_module):
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()
