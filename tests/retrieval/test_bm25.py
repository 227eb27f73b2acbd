from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import bm25s
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentic_rollout.retrieval import bm25
from agentic_rollout.retrieval.analysis import build_analyzer
from agentic_rollout.retrieval.bm25 import BM25Ranker, Shard
from agentic_rollout.retrieval.postings import Statistics, invert, score

ENGLISH = build_analyzer("english", key="language")
TEXTS = [
    '"Zomel river"\nThe river of Zomel is Bafan.',
    '"Zomel metal"\nThe metal of Zomel is Kigir.',
    '"Havel river"\nThe river of Havel is Rudun. The river is long.',
    '"Nothing"\nUnrelated words about gardens.',
]
WORDS = st.text(alphabet="abcd", min_size=1, max_size=2)
CORPORA = st.lists(st.lists(WORDS, max_size=8).map(" ".join), min_size=1, max_size=12)


def ranker(texts: list[str] = TEXTS, *, k1: float = 0.9, b: float = 0.4) -> BM25Ranker:
    return BM25Ranker.from_texts(texts, ENGLISH, k1=k1, b=b)


def found(query: str, topk: int = 3, *, texts: list[str] = TEXTS) -> list[int]:
    (ranking,) = ranker(texts).rank([query], topk)
    return [row for row, _ in ranking]


def in_shards(texts: list[str], size: int) -> BM25Ranker:
    parts = [invert(texts[start : start + size], ENGLISH) for start in range(0, len(texts), size)]
    statistics = Statistics.gather(parts)
    shards = [
        Shard(part.terms, part.starts, part.rows, score(part, statistics, k1=0.9, b=0.4), len(part.lengths))
        for part in parts
    ]
    return BM25Ranker(shards, ENGLISH)


def test_best_passage_comes_first() -> None:
    assert found("What is the river of Zomel?")[0] == 0
    assert found("metal Zomel")[0] == 1


def test_scores_fall() -> None:
    (ranking,) = ranker().rank(["river Zomel long"], 4)
    scores = [value for _, value in ranking]
    assert scores == sorted(scores, reverse=True)
    assert all(value > 0 for value in scores)


def test_score_is_lucenes_bm25() -> None:
    """idf * tf / (tf + k1 * (1 - b + b * length / mean length)), in single precision."""
    (((row, value),),) = ranker().rank(["kigir"], 1)
    lengths = [len(ENGLISH.analyze(text)) for text in TEXTS]
    idf = math.log(1 + (4 - 1 + 0.5) / (1 + 0.5))
    assert row == 1
    assert value == pytest.approx(idf / (1 + 0.9 * (1 - 0.4 + 0.4 * lengths[1] / (sum(lengths) / 4))), rel=1e-5)


@settings(max_examples=50, deadline=None)
@given(CORPORA, st.lists(WORDS, min_size=1, max_size=5), st.sampled_from([(0.9, 0.4), (1.5, 0.75), (0.0, 0.0)]))
def test_scores_are_those_of_bm25s(texts: list[str], query: list[str], k1_b: tuple[float, float]) -> None:
    k1, b = k1_b
    tokens = [ENGLISH.analyze(text) for text in texts]
    known = [term for term in ENGLISH.analyze(" ".join(query)) if any(term in words for words in tokens)]
    if not known:
        assert ranker(texts, k1=k1, b=b).rank([" ".join(query)], len(texts)) == [[]]
        return
    reference = bm25s.BM25(k1=k1, b=b, method="lucene")
    reference.index(tokens, show_progress=False)
    expected = reference.get_scores(known)
    (ranking,) = ranker(texts, k1=k1, b=b).rank([" ".join(query)], len(texts))
    scores = np.zeros(len(texts), dtype=np.float32)
    for row, value in ranking:
        scores[row] = value
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(CORPORA, st.lists(WORDS, min_size=1, max_size=5), st.integers(1, 5))
def test_shards_find_what_one_index_finds(texts: list[str], query: list[str], size: int) -> None:
    (whole,) = ranker(texts).rank([" ".join(query)], len(texts))
    (parts,) = in_shards(texts, size).rank([" ".join(query)], len(texts))
    assert dict(parts) == pytest.approx(dict(whole), rel=1e-6)


def test_compiled_search_finds_what_numpy_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{word}" for word in rng.zipf(1.5, 20) % 500) for _ in range(300)]
    queries = [" ".join(f"w{word}" for word in rng.integers(0, 50, 4)) for _ in range(40)] + ["", "unknown"]
    plain = in_shards(texts, 100).rank(queries, 5)
    monkeypatch.setattr(bm25, "_COMPILED_FROM_PASSAGES", 0)
    compiled = in_shards(texts, 100).rank(queries, 5)
    assert [[value for _, value in ranking] for ranking in compiled] == [
        pytest.approx([value for _, value in ranking], rel=1e-6) for ranking in plain
    ]


@pytest.mark.parametrize("query", ["quixotic", "", "the of is", "?!", "中"])
def test_query_without_a_known_word_finds_nothing(query: str) -> None:
    assert found(query) == []


def test_unknown_words_beside_known_ones_are_passed_over() -> None:
    assert found("quixotic gardens") == found("gardens") == [3]


def test_more_passages_asked_for_than_match() -> None:
    assert sorted(found("river", topk=100)) == [0, 2]


@pytest.mark.parametrize("topk", [0, -1])
def test_no_passage_asked_for(topk: int) -> None:
    assert ranker().rank(["river", "metal"], topk) == [[], []]


@pytest.mark.parametrize("copies", [4, 50])
def test_rows_with_equal_scores_come_in_their_order(copies: int) -> None:
    rows = found("same", topk=10, texts=["same words"] * copies + ["same same same"])
    assert rows[0] == copies
    assert rows[1:] == sorted(rows[1:])


def test_search_repeats_itself_and_knows_no_neighbouring_query() -> None:
    queries = ["river Zomel", "metal", "", "river Zomel"]
    one = ranker()
    together = one.rank(queries, 3)
    assert together == [one.rank([query], 3)[0] for query in queries]
    assert together == ranker().rank(queries, 3)


def test_threads_share_an_index() -> None:
    one = ranker()
    queries = ["river Zomel", "metal", "Havel", "gardens"] * 50
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda query: one.rank([query], 3)[0], queries))
    assert together == one.rank(queries, 3)


def test_no_query_has_no_result() -> None:
    assert ranker().rank([], 3) == []


@pytest.mark.parametrize("texts", [["the"], ["", "?!"]])
def test_index_without_a_word_finds_nothing(texts: list[str]) -> None:
    assert not ranker(texts).has_terms
    assert found("the words", texts=texts) == []


def test_passage_without_a_word_is_never_found() -> None:
    assert found("river", texts=["the", TEXTS[0]]) == [1]
