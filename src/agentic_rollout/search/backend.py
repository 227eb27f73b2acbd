"""The protocol of everything that can be searched, and the index in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from agentic_rollout.errors import ToolError
from agentic_rollout.retrieval.index import Hit, Index


class SearchBackend(Protocol):
    """Searches for several queries at once.

    Attributes:
        name: says in messages, metrics and cache keys what was asked; holds no secret.
        max_batch: the most queries that gain from being asked together; 1 where a service takes one query a request.
    """

    name: str
    max_batch: int

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The best hits of each query, in the order of the queries.

        Raises:
            PartialSearchError: some of several queries failed; it holds what came of each.
            ToolError: the search failed; its status says how. Never an empty list that stands for a failure.
        """
        ...

    async def aclose(self) -> None:
        """Releases connections and threads; afterwards no search is possible."""
        ...


Outcome = list[Hit] | Exception
"""The hits of one query, or its failure."""


class PartialSearchError(ToolError):
    """Some queries of a search failed. Whoever does not ask for `outcomes` sees the first failure."""

    def __init__(self, outcomes: Sequence[Outcome], first: ToolError) -> None:
        super().__init__(str(first), first.status)
        self.outcomes = list(outcomes)


def settle(outcomes: Sequence[Outcome]) -> list[list[Hit]]:
    """What a search returns or raises, given what came of each of its queries."""
    hits = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
    if len(hits) == len(outcomes):
        return hits
    first = next(outcome for outcome in outcomes if isinstance(outcome, Exception))
    if len(outcomes) > 1 and isinstance(first, ToolError):
        raise PartialSearchError(outcomes, first)
    raise first


async def search_each(backend: SearchBackend, queries: Sequence[str], topk: int) -> list[Outcome]:
    """What comes of each query of one search: the reverse of `settle`."""
    try:
        found: list[Outcome] = list(await backend.search(queries, topk))
        if len(found) != len(queries):
            raise ToolError(f"{backend.name} gave {len(found)} results for {len(queries)} queries", "bad_reply")
    except PartialSearchError as error:
        return error.outcomes
    except Exception as error:
        return [error] * len(queries)
    return found


class LocalBackend:
    """An index in this process, searched in threads of its own: the event loop goes on meanwhile.

    Args:
        index: is shared by the threads.
        name: for messages and metrics.
        threads: a batch is split over this many; indexes release the interpreter while they compute.
        max_batch: the most queries of one call.
    """

    def __init__(self, index: Index, *, name: str = "embedded", threads: int = 1, max_batch: int = 512) -> None:
        self.index = index
        self.name = name
        self.max_batch = max_batch
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="search")

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        loop = asyncio.get_running_loop()
        size = -(-len(queries) // self._threads)
        parts = [queries[start : start + size] for start in range(0, len(queries), size)] if queries else []
        found = await asyncio.gather(
            *(loop.run_in_executor(self._pool, self.index.search, part, topk) for part in parts)
        )
        return [hits for part in found for hits in part]

    async def aclose(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
