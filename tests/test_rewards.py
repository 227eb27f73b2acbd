from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_rollout.rewards import exact_match, f1_score, format_score, normalize_answer, substring_match

METRICS = [exact_match, substring_match, f1_score]


@pytest.mark.parametrize(
    ("text", "normalized"),
    [("The  Eiffel-Tower!", "eiffeltower"), ("An apple a day", "apple day"), ("theatre", "theatre"), ("", "")],
)
def test_normalisation_is_squads(text: str, normalized: str) -> None:
    assert normalize_answer(text) == normalized


@given(st.text())
def test_normalisation_is_done_after_one_pass(text: str) -> None:
    assert normalize_answer(normalize_answer(text)) == normalize_answer(text)


@pytest.mark.parametrize(
    ("answer", "targets", "em", "substring", "f1"),
    [
        ("the Paris.", ["Lyon", "paris"], 1.0, 1.0, 1.0),
        ("in Paris, France", ["Paris"], 0.0, 1.0, 0.5),
        ("red green", ["green blue"], 0.0, 0.0, 0.5),
        ("red", ["blue"], 0.0, 0.0, 0.0),
        ("red", [], 0.0, 0.0, 0.0),
        (None, ["red"], 0.0, 0.0, 0.0),
        ("ha ha", ["ha"], 0.0, 1.0, 2 / 3),
    ],
)
def test_scores(answer: str | None, targets: list[str], em: float, substring: float, f1: float) -> None:
    assert exact_match(answer, targets) == em
    assert substring_match(answer, targets) == substring
    assert f1_score(answer, targets) == pytest.approx(f1)


@pytest.mark.parametrize("metric", METRICS)
def test_target_of_articles_is_not_found_in_every_answer(metric: Callable[[str, list[str]], float]) -> None:
    assert metric("Paris", ["The The", "A"]) == 0.0
    assert metric("The", ["The The"]) == 1.0


@given(st.text(), st.lists(st.text(), max_size=3))
def test_scores_stay_between_0_and_1_and_exact_match_is_the_strictest(answer: str, targets: list[str]) -> None:
    em, substring, f1 = (metric(answer, targets) for metric in METRICS)
    assert 0.0 <= em <= min(substring, f1)
    assert max(substring, f1) <= 1.0


@pytest.mark.parametrize(
    ("answer", "invalid_turns", "score"), [("Paris", 0, 1.0), ("Paris", 1, 0.0), (None, 0, 0.0), (None, 2, 0.0)]
)
def test_format_counts_only_an_answer_without_feedback(answer: str | None, invalid_turns: int, score: float) -> None:
    assert format_score(answer, invalid_turns) == score
