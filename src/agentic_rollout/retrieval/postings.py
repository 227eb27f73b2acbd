"""The inverted index of one shard, and BM25 scores for it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from agentic_rollout.retrieval.analysis import Analyzer


def term_hash(term: str) -> int:
    """64 bits that stand for a term: five million terms collide with a probability below 1e-6."""
    return int.from_bytes(hashlib.blake2b(term.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Postings:
    """Which passages of a shard hold which terms: a sparse matrix, by term.

    Attributes:
        terms: (T,) uint64, the hashes of the shard's terms, ascending.
        starts: (T+1,) int64, where a term's postings start.
        rows: (postings,) int32, passages by their place in the shard, ascending within a term.
        counts: (postings,) int32, how often the passage holds the term.
        lengths: (passages,) int32, terms of each passage.
    """

    terms: NDArray[np.uint64]
    starts: NDArray[np.int64]
    rows: NDArray[np.int32]
    counts: NDArray[np.int32]
    lengths: NDArray[np.int32]

    @property
    def document_frequencies(self) -> NDArray[np.int64]:
        """(T,), how many passages of the shard hold each term."""
        return np.diff(self.starts)


def invert(texts: Iterable[str], analyzer: Analyzer) -> Postings:
    """The postings of a shard's texts, in their order."""
    vocabulary: dict[str, int] = {}
    passages = [[vocabulary.setdefault(term, len(vocabulary)) for term in analyzer.analyze(text)] for text in texts]
    lengths = np.fromiter(map(len, passages), dtype=np.int32, count=len(passages))
    total = int(lengths.sum())
    numbers = np.fromiter(chain.from_iterable(passages), dtype=np.int64, count=total)
    hashes = np.fromiter(map(term_hash, vocabulary), dtype=np.uint64, count=len(vocabulary))
    order = np.argsort(hashes)
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    # One number for each pair of term and passage: sorting it sorts by term, then by passage.
    pairs = places[numbers] * len(passages) + np.repeat(np.arange(len(passages)), lengths)
    pairs, counts = np.unique(pairs, return_counts=True)
    postings = np.bincount(pairs // max(len(passages), 1), minlength=len(vocabulary))
    starts = np.concatenate([[0], np.cumsum(postings)]).astype(np.int64)
    rows = (pairs % max(len(passages), 1)).astype(np.int32)
    return Postings(hashes[order], starts, rows, counts.astype(np.int32), lengths)


@dataclass(frozen=True, slots=True)
class Statistics:
    """What BM25 needs to know of the whole corpus.

    Attributes:
        passages: N, how many there are.
        mean_length: terms of a passage, on average.
        terms: (V,) uint64, the hashes of all terms, ascending.
        document_frequencies: (V,) int64, how many passages hold each.
    """

    passages: int
    mean_length: float
    terms: NDArray[np.uint64]
    document_frequencies: NDArray[np.int64]

    @classmethod
    def gather(cls, shards: Sequence[Postings]) -> Statistics:
        """The figures of all shards together."""
        passages = sum(len(shard.lengths) for shard in shards)
        length = sum(int(shard.lengths.sum(dtype=np.int64)) for shard in shards)
        terms = np.empty(0, dtype=np.uint64)
        frequencies = np.empty(0, dtype=np.int64)
        for shard in shards:  # one at a time: all shards' terms at once would be several times the vocabulary
            merged = np.union1d(terms, shard.terms)
            sums = np.zeros(len(merged), dtype=np.int64)
            sums[np.searchsorted(merged, terms)] += frequencies
            sums[np.searchsorted(merged, shard.terms)] += shard.document_frequencies
            terms, frequencies = merged, sums
        return cls(
            passages, length / passages or 1.0, terms, frequencies
        )  # 1.0: nothing to divide, but no division by 0


def score(postings: Postings, statistics: Statistics, *, k1: float, b: float) -> NDArray[np.float32]:
    """(postings,), what each posting adds to its passage's BM25 score.

    Lucene's formula: idf = ln(1 + (N - df + 0.5) / (df + 0.5)), times tf / (tf + k1 (1 - b + b length / mean length)).
    """
    df = statistics.document_frequencies[np.searchsorted(statistics.terms, postings.terms)]
    idf = np.log1p((statistics.passages - df + 0.5) / (df + 0.5)).astype(np.float32)
    norms = (k1 * (1.0 - b + b * postings.lengths / statistics.mean_length)).astype(np.float32)
    counts = postings.counts.astype(np.float32)
    scores: NDArray[np.float32] = np.repeat(idf, postings.document_frequencies)
    scores *= counts / (counts + norms[postings.rows])
    return scores
