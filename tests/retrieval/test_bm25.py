from __future__ import annotations

import math

import pytest

from agentic_rollout.errors import CorpusError
from agentic_rollout.retrieval.bm25 import BM25Index, EnglishAnalyzer
from agentic_rollout.retrieval.corpus import Passage

TEXTS = [
    '"Zomel river"\nThe river of Zomel is Bafan.',
    '"Zomel metal"\nThe metal of Zomel is Kigir.',
    '"Havel river"\nThe river of Havel is Rudun. The river is long.',
    '"Nothing"\nUnrelated words about gardens.',
]
PASSAGES = [Passage(str(number), text) for number, text in enumerate(TEXTS)]


def found(query: str, topk: int = 3, *, passages: list[Passage] = PASSAGES) -> list[str]:
    (hits,) = BM25Index.build(passages).search([query], topk)
    return [hit.passage.id for hit in hits]


def test_best_passage_comes_first() -> None:
    assert found("What is the river of Zomel?")[0] == "0"
    assert found("metal Zomel")[0] == "1"


def test_scores_fall() -> None:
    (hits,) = BM25Index.build(PASSAGES).search(["river Zomel long"], 4)
    scores = [hit.score for hit in hits]
    assert scores == sorted(scores, reverse=True)
    assert all(score > 0 for score in scores)


def test_score_is_lucenes_bm25() -> None:
    """idf * tf / (tf + k1 * (1 - b + b * length / mean length)), in single precision."""
    (hits,) = BM25Index.build(PASSAGES, k1=0.9, b=0.4).search(["kigir"], 1)
    lengths = [len(EnglishAnalyzer().analyze(text)) for text in TEXTS]
    idf = math.log(1 + (4 - 1 + 0.5) / (1 + 0.5))
    expected = idf / (1 + 0.9 * (1 - 0.4 + 0.4 * lengths[1] / (sum(lengths) / 4)))
    assert hits[0].score == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("query", ["quixotic", "", "the of is", "?!", "中"])
def test_query_without_a_known_word_finds_nothing(query: str) -> None:
    assert found(query) == []


def test_unknown_words_beside_known_ones_are_passed_over() -> None:
    assert found("quixotic gardens") == found("gardens") == ["3"]


def test_more_passages_asked_for_than_match() -> None:
    assert sorted(found("river", topk=100)) == ["0", "2"]


@pytest.mark.parametrize("copies", [4, 50])
def test_of_equal_scores_the_earlier_passage_comes_first(copies: int) -> None:
    passages = [Passage(str(number), "same\nwords") for number in range(copies)]
    passages.insert(2, Passage("best", "same\nsame same"))
    assert found("same", passages=passages) == ["best", "0", "1"]


def test_search_repeats_itself_and_knows_no_neighbouring_query() -> None:
    queries = ["river Zomel", "metal", "river Zomel"]
    index = BM25Index.build(PASSAGES)
    together = index.search(queries, 3)
    assert together == [index.search([query], 3)[0] for query in queries]
    assert together == BM25Index.build(PASSAGES).search(queries, 3)


def test_no_query_has_no_result() -> None:
    assert BM25Index.build(PASSAGES).search([], 3) == []


@pytest.mark.parametrize("texts", [[], ["the"], ["", "?!"]])
def test_corpus_without_a_word_is_refused(texts: list[str]) -> None:
    with pytest.raises(CorpusError, match="has a word to search for"):
        BM25Index.build([Passage(str(number), text) for number, text in enumerate(texts)])


def test_passage_without_a_word_is_never_found() -> None:
    assert found("river", passages=[Passage("empty", "the"), PASSAGES[0]]) == ["0"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The Rivers of Paris", ["river", "pari"]),
        ("Zomel's rivers’ banks", ["zomel", "river", "bank"]),
        ("U.S.A. in 1990-1991", ["u.s.a", "1990", "1991"]),
        ("naïve CAFÉ 中", ["naïv", "café", "中"]),
        ("snake_case", ["snake", "case"]),
        ("", []),
    ],
)
def test_text_is_analysed_as_english(text: str, words: list[str]) -> None:
    assert EnglishAnalyzer().analyze(text) == words
