"""Calls that become ready together are answered as one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from agentic_rollout.errors import ToolError

QueryT = TypeVar("QueryT")
ResultT = TypeVar("ResultT")


class Batcher(Generic[QueryT, ResultT]):
    """Answers calls that become ready together with one call of `answer_batch`.

    The first call opens a window; when it closes, everything waiting goes out as one batch. While as many batches as
    allowed are being answered, further calls collect into the next one.

    Args:
        answer_batch: queries -> one result each, in order; an exception in a result's place is raised in that
            query's caller alone. Awaited, so CPU work goes through `asyncio.to_thread`.
        max_batch: largest batch.
        window_s: how long the first call waits for others.
        max_in_flight: the most batches being answered at a time. More than one gains only where whoever answers is
            not kept busy by one: a server, not an index in this process.
    """

    def __init__(
        self,
        answer_batch: Callable[[list[QueryT]], Awaitable[Sequence[ResultT | Exception]]],
        *,
        max_batch: int = 512,
        window_s: float = 0.0,
        max_in_flight: int = 1,
    ) -> None:
        self._answer_batch = answer_batch
        self._max_batch = max_batch
        self._window_s = window_s
        self._max_in_flight = max_in_flight
        self._waiting: list[tuple[QueryT, asyncio.Future[ResultT]]] = []
        self._collector: asyncio.Task[None] | None = None  # the task that will take what is waiting
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, query: QueryT) -> ResultT:
        """Waits for the answer to one query; an exception of the whole batch reaches every caller in it."""
        future: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._waiting.append((query, future))
        self._collect(self._window_s)
        return await future

    async def aclose(self) -> None:
        """Cancels the batches being answered, and with them the calls that still wait."""
        tasks = [task for task in self._tasks if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            future.cancel()

    def _collect(self, window_s: float) -> None:
        """Sees to it that a task takes what is waiting, unless one will or no further batch is allowed."""
        self._tasks = {task for task in self._tasks if not task.done()}  # tasks of an event loop that ended are done
        collecting = self._collector is not None and not self._collector.done()
        if not collecting and len(self._tasks) < self._max_in_flight:
            self._collector = asyncio.create_task(self._drain(window_s))
            self._tasks.add(self._collector)

    async def _drain(self, window_s: float) -> None:
        await asyncio.sleep(window_s)
        self._collector = None
        while self._waiting:
            batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
            if self._waiting:
                self._collect(0.0)  # these have waited for their window already
            batch = [(query, future) for query, future in batch if not future.done()]  # callers that gave up
            if batch:
                await self._answer([query for query, _ in batch], [future for _, future in batch])

    async def _answer(self, queries: list[QueryT], futures: list[asyncio.Future[ResultT]]) -> None:
        try:
            results = await self._answer_batch(queries)
            if len(results) != len(queries):
                raise ToolError(f"{len(queries)} queries got {len(results)} results")
        except Exception as error:
            results = [error] * len(queries)
        except asyncio.CancelledError:
            for future in futures:
                future.cancel()
            raise
        for future, result in zip(futures, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
