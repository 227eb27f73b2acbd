from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_rollout.errors import SettingsError
from agentic_rollout.retrieval.corpus import Passage
from agentic_rollout.retrieval.fusion import FusedIndex, reciprocal_rank_fusion
from agentic_rollout.retrieval.index import CorpusIndex, Hit, Ranking

CORPUS = [Passage(id_, f"about {id_}") for id_ in "abcdef"]


class FixedRanker:
    """The same ranking for every query; remembers how much was asked for."""

    def __init__(self, ids: str) -> None:
        self.ids = ids
        self.asked: list[int] = []

    def rank(self, queries: Sequence[str], topk: int) -> list[Ranking]:
        self.asked.append(topk)
        ranking = [("abcdef".index(id_), 1 / place) for place, id_ in enumerate(self.ids, start=1)]
        return [ranking[:topk] for _ in queries]


def index(ids: str) -> CorpusIndex:
    return CorpusIndex(CORPUS, FixedRanker(ids))


def ids(hits: Sequence[Hit]) -> str:
    return "".join(hit.passage.id for hit in hits)


def test_score_is_the_sum_of_reciprocal_ranks() -> None:
    fused = reciprocal_rank_fusion(["ab", "ca"], k=60)
    assert [id_ for id_, _ in fused] == ["a", "c", "b"]
    assert dict(fused) == {
        "a": pytest.approx(1 / 61 + 1 / 62),
        "b": pytest.approx(1 / 62),
        "c": pytest.approx(1 / 61),
    }


def test_k_decides_how_much_the_first_ranks_stand_out() -> None:
    rankings = ["abc", "dbc"]  # `b` is twice second, `a` and `d` are once first
    assert reciprocal_rank_fusion(rankings, k=60)[0][0] == "b"
    assert [id_ for id_, _ in reciprocal_rank_fusion(rankings, k=0)][:2] == ["a", "b"]  # 1, and 1/2 twice


def test_weights_multiply() -> None:
    fused = reciprocal_rank_fusion(["ab", "ba"], weights=[1, 3])
    assert fused == [("b", pytest.approx(3 / 61 + 1 / 62)), ("a", pytest.approx(1 / 61 + 3 / 62))]


def test_only_the_first_occurrence_in_a_ranking_counts() -> None:
    assert reciprocal_rank_fusion(["aab"]) == reciprocal_rank_fusion(["ab"])


rankings_of_letters = st.lists(st.lists(st.sampled_from("abcdef"), unique=True), max_size=4)


@given(rankings_of_letters)
def test_every_id_comes_once_and_scores_fall(rankings: list[list[str]]) -> None:
    fused = reciprocal_rank_fusion(rankings)
    assert sorted(id_ for id_, _ in fused) == sorted({id_ for ranking in rankings for id_ in ranking})
    scores = [score for _, score in fused]
    assert scores == sorted(scores, reverse=True)


@given(st.permutations("abcdef"), st.integers(1, 4))
def test_rankings_that_agree_keep_their_order(ranking: list[str], times: int) -> None:
    assert [id_ for id_, _ in reciprocal_rank_fusion([ranking] * times)] == ranking


def test_fused_index_finds_what_several_rank_well() -> None:
    fused = FusedIndex([index("abcd"), index("dbef")])
    (hits,) = fused.search(["?"], 3)
    assert ids(hits) == "bda"
    assert hits[0].passage is CORPUS[1]
    assert hits[0].score == pytest.approx(2 / 62)
    assert len(fused) == 6


def test_equal_scores_keep_the_order_of_the_indexes() -> None:
    assert ids(FusedIndex([index("ab"), index("ef")]).search(["?"], 4)[0]) == "aebf"
    assert ids(FusedIndex([index("ef"), index("ab")]).search(["?"], 4)[0]) == "eafb"


def test_each_query_has_its_own_fusion() -> None:
    class Echo:
        def rank(self, queries: Sequence[str], topk: int) -> list[Ranking]:
            return [[("abcdef".index(letter), 1.0) for letter in query][:topk] for query in queries]

    echo = CorpusIndex(CORPUS, Echo())
    assert [ids(hits) for hits in FusedIndex([echo, echo]).search(["ab", "", "fa"], 3)] == ["ab", "", "fa"]
    assert FusedIndex([echo]).search([], 3) == []


def test_more_is_asked_of_each_index_than_is_returned() -> None:
    indexes = [index("abcdef"), index("fedcba")]
    fused = FusedIndex(indexes, depth=4)
    assert [len(fused.search(["?"], topk)[0]) for topk in (2, 5)] == [2, 5]
    assert [each.ranker.asked for each in indexes] == [[4, 5], [4, 5]]


def test_weighted_index_follows_the_heavier() -> None:
    assert ids(FusedIndex([index("ab"), index("ef")], weights=[1, 2]).search(["?"], 4)[0]) == "efab"


@pytest.mark.parametrize(("count", "weights"), [(0, None), (2, [1.0]), (2, [1.0, 0.0]), (1, [-1.0])])
def test_impossible_fusion_is_refused(count: int, weights: list[float] | None) -> None:
    with pytest.raises(SettingsError, match=r"weights|indexes"):
        FusedIndex([index("ab")] * count, weights=weights)
