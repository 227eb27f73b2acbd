"""Calls that become ready together are answered as one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from agentic_rollout.errors import ToolError

QueryT = TypeVar("QueryT")
ResultT = TypeVar("ResultT")


class Batcher(Generic[QueryT, ResultT]):
    """Answers calls that become ready together with one call of `answer_batch`.

    The first call opens a window; when it closes, everything waiting goes out as one batch. While that batch is being
    answered, further calls collect into the next one.

    Args:
        answer_batch: queries -> one result each, in order. Awaited, so CPU work goes through `asyncio.to_thread`.
        max_batch: largest batch.
        window_s: how long the first call waits for others.
    """

    def __init__(
        self,
        answer_batch: Callable[[list[QueryT]], Awaitable[list[ResultT]]],
        *,
        max_batch: int = 512,
        window_s: float = 0.0,
    ) -> None:
        self._answer_batch = answer_batch
        self._max_batch = max_batch
        self._window_s = window_s
        self._waiting: list[tuple[QueryT, asyncio.Future[ResultT]]] = []
        self._task: asyncio.Task[None] | None = None

    async def submit(self, query: QueryT) -> ResultT:
        """Waits for the answer to one query; an exception of the batch reaches every caller in it."""
        future: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._waiting.append((query, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._drain())
        return await future

    async def _drain(self) -> None:
        await asyncio.sleep(self._window_s)
        while self._waiting:
            batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
            batch = [(query, future) for query, future in batch if not future.done()]  # callers that gave up
            await self._answer([query for query, _ in batch], [future for _, future in batch])

    async def _answer(self, queries: list[QueryT], futures: list[asyncio.Future[ResultT]]) -> None:
        if not queries:
            return
        try:
            results = await self._answer_batch(queries)
            if len(results) != len(queries):
                raise ToolError(f"{len(queries)} queries got {len(results)} results")
        except Exception as error:
            for future in futures:
                if not future.done():
                    future.set_exception(error)
            return
        for future, result in zip(futures, results, strict=True):
            if not future.done():
                future.set_result(result)
