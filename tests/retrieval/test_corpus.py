from __future__ import annotations

import gzip
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentic_rollout.errors import CorpusError
from agentic_rollout.retrieval.corpus import Corpus, Passage, open_corpus, scan_lines

GOOD = '{"id": "0", "contents": "\\"Paris\\"\\nA city."}'
ROWS = [
    {"id": "a", "title": "Paris", "text": "A city.", "url": "https://example.org/paris"},
    {"id": "b", "title": "Zomel", "text": "A river\nof many lines."},
]
PASSAGES = [
    Passage("a", '"Paris"\nA city.', "https://example.org/paris"),
    Passage("b", '"Zomel"\nA river\nof many lines.'),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "corpus.jsonl"


def test_passage_has_a_quoted_title_and_a_text(path: Path) -> None:
    path.write_text(GOOD + '\n{"id": 7, "contents": "Only a title", "more": 1}\n', encoding="utf-8")
    first, second = open_corpus(path)
    assert (first.id, first.title, first.text) == ("0", "Paris", "A city.")
    assert (second.id, second.title, second.text) == ("7", "Only a title", "")


def test_corpus_is_a_sequence(path: Path) -> None:
    path.write_text("\n".join(f'{{"id": {number}, "contents": "{number}"}}' for number in range(5)))  # no last newline
    corpus = open_corpus(path)
    assert len(corpus) == 5
    assert corpus[-1].id == "4"
    assert [passage.id for passage in corpus[1:4]] == ["1", "2", "3"]
    with pytest.raises(IndexError):
        corpus[5]


def test_offsets_are_all_that_memory_holds(path: Path) -> None:
    path.write_text(f"{GOOD}\n" * 3000)
    scan = scan_lines(path)
    assert scan.offsets.dtype == np.int64
    assert scan.offsets.tolist() == [(len(GOOD) + 1) * row for row in range(3000)]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=20))
def test_any_text_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]) -> None:
    import json

    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"id": name, "contents": text}) for name, text in rows))
    assert [(passage.id, passage.contents) for passage in open_corpus(path)] == rows


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_blank_lines_are_passed_over(path: Path, ending: str) -> None:
    path.write_bytes(ending.join(["", GOOD, "  ", GOOD, ""]).encode())
    assert list(open_corpus(path)) == [Passage("0", '"Paris"\nA city.')] * 2


def test_line_separators_of_unicode_are_text(path: Path) -> None:
    path.write_text('{"id": "0", "contents": "a\u2028b\u0085c"}\n', encoding="utf-8")
    assert open_corpus(path)[0].contents == "a\u2028b\u0085c"


BAD_LINES = [
    ("not JSON", "not JSON"),
    ('{"id": "1", "contents": "cut', "not JSON"),
    ('["1", "text"]', "expected {"),
    ('{"id": "1"}', "expected {"),
    ('{"contents": "text"}', "expected {"),
    ('{"id": "1", "contents": null}', "expected {"),
    ('{"id": "1", "contents": ["text"]}', "expected {"),
    ('{"id": "1", "title": "no text"}', "expected {"),
]


@pytest.mark.parametrize(("line", "problem"), BAD_LINES)
def test_bad_line_is_named_by_its_number(path: Path, line: str, problem: str) -> None:
    # A blank line counts, so that the number is the editor's.
    path.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n", encoding="utf-8")
    with pytest.raises(CorpusError) as caught:
        open_corpus(path)
    assert f"{path}, line 3: {problem}" in str(caught.value)
    assert line in str(caught.value)


def test_bad_lines_are_skipped_and_counted_on_request(path: Path) -> None:
    path.write_text("\n".join([line for line, _ in BAD_LINES] + [GOOD]), encoding="utf-8")
    scan = scan_lines(path, on_bad_line="skip")
    assert scan.skipped == len(BAD_LINES)
    assert "line 1: not JSON" in scan.first_skipped
    assert list(Corpus(path, scan.offsets)) == [Passage("0", '"Paris"\nA city.')]


def test_corpus_of_bad_lines_alone_is_refused(path: Path) -> None:
    path.write_text("bad\nworse\n")
    with pytest.raises(CorpusError, match=r"no passage.*All 2 lines were skipped; the first: .*line 1"):
        open_corpus(path, on_bad_line="skip")


def test_long_bad_line_is_quoted_in_part(path: Path) -> None:
    path.write_text("x" * 1000, encoding="utf-8")
    with pytest.raises(CorpusError, match="line 1") as caught:
        open_corpus(path)
    assert len(str(caught.value)) < 400


def test_line_that_is_no_utf8_is_named_by_its_number(path: Path) -> None:
    path.write_bytes(GOOD.encode() + b"\n\xff\xfe\n")
    with pytest.raises(CorpusError, match="line 2: not JSON"):
        open_corpus(path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_corpus_without_a_passage_is_refused(path: Path, content: str) -> None:
    path.write_text(content, encoding="utf-8")
    with pytest.raises(CorpusError, match="has no passage"):
        open_corpus(path)


def test_missing_file_is_named_with_a_remedy(path: Path) -> None:
    with pytest.raises(CorpusError, match="No such file or directory") as caught:
        open_corpus(path)
    assert str(path) in str(caught.value)
    assert "prefer an absolute one" in str(caught.value)


def test_row_that_has_changed_since_is_told(path: Path) -> None:
    path.write_text(f"{GOOD}\n")
    corpus = Corpus(path, np.array([3], dtype=np.int64))
    with pytest.raises(CorpusError, match="row 0 has changed"):
        corpus[0]


def test_threads_share_a_corpus(path: Path) -> None:
    path.write_text("\n".join(f'{{"id": {number}, "contents": "{number}"}}' for number in range(1000)))
    corpus = open_corpus(path)
    with ThreadPoolExecutor(8) as pool:
        assert [passage.id for passage in pool.map(corpus.__getitem__, range(1000))] == [str(n) for n in range(1000)]


# Other formats


def test_title_and_text_make_contents(path: Path) -> None:
    import orjson

    path.write_bytes(b"\n".join(orjson.dumps(row) for row in ROWS))
    assert list(open_corpus(path)) == PASSAGES


def test_compressed_lines(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl.gz"
    path.write_bytes(gzip.compress(f"{GOOD}\n{GOOD}\n".encode()))
    assert list(open_corpus(path)) == [Passage("0", '"Paris"\nA city.')] * 2
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(CorpusError, match="cannot be decompressed"):
        open_corpus(path)


@pytest.mark.parametrize("several", [False, True])
def test_parquet_files(tmp_path: Path, several: bool) -> None:
    path = tmp_path / ("" if several else "corpus.parquet")
    for number, row in enumerate(ROWS if several else [None]):
        rows = ROWS if row is None else [row]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{number}.parquet" if several else path)
    assert list(open_corpus(path)) == PASSAGES


@pytest.mark.parametrize("splits", [False, True])
def test_datasets_on_disk(tmp_path: Path, splits: bool) -> None:
    data = datasets.Dataset.from_list(ROWS)
    (datasets.DatasetDict({"train": data}) if splits else data).save_to_disk(str(tmp_path / "saved"))
    assert list(open_corpus(tmp_path / "saved")) == PASSAGES


def test_rows_without_an_id_are_numbered(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"text": "one"}, {"text": "two"}]), tmp_path / "c.parquet")
    assert [passage.id for passage in open_corpus(tmp_path / "c.parquet")] == ["0", "1"]


def test_columns_without_text_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"body": "one"}]), tmp_path / "c.parquet")
    with pytest.raises(CorpusError, match="has the columns body; expected contents"):
        open_corpus(tmp_path / "c.parquet")


def test_what_is_no_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="neither JSON lines nor Parquet"):
        open_corpus(tmp_path)
    (tmp_path / "c.parquet").write_bytes(b"no parquet")
    with pytest.raises(CorpusError, match="cannot be read as Parquet"):
        open_corpus(tmp_path / "c.parquet")
