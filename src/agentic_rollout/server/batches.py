"""The work of requests that arrive together, done together where that gains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from agentic_rollout.batching import Batcher
from agentic_rollout.retrieval.index import Hit
from agentic_rollout.retrieval.rerank import Reranker, rerank_all
from agentic_rollout.search.backend import Outcome, SearchBackend, search_each, settle

SearchAsk = tuple[Sequence[str], int]
"""The queries of one request, and the hits wanted for each."""

RerankAsk = tuple[Sequence[str], Sequence[Sequence[Hit]], int]
"""The queries of one request, the hits of each, and how many of those are wanted."""


class JoinedSearches:
    """Searches for requests. What is joined are requests, not queries, so a request costs one future and no task.

    Args:
        backend: with `max_batch` above 1, requests that arrive together become one search; otherwise each is passed on.
        window_s: how long the first request waits for others.
        observe: is told the number of queries of each search.
    """

    def __init__(
        self, backend: SearchBackend, *, window_s: float = 0.0, observe: Callable[[int], None] = lambda queries: None
    ) -> None:
        self._backend = backend
        self._observe = observe
        self._batcher: Batcher[SearchAsk, list[Outcome]] = Batcher(
            self._answer, max_batch=backend.max_batch, window_s=window_s
        )

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The hits of each query.

        Raises:
            ToolError: the search of one of them failed; other requests of the same batch are not touched.
        """
        if self._backend.max_batch > 1:
            return settle(await self._batcher.submit((queries, topk)))
        self._observe(len(queries))
        return await self._backend.search(queries, topk)

    async def aclose(self) -> None:
        await self._batcher.aclose()
        await self._backend.aclose()

    async def _answer(self, asks: list[SearchAsk]) -> list[list[Outcome]]:
        """One search for each number of hits asked for: mostly one."""
        found: list[list[Outcome]] = [[] for _ in asks]
        for topk in dict.fromkeys(topk for _, topk in asks):
            places = [place for place, ask in enumerate(asks) if ask[1] == topk]
            outcomes = iter(await self._search([query for place in places for query in asks[place][0]], topk))
            for place in places:
                found[place] = [next(outcomes) for _ in asks[place][0]]
        return found

    async def _search(self, queries: Sequence[str], topk: int) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for start in range(0, len(queries), self._backend.max_batch):
            part = queries[start : start + self._backend.max_batch]
            self._observe(len(part))
            outcomes += await search_each(self._backend, part, topk)
        return outcomes


class JoinedRerankings:
    """Reranks for requests, in a thread of its own: those that wait meanwhile are the next batch."""

    def __init__(self, reranker: Reranker, *, max_batch: int = 64) -> None:
        self._reranker = reranker
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rerank")
        self._batcher: Batcher[RerankAsk, list[list[Hit]]] = Batcher(self._answer, max_batch=max_batch)

    async def rerank(self, queries: Sequence[str], results: Sequence[Sequence[Hit]], topk: int) -> list[list[Hit]]:
        """The best `topk` hits of each query by the reranker's scores, which they then carry."""
        return await self._batcher.submit((queries, results, topk))

    async def aclose(self) -> None:
        await self._batcher.aclose()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, asks: list[RerankAsk]) -> list[list[list[Hit]]]:
        queries = [query for ask in asks for query in ask[0]]
        results = [hits for ask in asks for hits in ask[1]]
        most = max(topk for _, _, topk in asks)
        loop = asyncio.get_running_loop()
        ranked = iter(await loop.run_in_executor(self._thread, rerank_all, self._reranker, queries, results, most))
        return [[next(ranked)[:topk] for _ in asked] for asked, _, topk in asks]
