"""From a path to an index."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from agentic_rollout.errors import CorpusError, SearchIndexError
from agentic_rollout.retrieval.analysis import build_analyzer
from agentic_rollout.retrieval.bm25 import BM25Ranker
from agentic_rollout.retrieval.build import FORMAT, IndexSettings, corpus_path, load_shard
from agentic_rollout.retrieval.corpus import Corpus, open_corpus
from agentic_rollout.retrieval.dense import load_dense, open_faiss
from agentic_rollout.retrieval.encoders import build_encoder
from agentic_rollout.retrieval.fusion import FusedIndex
from agentic_rollout.retrieval.index import CorpusIndex, Index, Ranker
from agentic_rollout.retrieval.lucene import LuceneIndex

logger = logging.getLogger(__name__)

_MANY_PASSAGES = 200_000


def open_index(path: str | Path, *, ef_search: int | None = None, device: str = "cpu") -> Index:
    """The index at `path`: a folder that `build_index` made, a folder of several, a Lucene index, or a corpus.

    Several indexes are fused by reciprocal rank. A corpus is a file; BM25 is built from it in memory, with the default
    settings, which suits some ten thousand passages.

    Args:
        ef_search: for `dense-hnsw`: how many candidates a search keeps; more find more, and take longer.
        device: for dense indexes: where vectors are compared, `cpu` or `cuda`.

    Raises:
        CorpusError: the corpus is missing, malformed, or not the one that was indexed.
        SearchIndexError: the folder holds no finished index.
        SettingsError: the encoder or the device is not there.
    """
    path = Path(path)
    if (path / "index.json").is_file():
        return _open_built(path, ef_search=ef_search, device=device)
    if path.is_dir() and any(path.glob("segments_*")):
        return LuceneIndex(path)
    parts = sorted(manifest.parent for manifest in path.glob("*/index.json"))
    if parts:
        return FusedIndex([_open_built(part, ef_search=ef_search, device=device) for part in parts])
    if path.is_dir():
        raise SearchIndexError(
            f"{path} holds no finished index (index.json, or Lucene's segments). `agentic-rollout index CORPUS --out "
            f"{path.name.removesuffix('.partial')}` builds one, and goes on with one that was interrupted."
        )
    if not path.exists() and path.with_name(path.name + ".partial").is_dir():
        raise SearchIndexError(
            f"{path} is not finished. The command that began {path}.partial, run again, goes on with it."
        )
    return _index_in_memory(path)


def _index_in_memory(path: Path) -> Index:
    corpus = open_corpus(path)
    if len(corpus) > _MANY_PASSAGES:
        logger.warning(
            "%s: indexing %d passages in memory; `agentic-rollout index` does that once, for all processes",
            path,
            len(corpus),
        )
    settings = IndexSettings()
    texts = (passage.contents for passage in corpus)
    ranker = BM25Ranker.from_texts(texts, build_analyzer("english", key="language"), k1=settings.k1, b=settings.b)
    if not ranker.has_terms:
        raise CorpusError(
            f"none of the {len(corpus)} passages of {path} has a word to search for, stop words aside. "
            "Check `contents`."
        )
    return CorpusIndex(corpus, ranker)


def _open_built(folder: Path, *, ef_search: int | None, device: str) -> Index:
    manifest = _manifest(folder)
    settings = IndexSettings(**manifest["settings"])
    corpus = _corpus(folder, manifest)
    ranker: Ranker
    if settings.kind == "bm25":
        shards = [load_shard(shard) for shard in sorted((folder / "bm25").glob("shard-*"))]
        ranker = BM25Ranker(shards, build_analyzer(settings.language, key="language"))
        ranked = sum(shard.passages for shard in shards)
    else:
        encoder = build_encoder(settings.encoder)
        if settings.faiss is None:
            dense = load_dense(folder, encoder, ef_search=ef_search, device=device)
        else:
            dense = open_faiss(settings.faiss, encoder, ef_search=ef_search, device=device)
        ranker, ranked = dense, len(dense)
    if ranked != len(corpus):
        raise SearchIndexError(
            f"{folder} ranks {ranked} passages of {len(corpus)}: a part of it is lost. Build it again."
        )
    return CorpusIndex(corpus, ranker)


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = orjson.loads((folder / "index.json").read_bytes())
    except orjson.JSONDecodeError as error:
        raise SearchIndexError(f"{folder}/index.json is no JSON ({error}). Build the index again.") from error
    if manifest.get("format") != FORMAT:
        raise SearchIndexError(
            f"{folder} has format {manifest.get('format')}; this version reads format {FORMAT}. Build it again."
        )
    return manifest


def _corpus(folder: Path, manifest: dict[str, Any]) -> Corpus:
    path = corpus_path(folder, manifest)
    size = manifest["corpus"]["size"]
    corpus = Corpus(path, np.load(folder / "offsets.npy", mmap_mode="r"))
    if path.stat().st_size != size:
        raise CorpusError(f"{path} has changed since {folder} was built ({size} bytes then). Build the index again.")
    return corpus
