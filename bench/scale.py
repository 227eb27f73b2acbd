"""What search costs as the corpus grows: building, embedded, over HTTP, and beside FastAPI over Lucene.

    python bench/scale.py [--lucene-python PATH] [--sizes 100000 300000 1000000]

`--lucene-python` is an interpreter with pyserini, fastapi and uvicorn (and JAVA_HOME set); without it, that side is
left out. Both servers answer the same distinct queries from the same client in alternating rounds; caches are off.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import synthetic
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from agentic_rollout.retrieval.open import open_index

BIN = Path(sys.executable).parent
TOPK = 3
WIKI_18 = 21_015_324
SHAPES = {"1 query a request, 16 clients": (1, 16), "64 queries a request, 4 clients": (64, 4)}
Json = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 300_000, 1_000_000])
    parser.add_argument("--lucene-python", type=Path)
    parser.add_argument("--queries", type=int, default=4000, help="distinct queries of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench/scale"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    report = options.out / "scale.json"
    measured: dict[str, Json] = json.loads(report.read_text()) if report.exists() else {}
    for size in options.sizes:
        measured[str(size)] = measure(size, options)
        report.write_text(json.dumps(measured, indent=2))
    console = Console(width=140)
    for table in tables(measured):
        console.print(table)
    plot(measured, options.out / "scale.png")


def measure(size: int, options: argparse.Namespace) -> Json:
    """Everything about one size."""
    corpus = make_corpus(size, options.out)
    queries = make_queries(corpus, options.queries)
    index = options.out / f"bm25-{size}"
    result: Json = {"build": build(corpus, index), "embedded": embedded(index, queries)}
    lucene = None if options.lucene_python is None else build_lucene(corpus, options.out, options.lucene_python)
    with contextlib.ExitStack() as stack:
        urls = {"ours": stack.enter_context(our_server(index))}
        if lucene is not None:
            urls["lucene"] = stack.enter_context(lucene_server(options.lucene_python, lucene))
        result["http"] = {shape: compare(urls, queries, *SHAPES[shape], rounds=options.rounds) for shape in SHAPES}
    return result


def make_corpus(size: int, out: Path) -> Path:
    path = out / f"corpus-{size}.jsonl"
    if not path.exists():
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            lines = synthetic.passages(size, synthetic.words())
            file.writelines(tqdm(lines, total=size, desc=path.name, mininterval=5))
        partial.rename(path)
    return path


def make_queries(corpus: Path, count: int) -> list[str]:
    with corpus.open("rb") as file:
        lines = [line for line, _ in zip(file, range(50_000), strict=False)]
    return synthetic.queries(count, lines)


def build(corpus: Path, out: Path) -> Json:
    """Builds with the command, and watches its memory: what its processes have in use, shared pages counted once."""
    shutil.rmtree(out, ignore_errors=True)
    start = time.perf_counter()
    command = [BIN / "agentic-rollout", "index", corpus, "--out", out]
    process = psutil.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = peak_private = 0
    while process.poll() is None:
        total, private = memory(process)
        peak, peak_private = max(peak, total), max(peak_private, private)
        time.sleep(0.25)
    if process.returncode:
        raise SystemExit(f"building {out} failed")
    return {
        "seconds": time.perf_counter() - start,
        "peak_gb": peak / 1e9,
        "peak_private_gb": peak_private / 1e9,
        "index_gb": sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 1e9,
        "corpus_gb": corpus.stat().st_size / 1e9,
    }


def memory(process: psutil.Process) -> tuple[int, int]:
    """(all pages, mapped files included; the processes' own) in bytes, over the whole tree."""
    total = private = 0
    for member in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            info = member.memory_full_info()
            total, private = total + info.pss, private + info.uss
    return total, private


def embedded(folder: Path, queries: Sequence[str]) -> Json:
    """The index in this process: one query at a time, then in batches on one thread and on two."""
    index = open_index(folder)
    for query in queries[:200]:
        index.search([query], TOPK)
    latencies = []
    for query in queries[200:2200]:
        start = time.perf_counter()
        index.search([query], TOPK)
        latencies.append(time.perf_counter() - start)
    rates = {}
    for threads in (1, 2):
        parts = [queries[number::threads] for number in range(threads)]
        workers = [threading.Thread(target=in_batches, args=(index, part)) for part in parts]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        rates[f"qps_{threads}_threads"] = len(queries) / (time.perf_counter() - start)
    return {**percentiles(latencies), **rates}


def in_batches(index: Any, queries: Sequence[str]) -> None:
    for start in range(0, len(queries), 64):
        index.search(queries[start : start + 64], TOPK)


def percentiles(latencies: Sequence[float]) -> Json:
    return {f"p{number}_ms": float(np.percentile(latencies, number)) * 1e3 for number in (50, 99)}


def build_lucene(corpus: Path, out: Path, python: Path) -> Path:
    """Lucene's index of the corpus, with pyserini's command."""
    index = out / f"lucene-{corpus.stem}"
    if not index.exists():
        source = out / f"lucene-input-{corpus.stem}"
        source.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (source / corpus.name).symlink_to(corpus.resolve())
        command = "-m pyserini.index.lucene --collection JsonCollection --generator DefaultLuceneDocumentGenerator"
        arguments = [*command.split(), "--threads", "2", "--storeRaw", "--input", source, "--index", index]
        start = time.perf_counter()
        with (out / "lucene-build.log").open("a") as log:
            subprocess.run([str(part) for part in [python, *arguments]], check=True, stdout=log, stderr=log)
            log.write(f"{corpus.stem}: {time.perf_counter() - start:.1f} s\n")
    return index


@contextlib.contextmanager
def our_server(index: Path) -> Iterator[str]:
    command = [BIN / "agentic-rollout", "serve-search", index, "--port", "0", "--cache-size", "0"]
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["listening"]
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def lucene_server(python: Path, index: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("lucene_server.py")
    process = subprocess.Popen([str(python), str(script), str(index), str(port)], env=os.environ)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(300):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/openapi.json").read()
                break
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def compare(urls: dict[str, str], queries: Sequence[str], batch: int, clients: int, *, rounds: int) -> Json:
    """Medians over rounds, the servers taking turns."""
    runs: dict[str, list[Json]] = {name: [] for name in urls}
    for number in range(rounds + 1):
        for name, url in urls.items():
            run = asyncio.run(load(url, queries, batch, clients))
            if number:  # the first round warms up: Java compiles, pages are read
                runs[name].append(run)
    return {
        name: {key: statistics.median(run[key] for run in of) for key in of[0]} | {"qps_runs": [r["qps"] for r in of]}
        for name, of in runs.items()
    }


async def load(url: str, queries: Sequence[str], batch: int, clients: int) -> Json:
    """So many clients, each with one request in flight, until every query is answered."""
    requests = iter([queries[start : start + batch] for start in range(0, len(queries), batch)])
    latencies = []

    async def client(session: aiohttp.ClientSession) -> None:
        for part in requests:
            start = time.perf_counter()
            body = {"queries": part, "topk": TOPK, "return_scores": True}
            async with session.post(f"{url}/retrieve", json=body) as reply:
                reply.raise_for_status()
                assert len((await reply.json())["result"]) == len(part)
            latencies.append(time.perf_counter() - start)

    async with aiohttp.ClientSession() as session:
        start = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(clients)))
        seconds = time.perf_counter() - start
    return {"qps": len(queries) / seconds, **percentiles(latencies)}


def tables(measured: dict[str, Json]) -> Iterator[Table]:
    building = Table(title="Building (2 cores)")
    for column in ("passages", "seconds", "peak GB", "of them private", "index GB", "embedded p50 / p99 ms"):
        building.add_column(column, justify="right")
    building.add_column("QPS, 1 / 2 threads", justify="right")
    for size, result in measured.items():
        made, inside = result["build"], result["embedded"]
        building.add_row(
            f"{int(size):,}", f"{made['seconds']:.0f}", f"{made['peak_gb']:.2f}", f"{made['peak_private_gb']:.2f}",
            f"{made['index_gb']:.2f}", f"{inside['p50_ms']:.2f} / {inside['p99_ms']:.2f}",
            f"{inside['qps_1_threads']:.0f} / {inside['qps_2_threads']:.0f}",
        )  # fmt: skip
    yield building
    serving = Table(title="HTTP: queries per second (p50 / p99 ms of a request)")
    for column in ("passages", "load", "ours", "FastAPI over Lucene", "ratio"):
        serving.add_column(column, justify="right")
    for size, result in measured.items():
        for shape, servers in result["http"].items():
            cells = [
                f"{of['qps']:.0f} ({of['p50_ms']:.1f} / {of['p99_ms']:.1f})" if of else "-"
                for of in (servers.get("ours"), servers.get("lucene"))
            ]
            ratio = f"{servers['ours']['qps'] / servers['lucene']['qps']:.1f}" if "lucene" in servers else "-"
            serving.add_row(f"{int(size):,}", shape, *cells, ratio)
    yield serving
    yield wiki_18(measured)


def wiki_18(measured: dict[str, Json]) -> Table:
    """Extrapolated in proportion to the passages of the largest corpus measured."""
    size = max(measured, key=int)
    made, inside = measured[size]["build"], measured[size]["embedded"]
    factor = WIKI_18 / int(size)
    table = Table(title=f"wiki-18, {WIKI_18:,} passages, computed from {int(size):,}")
    for column in ("build, 2 cores", "memory to build", "index", "a query on one core"):
        table.add_column(column, justify="right")
    hours = made["seconds"] * factor / 3600
    latency = 1e3 * factor / inside["qps_1_threads"]
    table.add_row(
        f"{hours:.1f} h", f"{made['peak_gb']:.1f} GB", f"{made['index_gb'] * factor:.1f} GB", f"{latency:.0f} ms"
    )
    return table


def plot(measured: dict[str, Json], path: Path) -> None:
    """Throughput, latency and building against the size of the corpus."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    sizes = sorted(int(size) for size in measured)
    of = [measured[str(size)] for size in sizes]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    styles = {"ours": ("agentic-rollout", "C0"), "lucene": ("FastAPI over Lucene", "C1")}
    for (shape, marker), line in zip(zip(SHAPES, "os", strict=True), ("-", "--"), strict=True):
        for name, (label, color) in styles.items():
            if all(name in result["http"][shape] for result in of):
                rates = [result["http"][shape][name]["qps"] for result in of]
                left.plot(sizes, rates, line, marker=marker, color=color, label=f"{label}, {shape}")
    shape = next(iter(SHAPES))
    for name, (label, color) in styles.items():
        if all(name in result["http"][shape] for result in of):
            for number, line in ((50, "-"), (99, ":")):
                values = [result["http"][shape][name][f"p{number}_ms"] for result in of]
                middle.plot(sizes, values, line, marker="o", color=color, label=f"{label}, p{number}")
    right.plot(sizes, [result["build"]["seconds"] for result in of], marker="o", color="C0", label="seconds to build")
    memory_axis = right.twinx()
    memory_axis.plot(sizes, [result["build"]["peak_gb"] for result in of], "--", marker="s", color="C2")
    memory_axis.set_ylabel("peak memory, GB (dashed)", color="C2")
    memory_axis.set_ylim(bottom=0)
    left.set(title="Queries per second", yscale="log")
    middle.set(title=f"Latency of a request, ms ({shape})", yscale="log")
    right.set(title="Building", ylabel="seconds")
    right.set_ylim(bottom=0)
    for axes in (left, middle, right):
        axes.set_xscale("log")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel("passages")
        axes.grid(alpha=0.3)
    for axes in (left, middle):
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.margins(y=0.25)
        axes.legend(fontsize=7, loc="upper right" if axes is left else "upper left")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
