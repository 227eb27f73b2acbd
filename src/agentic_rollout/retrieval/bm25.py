"""BM25 over shards, with `bm25s`: scores of postings are computed when the index is built, and a search adds them up.

Shards bound the memory of a build. As corpus-wide figures score them all, they find what one large index would find.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import bm25s
import numpy as np
from numpy.typing import NDArray

from agentic_rollout.retrieval.analysis import Analyzer
from agentic_rollout.retrieval.index import Ranking
from agentic_rollout.retrieval.postings import Statistics, invert, score, term_hash

# Compiling the search takes seconds in every process; below this size plain NumPy is fast enough.
_COMPILED_FROM_PASSAGES = 20_000


@dataclass(frozen=True, slots=True)
class Shard:
    """What a search needs of a shard: `Postings` with scores in place of counts."""

    terms: NDArray[np.uint64]
    starts: NDArray[np.int64]
    rows: NDArray[np.int32]
    scores: NDArray[np.float32]
    passages: int


class BM25Ranker:
    """Ranks the rows of all shards, which follow one another in the corpus.

    Rows with equal scores come in their order; which of them is cut off at `topk` is arbitrary, but repeatable.
    """

    def __init__(self, shards: Sequence[Shard], analyzer: Analyzer) -> None:
        self._shards = [shard for shard in shards if len(shard.terms)]
        self._first_rows = _first_rows(shards)
        self._analyzer = analyzer
        compiled = sum(shard.passages for shard in shards) >= _COMPILED_FROM_PASSAGES
        self._retrievers = [_retriever(shard, "numba" if compiled else "numpy") for shard in self._shards]
        self._warm_up()

    @classmethod
    def from_texts(cls, texts: Iterable[str], analyzer: Analyzer, *, k1: float = 0.9, b: float = 0.4) -> BM25Ranker:
        """An index in memory, of one shard."""
        postings = invert(texts, analyzer)
        scores = score(postings, Statistics.gather([postings]), k1=k1, b=b)
        return cls([Shard(postings.terms, postings.starts, postings.rows, scores, len(postings.lengths))], analyzer)

    @property
    def has_terms(self) -> bool:
        """Whether anything can be found at all."""
        return bool(self._shards)

    def rank(self, queries: Sequence[str], topk: int) -> list[Ranking]:
        """One ranking per query. A query that shares no term with the corpus finds nothing."""
        if topk < 1:
            return [[] for _ in queries]
        hashed = [_hashes(self._analyzer, query) for query in queries]
        rankings: list[Ranking] = [[] for _ in queries]
        for shard, first, retriever in zip(self._shards, self._first_rows, self._retrievers, strict=True):
            known = [(number, ids) for number, terms in enumerate(hashed) if (ids := _term_ids(shard, terms))]
            if not known:
                continue
            k = min(topk, shard.passages)
            rows, scores = retriever.retrieve([ids for _, ids in known], k=k, n_threads=1, show_progress=False)
            for (number, _), found, their_scores in zip(known, rows.tolist(), scores.tolist(), strict=True):
                pairs = zip(found, their_scores, strict=True)
                rankings[number].extend((first + row, value) for row, value in pairs if value > 0)
        for ranking in rankings:
            ranking.sort(key=lambda item: (-item[1], item[0]))
        return [ranking[:topk] for ranking in rankings]

    def _warm_up(self) -> None:
        if self._retrievers:
            self._retrievers[0].retrieve([[0]], k=1, n_threads=1, show_progress=False)


def _first_rows(shards: Sequence[Shard]) -> list[int]:
    starts = np.cumsum([0, *(shard.passages for shard in shards)]).tolist()
    return [start for start, shard in zip(starts, shards, strict=False) if len(shard.terms)]


def _retriever(shard: Shard, backend: str) -> bm25s.BM25:
    retriever = bm25s.BM25(method="lucene", backend=backend)
    retriever.scores = {
        "data": shard.scores,
        "indices": shard.rows,
        "indptr": shard.starts,
        "num_docs": shard.passages,
    }
    retriever.nonoccurrence_array = None
    retriever.unique_token_ids_set = range(len(shard.terms))  # ids come from `_term_ids`, so all of them are known
    return retriever


def _hashes(analyzer: Analyzer, query: str) -> NDArray[np.uint64]:
    return np.array([term_hash(term) for term in analyzer.analyze(query)], dtype=np.uint64)


def _term_ids(shard: Shard, hashes: NDArray[np.uint64]) -> list[int]:
    """The places of those terms that the shard has."""
    places = np.minimum(np.searchsorted(shard.terms, hashes), len(shard.terms) - 1)
    known: list[int] = places[shard.terms[places] == hashes].tolist()
    return known
