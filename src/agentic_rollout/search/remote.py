"""A search server: `POST /retrieve`, as this package, Search-R1, AReaL and ASearcher serve it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentic_rollout.errors import ToolError
from agentic_rollout.retrieval.index import Hit
from agentic_rollout.search.backend import Outcome, settle
from agentic_rollout.search.http import HttpClient, HttpError, HttpSettings, split_url
from agentic_rollout.search.wire import parse_hits
from agentic_rollout.types import ToolStatus

_ROUTE = "/retrieve"
# HTTP codes that one query of several can bring about: a body that is refused, or a computation that fails or takes
# too long. 503 is not among them, as it says that the server has too much to do already.
_PERHAPS_ONE_QUERYS_FAULT = (400, 413, 422, 500, 502, 504)


@dataclass
class _Search:
    """What the requests of one search share."""

    topk: int
    deadline: float
    failures_left: int  # requests that may fail before no more halves are asked


class RemoteBackend:
    """Asks a search server, all queries of a search as one request.

    Where such a request fails with what one of its queries may have brought about, its halves are asked apart, down to
    the single query, within the deadline of the whole. So one query that a server chokes on, or two, fail alone; a
    server that chokes on all is not asked about each.

    Args:
        url: of the server, or of its `/retrieve` route.
        token: sent as a bearer token.
        max_batch: most queries of one request.
        key: the setting that `url` came from, for error messages.

    Raises:
        SettingsError: `url` is none, or holds a user name, a password or a query string.
    """

    def __init__(
        self, url: str, http: HttpSettings, *, token: str | None = None, max_batch: int = 64, key: str = "url"
    ) -> None:
        parts = split_url(url, key)
        path = parts.path.rstrip("/").removesuffix(_ROUTE)
        self.identity = f"{parts.scheme}://{parts.netloc}{path}"
        self.name = f"search server {parts.netloc}"
        self.max_batch = max_batch
        self.client = HttpClient(
            self.name, self.identity, http, headers={} if token is None else {"Authorization": f"Bearer {token}"}
        )

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        deadline = asyncio.get_running_loop().time() + self.client.settings.total_timeout_s
        levels = len(queries).bit_length()
        search = _Search(topk, deadline, failures_left=2 * levels + 1)  # on each level, two requests may fail
        return settle(await self._ask(search, list(queries), self.client.settings.attempts))

    async def aclose(self) -> None:
        await self.client.aclose()

    async def _ask(
        self, search: _Search, queries: list[str], attempts: int, failure: ToolError | None = None
    ) -> list[Outcome]:
        """What comes of each query; `failure` is what came of a larger request with the same queries."""
        try:
            return list(await self._retrieve(search, queries, attempts))
        except HttpError as error:
            out_of_time = asyncio.get_running_loop().time() >= search.deadline
            failure = failure if out_of_time and failure is not None else error
            search.failures_left -= 1
            perhaps_one = error.status == ToolStatus.BAD_REPLY or error.code in _PERHAPS_ONE_QUERYS_FAULT
            if len(queries) == 1 or not perhaps_one or search.failures_left <= 0:
                return [failure] * len(queries)
        middle = len(queries) // 2
        # A failure that is no query's fault is left to the retries of the single query.
        tries = [
            (half, self.client.settings.attempts if len(half) == 1 else 1)
            for half in (queries[:middle], queries[middle:])
        ]
        halves = await asyncio.gather(*(self._ask(search, half, attempts, failure) for half, attempts in tries))
        return [outcome for half in halves for outcome in half]

    async def _retrieve(self, search: _Search, queries: list[str], attempts: int) -> list[list[Hit]]:
        def parse(reply: Any) -> list[list[Hit]]:
            result = reply.get("result") if isinstance(reply, Mapping) else None
            if not isinstance(result, list):
                raise ToolError("the reply has no list `result`", ToolStatus.BAD_REPLY)
            if len(result) != len(queries):
                raise ToolError(f"{len(queries)} queries got {len(result)} results", ToolStatus.BAD_REPLY)
            return [parse_hits(entry)[: search.topk] for entry in result]

        body = {"queries": queries, "topk": search.topk, "return_scores": True}
        return await self.client.request_json(
            "POST", _ROUTE, json=body, parse=parse, deadline=search.deadline, attempts=attempts
        )
