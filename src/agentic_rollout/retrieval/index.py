"""What every index offers, whatever is inside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentic_rollout.retrieval.corpus import Passage


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage found. Scores compare within one result list only: each kind of index has a scale of its own."""

    passage: Passage
    score: float


Ranking = list[tuple[int, float]]
"""Rows of a corpus and their scores, best first."""


class Ranker(Protocol):
    """Ranks the rows of a corpus by their number; knows nothing of their text."""

    def rank(self, queries: Sequence[str], topk: int) -> list[Ranking]:
        """One ranking per query; thread-safe.

        At most `topk` rows come back, fewer where fewer match. Equal scores: the smaller row first.
        """
        ...


class Index(Protocol):
    """Finds passages. Synchronous, thread-safe and bound by the CPU: an event loop calls it in a thread."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The best passages of each query, best first; fewer than `topk` where fewer match."""
        ...

    def __len__(self) -> int:
        """Number of passages."""
        ...


class CorpusIndex:
    """A ranker, and the corpus whose rows it ranks."""

    def __init__(self, corpus: Sequence[Passage], ranker: Ranker) -> None:
        self.corpus = corpus
        self.ranker = ranker

    def __len__(self) -> int:
        return len(self.corpus)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        return [[Hit(self.corpus[row], score) for row, score in ranking] for ranking in self.ranker.rank(queries, topk)]
