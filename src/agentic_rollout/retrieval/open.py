"""From a path to an index."""

from __future__ import annotations

from pathlib import Path

from agentic_rollout.retrieval.bm25 import BM25Index
from agentic_rollout.retrieval.corpus import load_corpus
from agentic_rollout.retrieval.index import Index


def open_index(path: str | Path) -> Index:
    """The index at `path`.

    A file is a corpus, and BM25 is built from it in memory.

    Raises:
        CorpusError: the corpus is missing or malformed.
    """
    return BM25Index.build(load_corpus(path))
