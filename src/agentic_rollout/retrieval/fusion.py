"""Several rankings as one, by reciprocal rank fusion (Cormack et al., 2009)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

from agentic_rollout.errors import SettingsError
from agentic_rollout.retrieval.index import Hit, Index

IdT = TypeVar("IdT", bound=Hashable)


def reciprocal_rank_fusion(
    rankings: Sequence[Sequence[IdT]], *, k: int = 60, weights: Sequence[float] | None = None
) -> list[tuple[IdT, float]]:
    """Ids and their fused scores, best first.

    An id scores the sum over the rankings of weight / (k + rank), ranks counted from 1; only the first of several
    occurrences in one ranking counts. Equal scores: the id first met, reading the rankings in order, comes first.

    Args:
        rankings: ids, best first.
        k: how little the first ranks stand out.
        weights: one per ranking; all 1 unless told.
    """
    scores: dict[IdT, float] = {}
    for ranking, weight in zip(rankings, weights or [1.0] * len(rankings), strict=True):
        for rank, id_ in enumerate(dict.fromkeys(ranking), start=1):
            scores[id_] = scores.get(id_, 0.0) + weight / (k + rank)
    return sorted(scores.items(), key=lambda item: -item[1])


class FusedIndex:
    """Several indexes of one corpus, searched one after the other; passages are the same if their ids are.

    Args:
        indexes: of the same passages.
        depth: hits asked of each index, more than are returned: a passage that no index puts first may yet win.
        k: see `reciprocal_rank_fusion`.
        weights: one per index; all 1 unless told.

    Raises:
        SettingsError: there is no index, or not one weight above 0 for each.
    """

    def __init__(
        self, indexes: Sequence[Index], *, depth: int = 30, k: int = 60, weights: Sequence[float] | None = None
    ) -> None:
        if not indexes:
            raise SettingsError("indexes", indexes, "at least one index", "Say what is to be fused.")
        if weights is not None and (len(weights) != len(indexes) or min(weights) <= 0):
            raise SettingsError("weights", weights, f"{len(indexes)} numbers above 0", "Give one for each index.")
        self._indexes = indexes
        self._depth = depth
        self._k = k
        self._weights = weights

    def __len__(self) -> int:
        return len(self._indexes[0])

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The best passages of each query; their scores are those of the fusion."""
        found = [index.search(queries, max(topk, self._depth)) for index in self._indexes]
        return [self._fuse([hits[position] for hits in found], topk) for position in range(len(queries))]

    def _fuse(self, results: Sequence[Sequence[Hit]], topk: int) -> list[Hit]:
        passages = {hit.passage.id: hit.passage for hits in results for hit in hits}
        rankings = [[hit.passage.id for hit in hits] for hits in results]
        fused = reciprocal_rank_fusion(rankings, k=self._k, weights=self._weights)
        return [Hit(passages[id_], score) for id_, score in fused[:topk]]
