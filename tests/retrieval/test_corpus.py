from __future__ import annotations

from pathlib import Path

import pytest

from agentic_rollout.errors import CorpusError
from agentic_rollout.retrieval.corpus import Passage, load_corpus

GOOD = '{"id": "0", "contents": "\\"Paris\\"\\nA city."}'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "corpus.jsonl"


def test_passage_has_a_quoted_title_and_a_text(path: Path) -> None:
    path.write_text(GOOD + '\n{"id": 7, "contents": "Only a title", "more": 1}\n', encoding="utf-8")
    first, second = load_corpus(path)
    assert (first.id, first.title, first.text) == ("0", "Paris", "A city.")
    assert (second.id, second.title, second.text) == ("7", "Only a title", "")


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_blank_lines_are_passed_over(path: Path, ending: str) -> None:
    path.write_bytes(ending.join(["", GOOD, "  ", GOOD, ""]).encode())
    assert load_corpus(path) == [Passage("0", '"Paris"\nA city.')] * 2


def test_line_separators_of_unicode_are_text(path: Path) -> None:
    path.write_text('{"id": "0", "contents": "a\u2028b\u0085c"}\n', encoding="utf-8")
    assert load_corpus(path)[0].contents == "a\u2028b\u0085c"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("not JSON", "not JSON"),
        ('{"id": "1", "contents": "cut', "not JSON"),
        ('["1", "text"]', "expected {"),
        ('{"id": "1"}', "expected {"),
        ('{"contents": "text"}', "expected {"),
        ('{"id": "1", "contents": null}', "expected {"),
        ('{"id": "1", "contents": ["text"]}', "expected {"),
    ],
)
def test_bad_line_is_named_by_its_number(path: Path, line: str, problem: str) -> None:
    # A blank line counts, so that the number is the editor's.
    path.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n", encoding="utf-8")
    with pytest.raises(CorpusError) as caught:
        load_corpus(path)
    assert f"{path}, line 3: {problem}" in str(caught.value)
    assert line in str(caught.value)


def test_long_bad_line_is_quoted_in_part(path: Path) -> None:
    path.write_text("x" * 1000, encoding="utf-8")
    with pytest.raises(CorpusError, match="line 1") as caught:
        load_corpus(path)
    assert len(str(caught.value)) < 400


def test_line_that_is_no_utf8_is_named_by_its_number(path: Path) -> None:
    path.write_bytes(GOOD.encode() + b"\n\xff\xfe\n")
    with pytest.raises(CorpusError, match="line 2: not JSON"):
        load_corpus(path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_corpus_without_a_passage_is_refused(path: Path, content: str) -> None:
    path.write_text(content, encoding="utf-8")
    with pytest.raises(CorpusError, match="has no passage"):
        load_corpus(path)


def test_missing_file_is_named_with_a_remedy(path: Path) -> None:
    with pytest.raises(CorpusError, match="No such file or directory") as caught:
        load_corpus(path)
    assert str(path) in str(caught.value)
    assert "prefer an absolute one" in str(caught.value)


def test_folder_is_not_a_corpus(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="cannot be read"):
        load_corpus(tmp_path)
