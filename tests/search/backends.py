"""A backend that says what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from agentic_rollout.retrieval.corpus import Passage
from agentic_rollout.retrieval.index import Hit
from agentic_rollout.search.backend import Outcome, settle


def hits(query: str, topk: int) -> list[Hit]:
    """What `Library` finds: as many passages as asked for, that name query and rank."""
    return [
        Hit(Passage(f"{query}{rank}", f'"{query}"\nRank {rank}: é “{query}”', f"http://{rank}"), 1.0 / (rank + 1))
        for rank in range(topk)
    ]


class Library:
    """Finds `hits`, after `latency_s`; a query for which `fault` has an error fails with it."""

    name = "library"

    def __init__(
        self,
        *,
        latency_s: float = 0.0,
        fault: Callable[[str], Exception | None] = lambda query: None,
        max_batch: int = 512,
    ) -> None:
        self.max_batch = max_batch
        self.latency_s = latency_s
        self.fault = fault
        self.asked: list[tuple[list[str], int]] = []
        self.closed = 0

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        self.asked.append((list(queries), topk))
        await asyncio.sleep(self.latency_s)
        outcomes: list[Outcome] = [self.fault(query) or hits(query, topk) for query in queries]
        return settle(outcomes)

    async def aclose(self) -> None:
        self.closed += 1
