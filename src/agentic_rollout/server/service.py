"""The search server without a web framework.

Served by aiohttp (`server.app`) and by Ray Serve (`server.ray_app`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from agentic_rollout.errors import ToolError
from agentic_rollout.retrieval.index import Hit
from agentic_rollout.retrieval.rerank import Reranker
from agentic_rollout.search.backend import SearchBackend
from agentic_rollout.search.cache import CachedBackend
from agentic_rollout.search.pages import Page, PageStore, page_json
from agentic_rollout.search.wire import hits_json
from agentic_rollout.server.batches import JoinedRerankings, JoinedSearches
from agentic_rollout.server.bodies import parse_access, parse_rerank, parse_retrieve
from agentic_rollout.server.metrics import SearchMetrics
from agentic_rollout.server.replies import RefusedError, Reply, bad_body, tool_failure
from agentic_rollout.server.routing import Route, RoutedService, json_reply
from agentic_rollout.server.settings import ServerSettings


class SearchService(RoutedService):
    """Answers `/retrieve`, `/rerank` and `/access`.

    Args:
        backend: what is searched; closed by `aclose`.
        settings: limits.
        reranker: orders what the backend finds, for every `/retrieve`, and answers `/rerank`.
        pages: answers `/access`; closed by `aclose`.

    Raises:
        SettingsError: the token's variable is not set, or prometheus-client is not installed.
    """

    settings: ServerSettings

    def __init__(
        self,
        backend: SearchBackend,
        settings: ServerSettings,
        *,
        reranker: Reranker | None = None,
        pages: PageStore | None = None,
    ) -> None:
        self._about = _describe(backend, reranker, pages)
        cached = settings.cache.cache_size or settings.cache.cache_dir
        backend = CachedBackend(backend, settings.cache) if cached else backend
        metrics = SearchMetrics(lambda: self.waiting, backend.lookups if isinstance(backend, CachedBackend) else None)
        routes = [
            Route("/retrieve", "POST", self._retrieve),
            Route("/rerank", "POST", self._rerank),
            Route("/access", "POST", self._access),
        ]
        super().__init__(settings, metrics, routes)
        self._searches = JoinedSearches(backend, window_s=settings.batch_window_s, observe=metrics.batch.observe)
        self._rerankings = None if reranker is None else JoinedRerankings(reranker)
        self._pages = pages

    def about(self) -> Mapping[str, Any]:
        return self._about

    async def aclose(self) -> None:
        """Closes the backend, the reranker's thread and the pages."""
        await self._searches.aclose()
        if self._rerankings is not None:
            await self._rerankings.aclose()
        if self._pages is not None:
            await self._pages.aclose()

    async def _retrieve(self, body: bytes) -> Reply:
        asked = parse_retrieve(body, self.settings)
        if asked.candidates is not None and self._rerankings is None:
            raise bad_body("`topk_retrieval` and `topk_rerank` need a server with a reranker")
        with self.admitted(len(asked.queries)):
            found = await self._find(asked.queries, asked.topk, asked.candidates)
        return json_reply({"result": [hits_json(hits, return_scores=asked.return_scores) for hits in found]})

    async def _find(self, queries: list[str], topk: int, candidates: int | None) -> list[list[Hit]]:
        """The hits of each query; a blank one has none, and is not searched for."""
        asked = [query for query in queries if query and not query.isspace()]
        found: Sequence[list[Hit]] = []
        if asked and self._rerankings is None:
            found = await self._searches.search(asked, topk)
        elif asked and self._rerankings is not None:
            depth = candidates or max(topk, self.settings.rerank_candidates)
            found = await self._rerankings.rerank(asked, await self._searches.search(asked, depth), topk)
        if len(asked) == len(queries):
            return list(found)
        rest = iter(found)
        return [next(rest) if query and not query.isspace() else [] for query in queries]

    async def _rerank(self, body: bytes) -> Reply:
        if self._rerankings is None:
            raise RefusedError(404, "not_found", "this server has no reranker")
        asked = parse_rerank(body, self.settings)
        with self.admitted(len(asked.queries)):
            ranked = await self._rerankings.rerank(asked.queries, asked.results, asked.topk)
        return json_reply({"result": [hits_json(hits, return_scores=asked.return_scores) for hits in ranked]})

    async def _access(self, body: bytes) -> Reply:
        """`result` holds a page or null for each address; `errors` says why it is null."""
        if self._pages is None:
            raise RefusedError(404, "not_found", "this server has no pages")
        urls = parse_access(body, self.settings)
        with self.admitted(len(urls)):
            outcomes = await asyncio.gather(*(self._open(self._pages, url) for url in urls))
        result = [page_json(outcome) if isinstance(outcome, Page) else None for outcome in outcomes]
        errors = [
            {"error": tool_failure(outcome), "detail": str(outcome)} if isinstance(outcome, ToolError) else None
            for outcome in outcomes
        ]
        return json_reply({"result": result, "errors": errors})

    async def _open(self, pages: PageStore, url: str) -> Page | ToolError:
        try:
            return await pages.fetch(url)
        except ToolError as error:
            failure = tool_failure(error)
            if failure.is_tool_failure:
                self._metrics.count_failure(failure)
            return error


def _describe(backend: SearchBackend, reranker: Reranker | None, pages: PageStore | None) -> dict[str, Any]:
    """What `/health` says of the server's parts; `passages` is null where the index is elsewhere."""
    index = getattr(backend, "index", None)
    return {
        "backend": backend.name,
        "passages": None if index is None else len(index),
        "reranker": reranker is not None,
        "pages": pages is not None,
    }
