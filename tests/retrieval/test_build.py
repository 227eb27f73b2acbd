from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import orjson
import pytest

from agentic_rollout.errors import CorpusError, SearchIndexError, SettingsError
from agentic_rollout.retrieval.build import IndexSettings, build_index
from agentic_rollout.retrieval.fusion import FusedIndex
from agentic_rollout.retrieval.index import CorpusIndex, Index
from agentic_rollout.retrieval.open import open_index

KINDS = ["bm25", "dense-flat", "dense-hnsw"]
# HNSW's graph depends on the order in which threads add to it; the other two repeat themselves exactly.
REPEATABLE = ["bm25", "dense-flat"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    lines = [
        orjson.dumps({"id": f"p{row}", "title": f"name{row}", "text": " ".join(f"w{word}" for word in words)})
        for row, words in enumerate(rng.integers(0, 200, (230, 20)))
    ]
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"\n".join(lines))
    return path


def results(index: Index, topk: int = 5) -> list[list[tuple[str, float]]]:
    queries = [f"w{number} w{number + 1} w{number + 2}" for number in range(0, 200, 7)]
    return [[(hit.passage.id, round(hit.score, 5)) for hit in hits] for hits in index.search(queries, topk)]


@pytest.mark.parametrize("kind", KINDS)
def test_index_is_built_and_found_again(corpus: Path, tmp_path: Path, kind: str) -> None:
    settings = IndexSettings(kind=kind, shard_size=100)  # type: ignore[arg-type]
    manifest = build_index(corpus, tmp_path / "index", settings, processes=2)
    index = open_index(tmp_path / "index")
    assert manifest["corpus"]["passages"] == len(index) == 230
    found = results(index)
    assert all(len(hits) == 5 for hits in found)
    (hits,) = index.search(["name117"], 230)
    assert hits[0].passage.title == "name117"


def test_shards_find_what_an_index_in_memory_finds(corpus: Path, tmp_path: Path) -> None:
    build_index(corpus, tmp_path / "index", IndexSettings(shard_size=50), processes=1)
    sharded, whole = results(open_index(tmp_path / "index")), results(open_index(corpus))
    for left, right in zip(sharded, whole, strict=True):
        assert [score for _, score in left] == pytest.approx([score for _, score in right], abs=2e-5)


def test_nothing_is_left_of_the_build(corpus: Path, tmp_path: Path) -> None:
    build_index(corpus, tmp_path / "index", IndexSettings(shard_size=100), processes=1)
    names = {
        path.relative_to(tmp_path / "index").as_posix() for path in (tmp_path / "index").rglob("*") if path.is_file()
    }
    arrays = {
        f"bm25/shard-0000{shard}/{name}.npy" for shard in range(3) for name in ("terms", "starts", "rows", "scores")
    }
    sizes = {f"bm25/shard-0000{shard}/size.json" for shard in range(3)}
    assert names == {"index.json", "offsets.npy"} | arrays | sizes
    assert not (tmp_path / "index.partial").exists()


def test_converted_corpus_is_part_of_the_index(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"title": "Zomel", "text": "A river."}]).save_to_disk(str(tmp_path / "saved"))
    build_index(tmp_path / "saved", tmp_path / "index", processes=1)
    (tmp_path / "index").rename(tmp_path / "moved")
    (hits,) = open_index(tmp_path / "moved").search(["river"], 1)
    assert hits[0].passage.contents == '"Zomel"\nA river.'


def test_skipped_lines_are_counted(corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpus.write_bytes(corpus.read_bytes() + b"\nbad\nworse\n")
    with pytest.raises(CorpusError, match="line 231: not JSON"):
        build_index(corpus, tmp_path / "index", processes=1)
    manifest = build_index(corpus, tmp_path / "lenient", IndexSettings(on_bad_line="skip"), processes=1)
    assert (manifest["corpus"]["passages"], manifest["corpus"]["skipped"]) == (230, 2)
    assert "2 lines were skipped; the first" in caplog.text


# Interruptions


@pytest.mark.parametrize("kind", REPEATABLE)
def test_killed_builds_never_load_and_go_on(corpus: Path, tmp_path: Path, kind: str) -> None:
    """A process that builds is killed again and again, at moments spread over its run; the build ends all the same."""
    settings = IndexSettings(kind=kind, shard_size=10)  # type: ignore[arg-type]
    build_index(corpus, tmp_path / "expected", settings, processes=1)
    code = (
        "import sys; from agentic_rollout.retrieval.build import *\n"
        "if __name__ == '__main__':\n"
        f"    build_index(sys.argv[1], sys.argv[2], IndexSettings(kind={kind!r}, shard_size=10), processes=1)\n"
    )
    script = tmp_path / "build.py"
    script.write_text(code)
    out = tmp_path / "index"
    kills = 0
    for attempt in range(40):
        process = subprocess.Popen(
            [sys.executable, str(script), str(corpus), str(out)], stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            # The first kills come as soon as something is there; each of the later ones lets the build get further.
            _wait_for_progress(process, out.with_name("index.partial"), wanted=3 * (attempt + 1))
            if process.poll() is None:
                kills += 1
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if out.exists():
            break
        with pytest.raises(SearchIndexError, match="not finished"):
            open_index(out)
        with pytest.raises(SearchIndexError, match="holds no finished index"):
            open_index(out.with_name("index.partial"))
        if kills == 3:
            build_index(corpus, out, settings, processes=1)
            break
    assert kills >= 2
    assert results(open_index(out)) == results(open_index(tmp_path / "expected"))


def _wait_for_progress(process: subprocess.Popen[bytes], partial: Path, *, wanted: int) -> None:
    """Until so many of the build's files are there, or the process has ended."""
    deadline = time.monotonic() + 40
    while process.poll() is None and time.monotonic() < deadline:
        if partial.exists() and sum(1 for _ in partial.rglob("*")) >= wanted:
            return
        time.sleep(0.005)


def test_interrupted_build_keeps_what_it_has(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentic_rollout.retrieval import build

    def fail(*arguments: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    settings = IndexSettings(shard_size=100)
    with monkeypatch.context() as patch:
        patch.setattr(build, "score", fail)
        with pytest.raises(KeyboardInterrupt):
            build_index(corpus, tmp_path / "index", settings, processes=1)
    with monkeypatch.context() as patch:
        patch.setattr(build, "_analyse", fail)  # would be called if a shard were analysed again
        build_index(corpus, tmp_path / "index", settings, processes=1)
    assert len(open_index(tmp_path / "index")) == 230


def test_other_settings_do_not_go_on(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "index.partial").mkdir()
    (tmp_path / "index.partial" / "plan.json").write_text("{}")
    with pytest.raises(SearchIndexError, match="unfinished build with other settings or of another corpus"):
        build_index(corpus, tmp_path / "index")


def test_second_build_at_the_same_time_is_refused(corpus: Path, tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "index.partial").mkdir()
    with (tmp_path / "index.partial" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SearchIndexError, match="is being built by another process"):
            build_index(corpus, tmp_path / "index")


def test_existing_index_is_not_overwritten(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    with pytest.raises(SearchIndexError, match="already exists"):
        build_index(corpus, tmp_path / "index")


# Wrong input


def test_missing_corpus_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"nowhere.jsonl cannot be read"):
        build_index(tmp_path / "nowhere.jsonl", tmp_path / "index")


def test_language_that_is_not_there_is_told_before_the_work(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="language: got 'klingon'"):
        build_index(corpus, tmp_path / "index", IndexSettings(language="klingon"), processes=1)


def test_corpus_without_words_is_refused(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"id": 1, "contents": "the"}\n')
    with pytest.raises(CorpusError, match="has a word to search for"):
        build_index(tmp_path / "corpus.jsonl", tmp_path / "index", processes=1)
    with pytest.raises(CorpusError, match="has a word to search for"):
        open_index(tmp_path / "corpus.jsonl")


def test_chinese_is_found(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(
        '{"id": "1", "contents": "长江\\n长江是亚洲最长的河流。"}\n'
        '{"id": "2", "contents": "黄河\\n黄河流经九个省区。"}\n'
    )
    build_index(tmp_path / "corpus.jsonl", tmp_path / "index", IndexSettings(language="cjk"), processes=1)
    index = open_index(tmp_path / "index")
    found = index.search(["亚洲最长的河流是哪条", "九个省", "黄"], 1)
    assert [hits[0].passage.id for hits in found] == ["1", "2", "2"]


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda folder, corpus: (folder / "index.json").write_text("{"), SearchIndexError, "no JSON"),
        (lambda folder, corpus: (folder / "index.json").write_text('{"format": 99}'), SearchIndexError, "format 99"),
        (lambda folder, corpus: corpus.write_bytes(corpus.read_bytes() + b"\n"), CorpusError, "has changed since"),
        (lambda folder, corpus: corpus.unlink(), CorpusError, "cannot be read"),
        (lambda folder, corpus: _remove(folder / "bm25" / "shard-00001"), SearchIndexError, "a part of it is lost"),
        (lambda folder, corpus: (folder / "bm25/shard-00001/rows.npy").unlink(), SearchIndexError, "damaged"),
    ],
)
def test_damage_is_named(corpus: Path, tmp_path: Path, damage, error, message) -> None:  # type: ignore[no-untyped-def]
    build_index(corpus, tmp_path / "index", IndexSettings(shard_size=100), processes=1)
    damage(tmp_path / "index", corpus)
    with pytest.raises(error, match=message):
        open_index(tmp_path / "index")


def _remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def test_index_reads_passages_from_the_corpus_itself(corpus: Path, tmp_path: Path) -> None:
    build_index(corpus, tmp_path / "index", processes=1)
    index = open_index(tmp_path / "index")
    assert isinstance(index, CorpusIndex)
    assert index.corpus.path == corpus  # type: ignore[attr-defined]


def test_faiss_file_that_exists_is_used_as_it_is(corpus: Path, tmp_path: Path) -> None:
    build_index(corpus, tmp_path / "made", IndexSettings(kind="dense-flat"))
    (file,) = (tmp_path / "made").rglob("*.faiss")
    settings = IndexSettings(kind="dense-flat", faiss=str(file))
    build_index(corpus, tmp_path / "index", settings)
    assert results(open_index(tmp_path / "index")) == results(open_index(tmp_path / "made"))
    corpus.write_bytes(corpus.read_bytes().rpartition(b"\n")[0])
    with pytest.raises(SearchIndexError, match="holds 230 vectors, the corpus 229 passages"):
        build_index(corpus, tmp_path / "shorter", settings)


def test_folder_of_indexes_is_a_hybrid(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "both").mkdir()
    parts = [tmp_path / "both" / name for name in ("bm25", "dense")]
    build_index(corpus, parts[0], processes=1)
    build_index(corpus, parts[1], IndexSettings(kind="dense-flat"))
    expected = FusedIndex([open_index(part) for part in parts])
    assert results(open_index(tmp_path / "both")) == results(expected)
    assert results(expected) != results(open_index(parts[0]))


@pytest.mark.parametrize("name", ["empty", "index.partial"])
def test_folder_without_an_index_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(SearchIndexError, match="holds no finished index"):
        open_index(tmp_path / name)


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"nowhere cannot be read"):
        open_index(tmp_path / "nowhere")
