from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from agentic_rollout.batching import Batcher
from agentic_rollout.errors import ToolError
from agentic_rollout.tools.base import BaseTool, ToolContext
from rollouts import now_s, roll_out, run, spoken


class Answers:
    """Keeps the batches that it answers, each after `latency_s`."""

    def __init__(self, latency_s: float = 0.0) -> None:
        self.latency_s = latency_s
        self.batches: list[list[int]] = []

    async def __call__(self, queries: list[int]) -> list[int]:
        self.batches.append(queries)
        await asyncio.sleep(self.latency_s)
        return [10 * query for query in queries]


async def submit_all(batcher: Batcher[int, int], queries: range) -> list[int]:
    return await asyncio.gather(*(batcher.submit(query) for query in queries))


def test_calls_that_become_ready_together_are_one_batch() -> None:
    answers = Answers()
    assert run(submit_all(Batcher(answers), range(64))) == list(range(0, 640, 10))
    assert answers.batches == [list(range(64))]


def test_batch_is_no_larger_than_allowed() -> None:
    answers = Answers()
    assert run(submit_all(Batcher(answers, max_batch=3), range(8))) == list(range(0, 80, 10))
    assert answers.batches == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_calls_during_a_batch_are_the_next_one() -> None:
    answers = Answers(latency_s=10.0)
    batcher = Batcher(answers)

    async def late(query: int, delay_s: float) -> int:
        await asyncio.sleep(delay_s)
        return await batcher.submit(query)

    async def all_of_them() -> float:
        await asyncio.gather(late(0, 0.0), late(1, 2.0), late(2, 7.0))
        return now_s()

    assert run(all_of_them()) == pytest.approx(20.0)
    assert answers.batches == [[0], [1, 2]]


def test_window_collects_calls_that_come_soon_after() -> None:
    answers = Answers()
    batcher = Batcher(answers, window_s=1.0)

    async def late(query: int, delay_s: float) -> int:
        await asyncio.sleep(delay_s)
        return await batcher.submit(query)

    async def all_of_them() -> None:
        await asyncio.gather(late(0, 0.0), late(1, 0.9), late(2, 1.5))

    run(all_of_them())
    assert answers.batches == [[0, 1], [2]]


def test_searches_of_rows_that_the_engine_serves_together_are_one_batch() -> None:
    batches: list[list[str]] = []

    class BatchedTool(BaseTool):
        def __init__(self) -> None:
            self.batcher = Batcher(self.answer)

        async def answer(self, queries: list[str]) -> list[str]:
            batches.append(queries)
            return queries

        async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
            return await self.batcher.submit(arguments["query"])

    rows = {row: [spoken(f"<search>{row}</search>")] for row in range(16)}
    roll_out(rows, tool=BatchedTool(), max_turns=2)
    assert batches == [[str(row) for row in range(16)]] * 2


def test_failure_of_a_batch_reaches_every_caller_in_it_and_no_later_one() -> None:
    async def answer(queries: list[int]) -> list[int]:
        if 0 in queries:
            raise ConnectionError("gone")
        return queries

    async def outcomes() -> list[object]:
        batcher = Batcher(answer)
        first = await asyncio.gather(*(batcher.submit(query) for query in range(3)), return_exceptions=True)
        return [*map(type, first), await batcher.submit(7)]

    assert run(outcomes()) == [ConnectionError] * 3 + [7]


@pytest.mark.parametrize("results", [[], [1], [1, 2, 3]])
def test_wrong_number_of_results_reaches_every_caller_as_a_failure(results: list[int]) -> None:
    async def answer(queries: list[int]) -> list[int]:
        return results

    async def outcomes() -> list[object]:
        batcher = Batcher(answer)
        return await asyncio.gather(batcher.submit(1), batcher.submit(2), return_exceptions=True)

    assert [str(error) for error in run(outcomes())] == [f"2 queries got {len(results)} results"] * 2


def test_callers_that_gave_up_before_the_batch_are_not_asked_for() -> None:
    answers = Answers(latency_s=10.0)
    batcher = Batcher(answers)

    async def impatient(query: int) -> None:
        async with asyncio.timeout(5.0):
            await batcher.submit(query)

    async def all_of_them() -> list[object]:
        first = asyncio.create_task(batcher.submit(0))
        await asyncio.sleep(1.0)
        gave_up, stayed = await asyncio.gather(impatient(1), batcher.submit(2), return_exceptions=True)
        return [await first, type(gave_up), stayed]

    assert run(all_of_them()) == [0, TimeoutError, 20]
    assert answers.batches == [[0], [2]]


def test_caller_that_gives_up_during_its_batch_harms_no_other() -> None:
    batcher = Batcher(Answers(latency_s=10.0))

    async def impatient() -> None:
        async with asyncio.timeout(5.0):
            await batcher.submit(1)

    async def all_of_them() -> list[object]:
        gave_up, stayed = await asyncio.gather(impatient(), batcher.submit(2), return_exceptions=True)
        return [type(gave_up), stayed, await batcher.submit(3)]

    assert run(all_of_them()) == [TimeoutError, 20, 30]


def test_batcher_serves_one_event_loop_after_another() -> None:
    """A worker may run each of its rollouts in a loop of its own."""
    answers = Answers()
    batcher = Batcher(answers)
    assert [run(submit_all(batcher, range(2))) for _ in range(2)] == [[0, 10]] * 2
    assert answers.batches == [[0, 1]] * 2


def test_exception_in_a_results_place_reaches_its_caller_alone() -> None:
    async def answer(queries: list[int]) -> list[int | Exception]:
        return [ToolError("odd") if query % 2 else query for query in queries]

    async def outcomes() -> list[object]:
        batcher = Batcher(answer)
        return await asyncio.gather(*(batcher.submit(query) for query in range(4)), return_exceptions=True)

    zero, one, two, three = run(outcomes())
    assert (zero, two) == (0, 2)
    assert [type(one), type(three)] == [ToolError, ToolError]


def test_several_batches_are_in_flight_where_that_is_allowed() -> None:
    answers = Answers(latency_s=10.0)

    async def took_s() -> float:
        await submit_all(Batcher(answers, max_batch=2, max_in_flight=3), range(12))
        return now_s()

    assert run(took_s()) == pytest.approx(20.0)
    assert answers.batches == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


def test_call_during_a_batch_need_not_wait_for_it_where_another_is_allowed() -> None:
    answers = Answers(latency_s=10.0)
    batcher = Batcher(answers, max_in_flight=2)

    async def late(query: int, delay_s: float) -> float:
        await asyncio.sleep(delay_s)
        await batcher.submit(query)
        return now_s()

    async def all_of_them() -> list[float]:
        return await asyncio.gather(late(0, 0.0), late(1, 2.0), late(2, 5.0), late(3, 6.0))

    assert run(all_of_them()) == pytest.approx([10.0, 12.0, 20.0, 20.0])
    assert answers.batches == [[0], [1], [2, 3]]


def test_closing_ends_the_calls_that_wait() -> None:
    batcher = Batcher(Answers(latency_s=10.0), max_batch=1)

    async def main() -> list[type]:
        calls = [asyncio.create_task(batcher.submit(query)) for query in range(3)]
        await asyncio.sleep(1.0)
        await batcher.aclose()
        assert now_s() == pytest.approx(1.0)
        return [type(error) for error in await asyncio.gather(*calls, return_exceptions=True)]

    assert run(main()) == [asyncio.CancelledError] * 3
