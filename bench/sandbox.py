"""What running a program costs: start, throughput, much output, and whether anything is left after thousands.

    python bench/sandbox.py [--programs 10000]

Start is the median of `print(1)`, asked one after the other, beside `python -I -c` in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from agentic_rollout.errors import SettingsError
from agentic_rollout.sandbox.execution import Program
from agentic_rollout.sandbox.sandbox import Sandbox
from agentic_rollout.sandbox.settings import SandboxSettings

PRINT = Program("print(1)")
CONCURRENCY = (1, 8, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=10_000, help="for the search for leaks")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench/sandbox.json"))
    options = parser.parse_args()
    report: dict[str, Any] = {"python -I -c, p50 ms": asyncio.run(plain_start())}
    modes: tuple[Literal["landlock", "bubblewrap"], ...] = ("landlock", "bubblewrap")
    for mode in modes:
        try:
            report[mode] = asyncio.run(measure(SandboxSettings(sandbox=mode, max_concurrency=64)))
        except SettingsError as error:
            report[mode] = {"not here": str(error)}
    report["leaks"] = asyncio.run(leaks(options.programs))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2))
    table = Table("", "", title="The sandbox on this machine")
    for name, value in report.items():
        rows = value.items() if isinstance(value, dict) else [("", value)]
        for label, figure in rows:
            table.add_row(f"{name} {label}", f"{figure:,.1f}" if isinstance(figure, float) else str(figure))
    Console(width=140).print(table)


async def plain_start(repeats: int = 40) -> float:
    """A fresh interpreter, which contains nothing."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-c", PRINT.code, stdout=asyncio.subprocess.PIPE
        )
        await process.communicate()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


async def measure(settings: SandboxSettings) -> dict[str, float]:
    """Start, a turn of a session, throughput, and a megabyte of output."""
    async with Sandbox(settings) as sandbox:
        for _ in range(20):
            await sandbox.run(PRINT)
        starts = [await timed(sandbox.run(PRINT)) for _ in range(200)]
        session = await sandbox.session("bench")
        await session.run(PRINT)
        turns = [await timed(session.run(PRINT)) for _ in range(200)]
        figures = {
            "p50 ms": 1e3 * statistics.median(starts),
            "p99 ms": 1e3 * statistics.quantiles(starts, n=100)[-1],
            "turn of a session, p50 ms": 1e3 * statistics.median(turns),
        }
        for concurrency in CONCURRENCY:
            figures[f"programs/s, {concurrency} at a time"] = await throughput(sandbox, concurrency)
        result = await sandbox.run(Program("print('x' * 1_000_000)"))
        assert (result.status, result.return_code) == ("finished", 0), result
        figures["1 MB of output, ms"] = 1e3 * result.execution_time_s
        return figures


async def timed(work: Any) -> float:
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


async def throughput(sandbox: Sandbox, concurrency: int, programs: int = 400) -> float:
    left = iter(range(programs))

    async def client() -> None:
        for _ in left:
            result = await sandbox.run(PRINT)
            assert result.stdout.text("end") == "1\n", result

    seconds = await timed(asyncio.gather(*(client() for _ in range(concurrency))))
    return programs / seconds


async def leaks(programs: int) -> dict[str, str]:
    """What there is before and after so many programs: the second figure must not have grown with them."""
    process = psutil.Process()
    async with Sandbox(SandboxSettings(max_concurrency=8)) as sandbox:
        for _ in range(50):
            await sandbox.run(PRINT)
        gc.collect()
        before = count(process, sandbox)
        left = iter(tqdm(range(programs), mininterval=10))

        async def client() -> None:
            for _ in left:
                await sandbox.run(PRINT)

        await asyncio.gather(*(client() for _ in range(8)))
        gc.collect()
        after = count(process, sandbox)
    return {name: f"{before[name]:,} -> {after[name]:,}" for name in before} | {"programs": f"{programs:,}"}


def count(process: psutil.Process, sandbox: Sandbox) -> dict[str, int]:
    zygote = psutil.Process(sandbox.zygote_pid)
    return {
        "processes": len(process.children(recursive=True)),
        "descriptors": process.num_fds(),
        "descriptors of the zygote": zygote.num_fds(),
        "memory, KB": process.memory_info().rss // 1024,
        "memory of the zygote, KB": zygote.memory_info().rss // 1024,
        "scratch files": sum(len(files) + len(folders) for _, folders, files in os.walk(sandbox._root.path)),
    }


if __name__ == "__main__":
    main()
