"""Needs pyserini and a JDK; without them only the messages that say so are tested."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agentic_rollout.errors import SearchIndexError
from agentic_rollout.retrieval.lucene import LuceneIndex

ROWS = [
    {"id": "a", "contents": '"Zomel river"\nThe river of Zomel is Bafan.', "url": "https://example.org/zomel"},
    {"id": "b", "contents": '"Zomel metal"\nThe metal of Zomel is Kigir.'},
    {"id": "c", "contents": '"Havel river"\nThe river of Havel is Rudun. It is a long river.'},
    {"id": "d", "contents": '"Gardens"\nWords about gardens.'},
]


def write_index(folder: Path, rows: list[dict[str, str]], *options: str) -> Path:
    """What Search-R1's instructions for building an index do."""
    (folder / "corpus").mkdir()
    (folder / "corpus" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    command = f"-m pyserini.index.lucene --collection JsonCollection --input {folder / 'corpus'} --threads 1"
    command += f" --generator DefaultLuceneDocumentGenerator --index {folder / 'index'} " + " ".join(options)
    subprocess.run([sys.executable, *command.split()], check=True, capture_output=True, timeout=60)
    return folder / "index"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pyserini")
    return write_index(tmp_path_factory.mktemp("lucene"), ROWS, "--storePositions --storeDocvectors --storeRaw")


@pytest.fixture(scope="module")
def index(folder: Path) -> LuceneIndex:
    return LuceneIndex(folder)


def found(index: LuceneIndex, query: str, topk: int = 3) -> list[str]:
    (hits,) = index.search([query], topk)
    return [hit.passage.id for hit in hits]


def test_best_passage_comes_first_with_all_that_was_stored(index: LuceneIndex) -> None:
    assert len(index) == 4
    ((best, *_),) = index.search(["What is the river of Zomel?"], 3)
    assert (best.passage.id, best.passage.contents, best.passage.url) == tuple(ROWS[0].values())
    assert best.score > 0


def test_hits_belong_to_their_queries(index: LuceneIndex) -> None:
    queries = ["metal", "", "gardens", "quixotic", "rivers", "  ", "?!"]
    together = index.search(queries, 3)
    assert [[hit.passage.id for hit in hits] for hits in together] == [["b"], [], ["d"], [], ["c", "a"], [], []]
    assert together == [index.search([query], 3)[0] for query in queries]


def test_topk_bounds_the_hits(index: LuceneIndex) -> None:
    assert [len(found(index, "river", topk)) for topk in (0, 1, 2, 100)] == [0, 1, 2, 2]
    assert index.search([], 3) == []


@pytest.mark.parametrize(
    "query",
    ["gardens \ud800", "gardens \x00", "gardens AND (", 'NOT gardens:"', " ".join(map(str, range(5000))) + " gardens"],
)
def test_query_is_words_whatever_it_looks_like(index: LuceneIndex, query: str) -> None:
    assert found(index, query) == ["d"]


def test_settings_reach_the_scores(index: LuceneIndex, folder: Path) -> None:
    def score(index: LuceneIndex) -> float:
        return index.search(["river"], 1)[0][0].score

    assert score(LuceneIndex(folder, k1=2.0, b=0.9)) != score(LuceneIndex(folder)) == score(index)


def test_threads_search_at_once(index: LuceneIndex) -> None:
    expected = {"metal": ["b"], "gardens": ["d"], "river": ["c", "a"], "zomel": ["a", "b"]}
    answers: list[tuple[str, list[str]]] = []

    def search(query: str) -> None:
        answers.extend((query, found(index, query)) for _ in range(25))

    threads = [threading.Thread(target=search, args=(query,)) for query in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 100
    assert all(expected[query] == ids for query, ids in answers)


def test_index_without_its_documents_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyserini")
    with pytest.raises(SearchIndexError, match="--storeRaw"):
        LuceneIndex(write_index(tmp_path, ROWS))


def test_damaged_index_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyserini")
    (tmp_path / "segments_1").write_bytes(b"nothing of Lucene's")
    with pytest.raises(SearchIndexError, match="cannot be opened"):
        LuceneIndex(tmp_path)


@pytest.mark.parametrize("name", ["nothing", "."])
def test_folder_that_is_no_index_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SearchIndexError, match="no Lucene index"):
        LuceneIndex(tmp_path / name)


@pytest.mark.skipif(importlib.util.find_spec("pyserini") is not None, reason="pyserini is installed")
def test_missing_pyserini_is_named_with_its_install_command(tmp_path: Path) -> None:
    (tmp_path / "segments_1").touch()
    with pytest.raises(SearchIndexError, match=r"pip install pyserini.*JDK"):
        LuceneIndex(tmp_path)
