"""Building an index: in shards, to be taken up again after an interruption, and visible only when it is complete.

DIR.partial/              what is being built; renamed to DIR as the last step
DIR/index.json            the manifest
DIR/offsets.npy           (passages,) int64, where each passage starts in the corpus
DIR/corpus.jsonl          only where the corpus was Parquet, a `datasets` folder or compressed
DIR/bm25/shard-00000/     terms.npy, starts.npy, rows.npy, scores.npy
DIR/vectors/              see `dense`
"""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
from pydantic import Field
from tqdm import tqdm

from agentic_rollout.config import Settings
from agentic_rollout.errors import CorpusError, SearchIndexError
from agentic_rollout.retrieval.analysis import build_analyzer
from agentic_rollout.retrieval.bm25 import Shard
from agentic_rollout.retrieval.corpus import Corpus, OnBadLine, convert_corpus, is_json_lines, scan_lines
from agentic_rollout.retrieval.dense import build_dense, open_faiss
from agentic_rollout.retrieval.encoders import EncoderSettings, build_encoder
from agentic_rollout.retrieval.postings import Postings, Statistics, invert, score

logger = logging.getLogger(__name__)

FORMAT = 1
_COUNTED = ("terms", "starts", "rows", "counts", "lengths")  # the fields of `Postings`


class IndexSettings(Settings):
    """What an index is made of; another build with the same settings makes the same index."""

    kind: Literal["bm25", "dense-flat", "dense-hnsw"] = "bm25"
    k1: float = Field(default=0.9, ge=0, description="BM25: how soon repeated terms stop counting")
    b: float = Field(default=0.4, ge=0, le=1, description="BM25: how much longer passages are held back")
    language: str = Field(default="english", description="BM25: english, cjk, or one with a Snowball stemmer")
    encoder: EncoderSettings = Field(default_factory=EncoderSettings, description="dense: what makes the vectors")
    faiss: str | None = Field(default=None, description="dense: a FAISS file of the corpus's vectors, used as it is")
    shard_size: int = Field(default=250_000, ge=1, description="passages held in memory at once")
    on_bad_line: OnBadLine = "refuse"


def build_index(
    corpus: str | Path, out: str | Path, settings: IndexSettings | None = None, *, processes: int | None = None
) -> dict[str, Any]:
    """Builds an index of `corpus` as the folder `out`, or goes on with an interrupted build.

    Args:
        corpus: JSON lines (compressed or not), Parquet, or a `datasets` folder. JSON lines are not copied: the index
            reads passages from this very file.
        processes: how many analyse text side by side; all cores unless told.

    Returns:
        The manifest.

    Raises:
        CorpusError: the corpus is missing or malformed.
        SearchIndexError: `out` exists, or an interrupted build there had other settings or another corpus.
        SettingsError: there is no such language or encoder.
    """
    settings = settings or IndexSettings()
    corpus, out = Path(corpus).resolve(), Path(out)
    if out.exists():
        raise SearchIndexError(f"{out} already exists. Remove it, or give the index another folder.")
    plan = _plan(corpus, settings)
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    with _locked(partial):
        _begin(partial, plan)
        manifest = _scanned(partial, corpus, settings)
        passages = Corpus(corpus_path(partial, manifest), np.load(partial / "offsets.npy", mmap_mode="r"))
        if settings.kind == "bm25":
            _build_bm25(passages, partial, settings, processes or os.cpu_count() or 1)
        else:
            _build_dense(passages, partial, settings)
        _finish(partial, out, manifest)
    return manifest


def corpus_path(folder: Path, manifest: dict[str, Any]) -> Path:
    """Where the passages of the index at `folder` are."""
    source = manifest["corpus"]
    return folder / "corpus.jsonl" if source["converted"] else Path(source["path"])


def load_shard(folder: Path) -> Shard:
    """A finished shard of a BM25 index, mapped.

    Raises:
        SearchIndexError: a file of it is missing or cut off.
    """
    try:
        terms, starts, rows, scores = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("terms", "starts", "rows", "scores")
        )
        return Shard(terms, starts, rows, scores, _size(folder))
    except (OSError, ValueError) as error:
        raise SearchIndexError(f"{folder} is damaged ({error}). Build the index again.") from error


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Keeps a second build of the same index away."""
    with (partial / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SearchIndexError(f"{partial} is being built by another process. Wait for it, or stop it.") from error
        yield


def _plan(corpus: Path, settings: IndexSettings) -> bytes:
    """Says what is to be built: only a build with the same plan is gone on with."""
    try:
        state = corpus.stat()
    except OSError as error:
        raise CorpusError(f"corpus {corpus} cannot be read ({error.strerror}). Check the path.") from error
    plan = {
        "format": FORMAT,
        "settings": settings.model_dump(),
        "corpus": str(corpus),
        "size": state.st_size,
        "modified_ns": state.st_mtime_ns,
    }
    return orjson.dumps(plan)


def _begin(partial: Path, plan: bytes) -> None:
    path = partial / "plan.json"
    if path.exists() and path.read_bytes() != plan:
        raise SearchIndexError(
            f"{partial} is an unfinished build with other settings or of another corpus. Repeat those, or remove it."
        )
    _write(path, plan)


def _scanned(partial: Path, corpus: Path, settings: IndexSettings) -> dict[str, Any]:
    """Converts the corpus where that is needed and finds its passages; returns the manifest."""
    path = partial / "scan.json"
    if not path.exists():
        converted = not is_json_lines(corpus)
        lines = partial / "corpus.jsonl" if converted else corpus
        if converted and not lines.exists():
            with _bar("converting", None, "passages") as bar:
                convert_corpus(corpus, lines, advance=bar.update)
        with _bar("scanning", lines.stat().st_size, "B") as bar:
            scan = scan_lines(lines, on_bad_line=settings.on_bad_line, advance=bar.update)
        if scan.skipped:
            logger.warning("%d lines were skipped; the first: %s", scan.skipped, scan.first_skipped)
        _save(partial / "offsets.npy", scan.offsets)
        content = {
            "format": FORMAT,
            "settings": settings.model_dump(),
            "corpus": {
                "path": str(corpus),
                "converted": converted,
                "size": lines.stat().st_size,
                "passages": len(scan.offsets),
                "skipped": scan.skipped,
            },
        }
        _write(path, orjson.dumps(content, option=orjson.OPT_INDENT_2))
    manifest: dict[str, Any] = orjson.loads(path.read_bytes())
    return manifest


def _build_bm25(corpus: Corpus, partial: Path, settings: IndexSettings, processes: int) -> None:
    build_analyzer(settings.language, key="language")  # a wrong one is told now, not by a process
    starts = range(0, len(corpus), settings.shard_size)
    folders = [partial / "bm25" / f"shard-{number:05d}" for number in range(len(starts))]
    with _bar("analysing", len(corpus), "passages") as bar:
        for folder, start in zip(folders, starts, strict=True):
            if folder.exists():
                bar.update(min(settings.shard_size, len(corpus) - start))
        todo = [(folder, start) for folder, start in zip(folders, starts, strict=True) if not folder.exists()]
        for size in _analysed(todo, corpus, partial, settings, processes):
            bar.update(size)
    with _bar("scoring", len(corpus), "passages") as bar:
        statistics = Statistics.gather([_load_postings(folder) for folder in folders])
        if not len(statistics.terms):
            raise CorpusError(
                f"none of the {len(corpus)} passages has a word to search for, stop words aside. Check `contents`."
            )
        for folder in folders:
            if not (folder / "scores.npy").exists():
                _save(folder / "scores.npy", score(_load_postings(folder), statistics, k1=settings.k1, b=settings.b))
            bar.update(_size(folder))
    for folder in folders:
        (folder / "counts.npy").unlink(missing_ok=True)
        (folder / "lengths.npy").unlink(missing_ok=True)


def _analysed(
    todo: list[tuple[Path, int]], corpus: Corpus, partial: Path, settings: IndexSettings, processes: int
) -> Iterator[int]:
    """Analyses the shards that are to do; yields the size of each when it is done."""
    if not todo:
        return
    offsets = partial / "offsets.npy"
    # Not forked: the parent may have threads (a progress bar's, a library's) whose locks a copy would inherit.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(todo)), mp_context=context) as pool:
        jobs = [
            pool.submit(_analyse, corpus.path, offsets, start, settings.shard_size, settings.language, folder)
            for folder, start in todo
        ]
        try:
            for job in as_completed(jobs):
                yield job.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _analyse(path: Path, offsets: Path, start: int, size: int, language: str, folder: Path) -> int:
    """Writes the postings of one shard, whole or not at all; returns how many passages it has."""
    corpus = Corpus(path, np.load(offsets, mmap_mode="r"))
    rows = range(start, min(start + size, len(corpus)))
    postings = invert((corpus[row].contents for row in rows), build_analyzer(language, key="language"))
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in _COUNTED:
        np.save(partial / f"{name}.npy", getattr(postings, name))
    (partial / "size.json").write_bytes(orjson.dumps(len(rows)))
    partial.rename(folder)
    return len(rows)


def _size(folder: Path) -> int:
    """Passages of a shard."""
    return int(orjson.loads((folder / "size.json").read_bytes()))


def _load_postings(folder: Path) -> Postings:
    return Postings(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in _COUNTED))


def _build_dense(corpus: Corpus, partial: Path, settings: IndexSettings) -> None:
    encoder = build_encoder(settings.encoder)
    if settings.faiss is not None:
        vectors = len(open_faiss(settings.faiss, encoder))
        if vectors != len(corpus):
            raise SearchIndexError(
                f"{settings.faiss} holds {vectors} vectors, the corpus {len(corpus)} passages. Give the corpus, in the "
                "order, that it was made from."
            )
        return
    with _bar("encoding", len(corpus), "passages") as bar:
        kind: Literal["flat", "hnsw"] = "flat" if settings.kind == "dense-flat" else "hnsw"
        build_dense(corpus, partial, encoder, kind=kind, shard_size=settings.shard_size, progress=bar.update)


def _finish(partial: Path, out: Path, manifest: dict[str, Any]) -> None:
    _write(partial / "index.json", orjson.dumps(manifest, option=orjson.OPT_INDENT_2))
    for name in ("plan.json", "scan.json", ".lock"):
        (partial / name).unlink()
    partial.rename(out)


def _bar(what: str, total: int | None, unit: str) -> tqdm[Any]:
    """A progress bar; on what is no terminal, a line now and then."""
    interval_s = 0.1 if os.isatty(2) else 30.0
    return tqdm(total=total, desc=what, unit=f" {unit}", unit_scale=True, mininterval=interval_s)


def _save(path: Path, array: Any) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        np.save(file, array)
    partial.replace(path)


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)
