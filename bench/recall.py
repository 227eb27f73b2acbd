"""Is the right passage found? Recall on XQuAD for each kind of index, and agreement with Lucene.

    python bench/recall.py --data ../shared/data/xquad [--lucene-python PATH]

`--lucene-python` is an interpreter with pyserini, fastapi and uvicorn (and JAVA_HOME set).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from scale import build_lucene, lucene_server

from agentic_rollout.retrieval.build import IndexSettings, build_index
from agentic_rollout.retrieval.fusion import FusedIndex
from agentic_rollout.retrieval.index import Index
from agentic_rollout.retrieval.open import open_index
from agentic_rollout.retrieval.rerank import RerankedIndex, build_reranker
from agentic_rollout.search.http import HttpSettings
from agentic_rollout.search.remote import RemoteBackend

DEPTHS = (1, 3, 10)
Found = list[list[str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/xquad"))
    parser.add_argument("--lucene-python", type=Path)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench/recall.json"))
    options = parser.parse_args()
    corpus = options.data / "corpus.jsonl"
    rows = [json.loads(line) for line in (options.data / "questions.jsonl").read_text().splitlines()]
    questions, right = [row["question"] for row in rows], [row["passage_id"] for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        results = {name: ids(index, questions) for name, index in indexes(corpus, Path(folder)).items()}
        if options.lucene_python is not None:
            index = build_lucene(corpus, Path(folder), options.lucene_python)
            with lucene_server(options.lucene_python, index) as url:
                results["Lucene"] = asyncio.run(ask(url, questions))
    report = {name: measure(found, right, results.get("Lucene")) for name, found in results.items()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2))
    Console().print(table(report, len(questions)))


def indexes(corpus: Path, folder: Path) -> dict[str, Index]:
    built: dict[str, Index] = {}
    for kind in ("bm25", "dense-flat", "dense-hnsw"):
        settings = IndexSettings(kind=kind, shard_size=100)  # several shards, as a large corpus has
        build_index(corpus, folder / kind, settings)
        built[kind] = open_index(folder / kind)
    built["hybrid (bm25 + dense-flat)"] = FusedIndex([built["bm25"], built["dense-flat"]])
    built["hybrid, weights 2:1"] = FusedIndex([built["bm25"], built["dense-flat"]], weights=[2.0, 1.0])
    built["bm25, reranked (lexical)"] = RerankedIndex(built["bm25"], build_reranker("lexical"))
    return built


def ids(index: Index, questions: Sequence[str]) -> Found:
    return [[hit.passage.id for hit in hits] for hits in index.search(questions, max(DEPTHS))]


async def ask(url: str, questions: Sequence[str]) -> Found:
    backend = RemoteBackend(url, HttpSettings())
    try:
        return [[hit.passage.id for hit in hits] for hits in await backend.search(questions, max(DEPTHS))]
    finally:
        await backend.aclose()


def measure(found: Found, right: Sequence[str], lucene: Found | None) -> dict[str, float]:
    recalls = {
        f"recall@{depth}": sum(wanted in hits[:depth] for hits, wanted in zip(found, right, strict=True)) / len(right)
        for depth in DEPTHS
    }
    if lucene is None:
        return recalls
    shared = [len(set(ours[:3]) & set(theirs[:3])) / 3 for ours, theirs in zip(found, lucene, strict=True)]
    return recalls | {"overlap@3 with Lucene": sum(shared) / len(shared)}


def table(report: dict[str, dict[str, float]], questions: int) -> Table:
    made = Table("", *next(iter(report.values())), title=f"XQuAD (English): {questions:,} questions, 240 passages")
    for name, figures in report.items():
        made.add_row(name, *(f"{value:.4f}" for value in figures.values()))
    return made


if __name__ == "__main__":
    main()
