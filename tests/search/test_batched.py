from __future__ import annotations

import asyncio

import pytest

from agentic_rollout.errors import ToolError
from agentic_rollout.search.backend import PartialSearchError
from agentic_rollout.search.batched import BatchedBackend
from rollouts import now_s, run
from search.backends import Library, hits


def busy(query: str) -> ToolError | None:
    return ToolError("busy", "http_5xx") if query == "x" else None


async def each(backend: BatchedBackend, *queries: str) -> list[object]:
    return await asyncio.gather(*(backend.search([query], 1) for query in queries), return_exceptions=True)


def test_searches_that_become_ready_together_are_one_request() -> None:
    library = Library()
    backend = BatchedBackend(library)

    async def main() -> list[object]:
        return await asyncio.gather(backend.search(["a", "b"], 2), backend.search(["c"], 2))

    assert run(main()) == [[hits("a", 2), hits("b", 2)], [hits("c", 2)]]
    assert library.asked == [(["a", "b", "c"], 2)]


def test_searches_for_different_numbers_of_hits_are_apart() -> None:
    library = Library()
    backend = BatchedBackend(library)

    async def main() -> list[object]:
        return await asyncio.gather(*(backend.search([query], topk) for query, topk in [("a", 1), ("b", 2), ("c", 1)]))

    assert run(main()) == [[hits("a", 1)], [hits("b", 2)], [hits("c", 1)]]
    assert library.asked == [(["a", "c"], 1), (["b"], 2)]


def test_request_is_as_large_as_the_backend_gains_from() -> None:
    library = Library(max_batch=2)
    assert run(each(BatchedBackend(library), "a", "b", "c")) == [[hits(query, 1)] for query in "abc"]
    assert [queries for queries, _ in library.asked] == [["a", "b"], ["c"]]


def test_query_that_fails_alone_fails_its_own_search_alone() -> None:
    a, x, b = run(each(BatchedBackend(Library(fault=busy)), "a", "x", "b"))
    assert [a, b] == [[hits("a", 1)], [hits("b", 1)]]
    assert (type(x), str(x)) == (ToolError, "busy")


def test_search_of_several_queries_tells_what_came_of_each() -> None:
    with pytest.raises(PartialSearchError) as caught:
        run(BatchedBackend(Library(fault=busy)).search(["a", "x"], 1))
    assert (caught.value.status, str(caught.value)) == ("http_5xx", "busy")
    assert caught.value.outcomes[0] == hits("a", 1)


def test_error_that_is_no_tool_error_reaches_the_caller_as_it_is() -> None:
    backend = BatchedBackend(Library(fault=lambda query: ZeroDivisionError("bug")))
    assert [type(error) for error in run(each(backend, "a", "b"))] == [ZeroDivisionError] * 2


def test_requests_go_side_by_side_where_the_backend_gains_from_it() -> None:
    async def main() -> float:
        await each(BatchedBackend(Library(latency_s=10.0, max_batch=2), max_in_flight=3), *"abcdefg")
        return now_s()

    assert run(main()) == pytest.approx(20.0)  # four requests, three at a time


def test_close_reaches_the_backend() -> None:
    library = Library()
    run(BatchedBackend(library).aclose())
    assert library.closed == 1
