"""Answers kept in memory and on disk; a query that is being asked is not asked again."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import orjson
from cachetools import LRUCache
from pydantic import Field

from agentic_rollout.batching import Batcher
from agentic_rollout.config import Settings
from agentic_rollout.errors import ToolError
from agentic_rollout.retrieval.corpus import Passage
from agentic_rollout.retrieval.index import Hit
from agentic_rollout.search.backend import Outcome, SearchBackend, search_each, settle
from agentic_rollout.search.disk import DiskCache


class CacheSettings(Settings):
    """What is kept of the answers of a backend."""

    cache_size: int = Field(default=10_000, ge=0, description="answers kept in memory, by the last use")
    cache_dir: str | None = Field(
        default=None,
        description="folder on a local disk for answers that outlive the process, shared by the processes of a "
        "machine; remove it when the service's corpus changes",
    )
    cache_disk_size: int = Field(default=500_000, ge=1, description="answers kept on disk, the newest")


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A query that is being asked; it lands with its outcome, a failure included."""

    key: bytes
    query: str
    landing: asyncio.Future[Outcome]


class CachedBackend:
    """A backend whose answers are kept, by backend, query and number of hits.

    Identical queries in flight are asked once, and all who wait get the same answer or the same failure; that one of
    them is cancelled touches nobody else. Failures are not kept.

    Args:
        backend: what is asked. Its `identity`, or else its name, stands for all that its answers depend on.

    Attributes:
        lookups: number of queries by where their answer came from: `memory`, `disk`, `in_flight` or `backend`.
    """

    def __init__(self, backend: SearchBackend, settings: CacheSettings) -> None:
        self.backend = backend
        self.name = backend.name
        self.max_batch = backend.max_batch
        self.lookups: Counter[str] = Counter()
        self._identity: str = getattr(backend, "identity", backend.name)
        self._memory: LRUCache[bytes, list[Hit]] = LRUCache(settings.cache_size)
        self._in_flight: dict[bytes, _Flight] = {}
        self._tasks: dict[asyncio.Task[None], Sequence[_Flight]] = {}
        self._disk = None if settings.cache_dir is None else DiskCache(settings.cache_dir, settings.cache_disk_size)
        # Lookups that become ready together are one, so that disk does not scatter the queries of one batch.
        self._disk_lookup = None if self._disk is None else Batcher(self._disk.get)

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        keys = [self._key(query, topk) for query in queries]
        known: dict[bytes, Outcome] = {}
        flights: dict[bytes, _Flight] = {}
        fresh: list[_Flight] = []
        for key, query in zip(keys, queries, strict=True):
            if (hits := self._memory.get(key)) is not None:
                known[key] = hits
                self.lookups["memory"] += 1
            elif (flight := self._asked(key)) is not None:
                flights[key] = flight
                self.lookups["in_flight"] += 1
            else:
                flights[key] = self._in_flight[key] = _Flight(key, query, asyncio.get_running_loop().create_future())
                fresh.append(flights[key])
        if fresh:
            self._start(fresh, topk)
        if flights:
            await asyncio.wait([flight.landing for flight in flights.values()])  # cancelled alone, not with them
        known.update((key, flight.landing.result()) for key, flight in flights.items())
        return [list(hits) for hits in settle([known[key] for key in keys])]

    async def aclose(self) -> None:
        tasks = {task: flights for task, flights in self._tasks.items() if not task.done()}
        for task, flights in tasks.items():
            if not all(flight.landing.done() for flight in flights):  # else it is only writing to disk
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._disk_lookup is not None:
            await self._disk_lookup.aclose()
        if self._disk is not None:
            await self._disk.aclose()
        await self.backend.aclose()

    def _key(self, query: str, topk: int) -> bytes:
        text = "\0".join((self._identity, str(topk), query))
        return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=24).digest()

    def _asked(self, key: bytes) -> _Flight | None:
        """The answer that is on its way, unless it was to come in an event loop that has ended."""
        flight = self._in_flight.get(key)
        return flight if flight is not None and flight.landing.get_loop() is asyncio.get_running_loop() else None

    def _start(self, flights: Sequence[_Flight], topk: int) -> None:
        """Fetches in a task of its own, so that no caller's cancellation ends it."""

        def ended(task: asyncio.Task[None]) -> None:
            del self._tasks[task]
            error = None if task.cancelled() else task.exception()
            if not isinstance(error, Exception):
                error = ToolError(f"{self.name} was closed", "unavailable")
            for flight in flights:
                self._land(flight, error, "backend")

        task = asyncio.create_task(self._fetch(flights, topk))
        self._tasks[task] = flights
        task.add_done_callback(ended)

    async def _fetch(self, flights: Sequence[_Flight], topk: int) -> None:
        await self._land_from_disk(flights)
        flights = [flight for flight in flights if not flight.landing.done()]
        if not flights:
            return
        outcomes = await search_each(self.backend, [flight.query for flight in flights], topk)
        for flight, outcome in zip(flights, outcomes, strict=True):
            self._land(flight, outcome, "backend")
        if self._disk is not None:
            found = {
                flight.key: _dump_hits(outcome)
                for flight, outcome in zip(flights, outcomes, strict=True)
                if not isinstance(outcome, Exception)
            }
            await self._disk.put({key: answer for key, answer in found.items() if answer is not None})

    async def _land_from_disk(self, flights: Sequence[_Flight]) -> None:
        if self._disk_lookup is None:
            return
        answers = await asyncio.gather(*(self._disk_lookup.submit(flight.key) for flight in flights))
        for flight, answer in zip(flights, answers, strict=True):
            hits = None if answer is None else _load_hits(answer)
            if hits is not None:
                self._land(flight, hits, "disk")

    def _land(self, flight: _Flight, outcome: Outcome, origin: str) -> None:
        if flight.landing.done():
            return
        self.lookups[origin] += 1
        if self._in_flight.get(flight.key) is flight:
            del self._in_flight[flight.key]
        if self._memory.maxsize and not isinstance(outcome, Exception):
            self._memory[flight.key] = outcome
        flight.landing.set_result(outcome)


def _dump_hits(hits: Sequence[Hit]) -> bytes | None:
    rows = [(hit.passage.id, hit.passage.contents, hit.passage.url, hit.score) for hit in hits]
    try:
        return orjson.dumps(rows)
    except orjson.JSONEncodeError:
        return None  # text with a lone surrogate: not kept


def _load_hits(answer: bytes) -> list[Hit] | None:
    """The hits, or None if that is not what the bytes hold."""
    try:
        return [Hit(Passage(id_, contents, url), float(score)) for id_, contents, url, score in orjson.loads(answer)]
    except (ValueError, TypeError):
        return None
