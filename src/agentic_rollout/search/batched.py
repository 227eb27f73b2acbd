"""Searches that become ready together are one request to a backend."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agentic_rollout.batching import Batcher
from agentic_rollout.retrieval.index import Hit
from agentic_rollout.search.backend import Outcome, SearchBackend, search_each, settle


class BatchedBackend:
    """Joins the queries of separate searches, as many as the backend gains from.

    Args:
        backend: what is asked.
        window_s: how long the first query waits for others.
        max_in_flight: the most requests to the backend at a time.
    """

    def __init__(self, backend: SearchBackend, *, window_s: float = 0.0, max_in_flight: int = 1) -> None:
        self.backend = backend
        self.name = backend.name
        self.identity: str = getattr(backend, "identity", backend.name)
        self.max_batch = backend.max_batch
        self._batcher = Batcher(
            self._answer, max_batch=backend.max_batch, window_s=window_s, max_in_flight=max_in_flight
        )

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        return settle(await asyncio.gather(*(self._submit(query, topk) for query in queries)))

    async def aclose(self) -> None:
        await self._batcher.aclose()
        await self.backend.aclose()

    async def _submit(self, query: str, topk: int) -> Outcome:
        try:
            return await self._batcher.submit((query, topk))
        except Exception as error:
            return error

    async def _answer(self, asked: list[tuple[str, int]]) -> list[Outcome]:
        """One search for each number of hits asked for: mostly one."""
        by_topk: dict[int, list[int]] = {}
        for place, (_, topk) in enumerate(asked):
            by_topk.setdefault(topk, []).append(place)
        found: list[Outcome] = [[] for _ in asked]

        async def search(topk: int, places: list[int]) -> None:
            outcomes = await search_each(self.backend, [asked[place][0] for place in places], topk)
            for place, outcome in zip(places, outcomes, strict=True):
                found[place] = outcome

        await asyncio.gather(*(search(topk, places) for topk, places in by_topk.items()))
        return found
