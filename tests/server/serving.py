"""A real server on a real socket, in a thread of its own, for clients that block."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import requests
from aiohttp import web

from agentic_rollout.retrieval.corpus import Passage
from agentic_rollout.retrieval.index import Hit
from agentic_rollout.search.backend import LocalBackend, SearchBackend
from agentic_rollout.server.app import create_app
from agentic_rollout.server.settings import ServerSettings

COMMAND = (sys.executable, "-m", "agentic_rollout.cli")
PLACES = ["Zomel", "Havel", "Rudun", "Tarn", "Isk"]
PASSAGES = [
    Passage(str(number), f'"{place} river"\nThe river of {place} is R{number}.', f"https://rivers.test/{place}")
    for number, place in enumerate(PLACES)
]


class WordIndex:
    """Scores a passage by the number of the query's words in it."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = passages

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        return [self._search(set(query.lower().split()), topk) for query in queries]

    def _search(self, words: set[str], topk: int) -> list[Hit]:
        hits = [Hit(passage, float(len(words & _words(passage)))) for passage in self._passages]
        return sorted((hit for hit in hits if hit.score), key=lambda hit: -hit.score)[:topk]


def _words(passage: Passage) -> set[str]:
    return set(passage.contents.lower().replace('"', " ").split())


def rivers() -> LocalBackend:
    return LocalBackend(WordIndex(PASSAGES))


class ScriptedBackend:
    """Answers every query with a passage that repeats it, after `gate` opens; remembers what it was asked."""

    name = "scripted"

    def __init__(
        self,
        reply: Callable[[str], list[Hit]] | None = None,
        *,
        max_batch: int = 512,
        delay_s: float = 0.0,
    ) -> None:
        self.max_batch = max_batch
        self.asked: list[tuple[list[str], int]] = []
        self.closed = False
        self._reply = reply or (lambda query: [Hit(Passage(query, f'"{query}"\nabout {query}'), 1.0)])
        self._delay_s = delay_s

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        self.asked.append((list(queries), topk))
        await asyncio.sleep(self._delay_s)
        return [self._reply(query) for query in queries]

    async def aclose(self) -> None:
        self.closed = True


@contextmanager
def running(make_app: Callable[[], web.Application]) -> Iterator[str]:
    """Serves an application on a free port; gives its address."""
    started = threading.Event()
    address: list[str] = []
    failures: list[BaseException] = []
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def main() -> None:
        runner = web.AppRunner(make_app(), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
            stop = asyncio.Event()
            loops.append((asyncio.get_running_loop(), stop))
            started.set()
            await stop.wait()
        finally:
            await runner.cleanup()

    def target() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=target)
    thread.start()
    started.wait()
    try:
        if failures:
            raise failures[0]
        yield address[0]
    finally:
        for loop, stop in loops:
            loop.call_soon_threadsafe(stop.set)
        thread.join()


@contextmanager
def search_server(
    backend: SearchBackend | None = None, settings: ServerSettings | None = None, **parts: Any
) -> Iterator[str]:
    """Serves `backend`, by default five passages about rivers."""
    with running(lambda: create_app(backend or rivers(), settings or ServerSettings(), **parts)) as url:
        yield url


@contextmanager
def server_command(*arguments: object, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """One of the command's servers, in a process of its own; gives it and its address."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            yield process, json.loads(line)["listening"]
        finally:
            process.kill()


def post(url: str, body: Any, **options: Any) -> requests.Response:
    with requests.Session() as session:
        if isinstance(body, bytes):
            return session.post(url, data=body, timeout=30, **options)
        return session.post(url, json=body, timeout=30, **options)


def get(url: str, **options: Any) -> requests.Response:
    with requests.Session() as session:
        return session.get(url, timeout=30, **options)
