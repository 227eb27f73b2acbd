from __future__ import annotations

import asyncio
import logging
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentic_rollout.errors import ToolError
from agentic_rollout.retrieval.index import Hit
from agentic_rollout.search.backend import PartialSearchError
from agentic_rollout.search.batched import BatchedBackend
from agentic_rollout.search.cache import CachedBackend, CacheSettings
from agentic_rollout.search.disk import DiskCache
from rollouts import run
from search.backends import Library, hits


class Unreliable(Library):
    """Fails until told otherwise."""

    broken = True

    def __init__(self, **options: Any) -> None:
        super().__init__(fault=lambda query: ToolError("busy", "http_5xx") if self.broken else None, **options)


def cached(library: Library, **settings: Any) -> CachedBackend:
    return CachedBackend(library, CacheSettings(**settings))


async def search_in_turn(backend: CachedBackend, *searches: tuple[Sequence[str], int]) -> list[list[list[Hit]]]:
    return [await backend.search(queries, topk) for queries, topk in searches]


# In memory


def test_answer_is_kept_by_query_and_number_of_hits() -> None:
    library = Library()
    backend = cached(library)
    found = run(search_in_turn(backend, (["a"], 1), (["a", "b"], 1), (["b", "a"], 1), (["a"], 2)))
    assert found == [[hits("a", 1)], [hits("a", 1), hits("b", 1)], [hits("b", 1), hits("a", 1)], [hits("a", 2)]]
    assert library.asked == [(["a"], 1), (["b"], 1), (["a"], 2)]
    assert backend.lookups == {"backend": 3, "memory": 3}


def test_least_recently_used_answer_goes_first() -> None:
    library = Library()
    run(search_in_turn(cached(library, cache_size=2), *((list(query), 1) for query in "abacab")))
    assert [queries for queries, _ in library.asked] == [["a"], ["b"], ["c"], ["b"]]


def test_size_zero_keeps_nothing() -> None:
    library = Library()
    assert run(search_in_turn(cached(library, cache_size=0), (["a"], 1), (["a"], 1))) == [[hits("a", 1)]] * 2
    assert len(library.asked) == 2


def test_callers_own_list_is_not_the_kept_one() -> None:
    async def main() -> list[list[Hit]]:
        backend = cached(Library())
        (await backend.search(["a"], 2))[0].clear()
        (await backend.search(["a"], 2))[0].clear()
        return await backend.search(["a"], 2)

    assert run(main()) == [hits("a", 2)]


# In flight


def test_identical_queries_in_flight_are_asked_once() -> None:
    library = Library(latency_s=5.0)
    backend = cached(library)

    async def main() -> list[list[list[Hit]]]:
        first = asyncio.create_task(backend.search(["a", "b", "a"], 1))
        await asyncio.sleep(1.0)
        return await asyncio.gather(first, *(backend.search(["b", "c"], 1) for _ in range(30)))

    first, *others = run(main())
    assert first == [hits("a", 1), hits("b", 1), hits("a", 1)]
    assert others == [[hits("b", 1), hits("c", 1)]] * 30
    assert library.asked == [(["a", "b"], 1), (["c"], 1)]
    assert backend.lookups == {"backend": 3, "in_flight": 1 + 30 + 29}


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_cancelled_caller_takes_no_other_with_it(victim: int) -> None:
    library = Library(latency_s=5.0)

    async def main() -> list[Any]:
        backend = cached(library)
        calls = [asyncio.create_task(backend.search(["a"], 1)) for _ in range(3)]
        await asyncio.sleep(1.0)
        calls[victim].cancel()
        return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = run(main())
    assert isinstance(outcomes.pop(victim), asyncio.CancelledError)
    assert outcomes == [[hits("a", 1)]] * 2
    assert len(library.asked) == 1


def test_answer_that_nobody_waits_for_any_more_is_kept_all_the_same() -> None:
    library = Library(latency_s=5.0)

    async def main() -> list[list[Hit]]:
        backend = cached(library)
        call = asyncio.create_task(backend.search(["a"], 1))
        await asyncio.sleep(1.0)
        call.cancel()
        await asyncio.sleep(5.0)
        return await backend.search(["a"], 1)

    assert run(main()) == [hits("a", 1)]
    assert len(library.asked) == 1


def test_failure_reaches_all_who_wait_and_is_not_kept() -> None:
    library = Unreliable(latency_s=1.0)

    async def main() -> list[list[Hit]]:
        backend = cached(library)
        errors = await asyncio.gather(*(backend.search(["a"], 1) for _ in range(3)), return_exceptions=True)
        assert [(type(error), getattr(error, "status", None)) for error in errors] == [(ToolError, "http_5xx")] * 3
        library.broken = False
        return await backend.search(["a"], 1)

    assert run(main()) == [hits("a", 1)]
    assert len(library.asked) == 2


def test_good_answers_among_failures_are_kept() -> None:
    library = Library(fault=lambda query: ToolError("busy", "http_5xx") if query == "x" else None)

    async def main() -> list[list[Hit]]:
        backend = cached(library)
        with pytest.raises(PartialSearchError) as caught:
            await backend.search(["a", "x"], 1)
        assert caught.value.outcomes[0] == hits("a", 1)
        return await backend.search(["a"], 1)

    assert run(main()) == [hits("a", 1)]
    assert len(library.asked) == 1


def test_failure_that_nobody_waits_for_is_not_complained_about(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        call = asyncio.create_task(cached(Unreliable(latency_s=1.0)).search(["a"], 1))
        await asyncio.sleep(0.5)
        call.cancel()
        await asyncio.sleep(1.0)

    run(main())
    assert caplog.text == ""


def test_close_ends_searches_in_flight_with_a_failure() -> None:
    library = Library(latency_s=5.0)

    async def main() -> Any:
        backend = cached(library)
        calls = [asyncio.create_task(backend.search([query], 1)) for query in "ab"]
        await asyncio.sleep(1.0)
        late = asyncio.create_task(backend.search(["c"], 1))
        await asyncio.sleep(0)
        await backend.aclose()
        return await asyncio.gather(*calls, late, return_exceptions=True)

    assert [error.status for error in run(main())] == ["unavailable"] * 3
    assert library.closed == 1


def test_cache_serves_one_event_loop_after_another() -> None:
    library = Library(latency_s=1.0)
    backend = cached(library)

    async def give_up() -> None:
        async with asyncio.timeout(0.5):
            await backend.search(["a"], 1)

    with pytest.raises(TimeoutError):
        run(give_up())
    assert run(backend.search(["a"], 1)) == [hits("a", 1)]


# On disk


def on_disk(folder: Path, library: Library, *searches: tuple[Sequence[str], int], **settings: Any) -> CachedBackend:
    """A process's life: searches, and an end."""

    async def main() -> CachedBackend:
        backend = cached(library, cache_dir=str(folder), **settings)
        for queries, topk in searches:
            assert await backend.search(queries, topk) == [hits(query, topk) for query in queries]
        await backend.aclose()
        return backend

    return asyncio.run(main())


def test_answers_on_disk_outlive_the_process(tmp_path: Path) -> None:
    library = Library()
    on_disk(tmp_path / "new" / "folder", library, (["a", "b"], 2))
    backend = on_disk(tmp_path / "new" / "folder", library, (["b", "c"], 2), (["b"], 2), (["a"], 1))
    assert library.asked == [(["a", "b"], 2), (["c"], 2), (["a"], 1)]
    assert backend.lookups == {"disk": 1, "backend": 2, "memory": 1}


def test_other_backends_answers_are_not_taken_for_ones_own(tmp_path: Path) -> None:
    library, other = Library(), Library()
    other.identity = "another corpus"  # type: ignore[attr-defined]
    on_disk(tmp_path, library, (["a"], 1))
    on_disk(tmp_path, other, (["a"], 1))
    assert len(other.asked) == 1


def test_failure_is_not_written(tmp_path: Path) -> None:
    async def main() -> None:
        backend = cached(Unreliable(), cache_dir=str(tmp_path))
        with pytest.raises(ToolError):
            await backend.search(["a"], 1)
        await backend.aclose()

    asyncio.run(main())
    library = Library()
    on_disk(tmp_path, library, (["a"], 1))
    assert len(library.asked) == 1


def test_searches_that_are_ready_together_stay_together_on_their_way_past_the_disk(tmp_path: Path) -> None:
    library = Library()

    async def main() -> None:
        backend = CachedBackend(BatchedBackend(library), CacheSettings(cache_dir=str(tmp_path)))
        await asyncio.gather(*(backend.search([str(number)], 1) for number in range(64)))
        await backend.aclose()

    asyncio.run(main())
    assert library.asked == [([str(number) for number in range(64)], 1)]


def test_disk_keeps_no_more_than_its_size_and_the_newest(tmp_path: Path) -> None:
    async def main() -> list[bytes | None]:
        disk = DiskCache(tmp_path, size=10)
        for number in range(100):
            await disk.put({b"%d" % number: b"x"})
        await disk.put({b"99": b"newer"})
        kept = await disk.get([b"%d" % number for number in range(100)])
        await disk.aclose()
        return kept

    kept = asyncio.run(main())
    assert kept == [None] * 91 + [b"x"] * 8 + [b"newer"]


def garbage(folder: Path) -> None:
    (folder / "answers.sqlite").write_bytes(b"this is no database" * 1000)


def torn(folder: Path) -> None:
    on_disk(folder, Library(), ([str(number) for number in range(200)], 3))
    path = folder / "answers.sqlite"
    path.write_bytes(path.read_bytes()[:5000] + b"\xff" * 20000)


def other_tables(folder: Path) -> None:
    with sqlite3.connect(folder / "answers.sqlite") as connection:
        connection.execute("CREATE TABLE answers (something TEXT)")
    connection.close()


def no_folder(folder: Path) -> None:
    folder.rmdir()
    folder.write_text("a file in its place")


@pytest.mark.parametrize("damage", [garbage, torn, other_tables, no_folder])
def test_damaged_disk_cache_is_bypassed_with_a_warning(
    damage: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    damage(folder)
    on_disk(folder, Library(), (["a"], 1), (["b", "c"], 1))
    (record,) = caplog.records
    assert (record.levelname, "is bypassed" in record.getMessage()) == ("WARNING", True)


def test_locked_disk_cache_is_bypassed_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    on_disk(tmp_path, Library(), (["a"], 1))
    locker = sqlite3.connect(tmp_path / "answers.sqlite")
    locker.execute("BEGIN EXCLUSIVE")
    on_disk(tmp_path, Library(), (["b"], 1))
    locker.close()
    assert "locked" in caplog.text


def test_answer_that_cannot_be_read_is_asked_for(tmp_path: Path) -> None:
    on_disk(tmp_path, Library(), (["a"], 1))
    with sqlite3.connect(tmp_path / "answers.sqlite") as connection:
        connection.execute("UPDATE answers SET answer = ?", (b'[["a"]]',))
    connection.close()
    library = Library()
    on_disk(tmp_path, library, (["a"], 1))
    assert len(library.asked) == 1


_WRITER = """
import asyncio, sys
from agentic_rollout.search.disk import DiskCache

async def main(folder, name):
    disk = DiskCache(folder, 10_000)
    for number in range(50):
        await disk.put({f"{name} {number}".encode(): b"x" * 100})
    await disk.aclose()

asyncio.run(main(sys.argv[1], sys.argv[2]))
"""


def test_processes_share_one_file(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path), str(number)], stderr=subprocess.PIPE)
        for number in range(3)
    ]
    for writer in writers:
        _, errors = writer.communicate(timeout=30)
        assert (writer.returncode, errors) == (0, b"")

    async def main() -> list[bytes | None]:
        disk = DiskCache(tmp_path, 10_000)
        kept = await disk.get([f"{name} {number}".encode() for name in range(3) for number in range(50)])
        await disk.aclose()
        return kept

    assert asyncio.run(main()) == [b"x" * 100] * 150


def test_cache_in_good_order_logs_nothing(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.DEBUG, logger="agentic_rollout"):
        on_disk(tmp_path, Library(), (["a"], 1))
    assert caplog.records == []
