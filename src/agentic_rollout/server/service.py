"""The search server without a web framework: from a request's parts to a reply.

Served by aiohttp (`server.app`) and by Ray Serve (`server.ray_app`).
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from typing import Any

import orjson

from agentic_rollout.errors import ToolError
from agentic_rollout.retrieval.index import Hit
from agentic_rollout.retrieval.rerank import Reranker
from agentic_rollout.search.backend import SearchBackend
from agentic_rollout.search.cache import CachedBackend
from agentic_rollout.search.pages import Page, PageStore, page_json
from agentic_rollout.search.wire import hits_json
from agentic_rollout.server.batches import JoinedRerankings, JoinedSearches
from agentic_rollout.server.bodies import parse_access, parse_rerank, parse_retrieve
from agentic_rollout.server.metrics import ServerMetrics
from agentic_rollout.server.replies import RefusedError, Reply, backend_failure, bad_body, busy, tool_failure
from agentic_rollout.server.settings import ServerSettings

logger = logging.getLogger(__name__)

ReadBody = Callable[[], Awaitable[bytes]]


class SearchService:
    """Answers requests; any number at a time, on one event loop.

    Args:
        backend: what is searched; closed by `aclose`.
        settings: limits.
        reranker: orders what the backend finds, for every `/retrieve`, and answers `/rerank`.
        pages: answers `/access`; closed by `aclose`.

    Attributes:
        draining: set when the server is to stop: `/health` then says so, and everything else is still answered.
        idle: set while no request is being answered.

    Raises:
        SettingsError: the token's variable is not set, or prometheus-client is not installed.
    """

    def __init__(
        self,
        backend: SearchBackend,
        settings: ServerSettings,
        *,
        reranker: Reranker | None = None,
        pages: PageStore | None = None,
    ) -> None:
        self.settings = settings
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self._token = settings.read_token()
        self._about = _describe(backend, reranker, pages)
        cached = settings.cache.cache_size or settings.cache.cache_dir
        backend = CachedBackend(backend, settings.cache) if cached else backend
        self._metrics = ServerMetrics(
            lambda: self._waiting, backend.lookups if isinstance(backend, CachedBackend) else None
        )
        self._searches = JoinedSearches(backend, window_s=settings.batch_window_s, observe=self._metrics.batch.observe)
        self._rerankings = None if reranker is None else JoinedRerankings(reranker)
        self._pages = pages
        self._waiting = 0  # queries and addresses accepted and not yet answered
        self._in_flight = 0  # requests
        self._routes: dict[str, tuple[str, Callable[[bytes], Awaitable[Reply]]]] = {
            "/retrieve": ("POST", self._retrieve),
            "/rerank": ("POST", self._rerank),
            "/access": ("POST", self._access),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._expose_metrics),
        }

    async def answer(self, method: str, path: str, authorization: str | None, read: ReadBody) -> Reply:
        """The reply to one request; never raises.

        Args:
            authorization: the header of this name.
            read: reads the body, which is not asked for before method, path and token are right.
        """
        started = time.perf_counter()
        self._in_flight += 1
        self.idle.clear()
        try:
            reply = await self._guarded(method, path, authorization, read)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self.idle.set()
        route = path if path in self._routes else "unknown"
        self._metrics.observe(route, reply.status, time.perf_counter() - started)
        return reply

    async def aclose(self) -> None:
        """Closes the backend, the reranker's thread and the pages."""
        await self._searches.aclose()
        if self._rerankings is not None:
            await self._rerankings.aclose()
        if self._pages is not None:
            await self._pages.aclose()

    async def _guarded(self, method: str, path: str, authorization: str | None, read: ReadBody) -> Reply:
        try:
            async with asyncio.timeout(self.settings.deadline_s):
                return await self._dispatch(method, path, authorization, read)
        except RefusedError as refusal:
            return refusal.reply()
        except ToolError as error:
            self._metrics.count_failure(tool_failure(error))
            return backend_failure(error, self.settings.retry_after_s).reply()
        except TimeoutError:
            self._metrics.count_failure("timeout")
            return RefusedError(504, "timeout", f"no answer within {self.settings.deadline_s:g} s").reply()
        except Exception:
            logger.exception("%s %s failed", method, path if path in self._routes else "of an unknown path")
            self._metrics.count_failure("error")
            return RefusedError(500, "error", "the server failed at this request; its log says why").reply()

    async def _dispatch(self, method: str, path: str, authorization: str | None, read: ReadBody) -> Reply:
        route = self._routes.get(path)
        if route is None:
            raise RefusedError(404, "not_found", f"there is {', '.join(self._routes)}, and nothing else")
        expected, handle = route
        if method != expected:
            raise RefusedError(405, "method_not_allowed", f"{path} takes {expected}", {"Allow": expected})
        if path != "/health":
            self._authorize(authorization)
        body = await read() if expected == "POST" else b""
        if len(body) > self.settings.max_body_bytes:
            raise RefusedError(413, "too_large", f"a body may have at most {self.settings.max_body_bytes} bytes")
        return await handle(body)

    def _authorize(self, authorization: str | None) -> None:
        if self._token is None:
            return
        scheme, _, token = (authorization or "").partition(" ")
        given = token.strip().encode(errors="surrogateescape")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given, self._token):
            raise RefusedError(401, "unauthorized", "a valid bearer token is needed", {"WWW-Authenticate": "Bearer"})

    def _admit(self, number: int) -> None:
        """Counts queries in, or refuses them; whoever calls it counts them out again."""
        if self._waiting + number > self.settings.max_queue:
            raise busy("overloaded", f"{self._waiting} queries are waiting already", self.settings.retry_after_s)
        self._waiting += number
        self._metrics.queries.inc(number)

    async def _retrieve(self, body: bytes) -> Reply:
        asked = parse_retrieve(body, self.settings)
        if asked.candidates is not None and self._rerankings is None:
            raise bad_body("`topk_retrieval` and `topk_rerank` need a server with a reranker")
        self._admit(len(asked.queries))
        try:
            found = await self._find(asked.queries, asked.topk, asked.candidates)
        finally:
            self._waiting -= len(asked.queries)
        return _json({"result": [hits_json(hits, return_scores=asked.return_scores) for hits in found]})

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
        self._admit(len(asked.queries))
        try:
            ranked = await self._rerankings.rerank(asked.queries, asked.results, asked.topk)
        finally:
            self._waiting -= len(asked.queries)
        return _json({"result": [hits_json(hits, return_scores=asked.return_scores) for hits in ranked]})

    async def _access(self, body: bytes) -> Reply:
        """`result` holds a page or null for each address; `errors` says why it is null."""
        if self._pages is None:
            raise RefusedError(404, "not_found", "this server has no pages")
        urls = parse_access(body, self.settings)
        self._admit(len(urls))
        try:
            outcomes = await asyncio.gather(*(self._open(self._pages, url) for url in urls))
        finally:
            self._waiting -= len(urls)
        result = [page_json(outcome) if isinstance(outcome, Page) else None for outcome in outcomes]
        errors = [
            {"error": tool_failure(outcome), "detail": str(outcome)} if isinstance(outcome, ToolError) else None
            for outcome in outcomes
        ]
        return _json({"result": result, "errors": errors})

    async def _open(self, pages: PageStore, url: str) -> Page | ToolError:
        try:
            return await pages.fetch(url)
        except ToolError as error:
            failure = tool_failure(error)
            if failure.is_tool_failure:
                self._metrics.count_failure(failure)
            return error

    async def _health(self, body: bytes) -> Reply:
        state = "draining" if self.draining else "ready"
        return _json({"status": state, "waiting": self._waiting, **self._about}, 503 if self.draining else 200)

    async def _expose_metrics(self, body: bytes) -> Reply:
        text, content_type = self._metrics.exposition()
        return Reply(200, text, content_type)


def _json(content: Any, status: int = 200) -> Reply:
    return Reply(status, orjson.dumps(content))


def _describe(backend: SearchBackend, reranker: Reranker | None, pages: PageStore | None) -> dict[str, Any]:
    """What `/health` says of the server's parts; `passages` is null where the index is elsewhere."""
    index = getattr(backend, "index", None)
    return {
        "backend": backend.name,
        "passages": None if index is None else len(index),
        "reranker": reranker is not None,
        "pages": pages is not None,
        "version": version("agentic-rollout"),
    }
