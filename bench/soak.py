"""Many clients, one server, a minute: errors, memory, and what becomes of requests in flight when it is stopped.

python bench/soak.py [--clients 64] [--seconds 60]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import scale
from rich.console import Console
from rich.table import Table

from agentic_rollout.retrieval.open import open_index

PASSAGES = 100_000
WARM_UP_S = 10.0
Expected = dict[str, list[str]]
"""Queries, and the passages that the index itself finds for them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench/scale"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    corpus = scale.make_corpus(PASSAGES, options.out)
    index = options.out / f"bm25-{PASSAGES}"
    if not index.exists():
        scale.build(corpus, index)
    queries = scale.make_queries(corpus, 20_000)
    found = open_index(index).search(queries, scale.TOPK)
    expected = {query: [hit.passage.id for hit in hits] for query, hits in zip(queries, found, strict=True)}
    command = [scale.BIN / "agentic-rollout", "serve-search", index, "--port", "0"]  # with its cache, as in use
    server = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = json.loads(server.stdout.readline())["listening"]
    report = asyncio.run(soak(url, server, expected, clients=options.clients, seconds=options.seconds))
    report["exit status"] = server.wait(timeout=60)
    (options.out / "soak.json").write_text(json.dumps(report, indent=2))
    table = Table("", "", title=f"{options.clients} clients, {options.seconds:.0f} s")
    for name, value in report.items():
        table.add_row(name, f"{value:,.1f}" if isinstance(value, float) else str(value))
    Console().print(table)


async def soak(
    url: str, server: subprocess.Popen[str], expected: Expected, *, clients: int, seconds: float
) -> dict[str, Any]:
    """Asks until the time is over, then stops the server while every client has a request in flight."""
    outcomes: Counter[str] = Counter()
    last: Counter[str] = Counter()  # of the requests in flight at the stop
    memory: list[tuple[float, float]] = []
    stopped = asyncio.Event()
    started = time.perf_counter()
    queries = list(expected)

    async def client(number: int, session: aiohttp.ClientSession) -> None:
        rng = random.Random(number)
        while not stopped.is_set():
            count = rng.choice([1, 1, 1, 4, 64])
            outcome = await ask(session, url, {query: expected[query] for query in rng.sample(queries, count)})
            (last if stopped.is_set() else outcomes)[outcome] += 1

    async def watch() -> None:
        process = psutil.Process(server.pid)
        while not stopped.is_set():
            memory.append((time.perf_counter() - started, process.memory_info().rss / 1e6))
            await asyncio.sleep(0.5)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        group.create_task(watch())
        for number in range(clients):
            group.create_task(client(number, session))
        await asyncio.sleep(seconds)
        server.terminate()
        stopped.set()
    warm = [used for at, used in memory if at > WARM_UP_S]
    half = len(warm) // 2
    return {
        "requests": sum(outcomes.values()),
        "outcomes": dict(outcomes),
        "in flight at the stop": dict(last),
        "memory after 10 s, MB": warm[0],
        "memory at the end, MB": warm[-1],
        "mean of the first half, MB": sum(warm[:half]) / half,
        "mean of the second half, MB": sum(warm[half:]) / (len(warm) - half),
    }


async def ask(session: aiohttp.ClientSession, url: str, expected: Expected) -> str:
    """How one request ended."""
    try:
        async with session.post(f"{url}/retrieve", json={"queries": list(expected), "topk": scale.TOPK}) as reply:
            body = await reply.json()
            if reply.status != 200:
                return f"HTTP {reply.status}"
            found = [[document["id"] for document in documents] for documents in body["result"]]
            return "ok" if found == list(expected.values()) else "wrong reply"
    except aiohttp.ClientError as error:
        return type(error).__name__


if __name__ == "__main__":
    main()
