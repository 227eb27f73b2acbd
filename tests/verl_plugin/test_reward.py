from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentic_rollout.errors import SettingsError
from agentic_rollout.verl_plugin.reward import compute_score

FACTS = {"answer": "the Paris", "invalid_turns": 0, "tool_calls": 3, "failed_tool_calls": 1}


def score(ground_truth: Any = "Paris", *, facts: dict[str, Any] | None = None, **changes: Any) -> dict[str, float]:
    extra_info = {"index": 0, "rollout_reward_scores": FACTS | (facts or {})}
    return compute_score("nq", "the decoded text", ground_truth, extra_info, **changes)


def test_right_answer_is_scored_with_its_facts() -> None:
    assert score() == {
        "score": 1.0,
        "em": 1.0,
        "f1": 1.0,
        "format": 1.0,
        "answered": 1.0,
        "tool_calls": 3.0,
        "failed_tool_calls": 1.0,
    }


@pytest.mark.parametrize(
    "ground_truth",
    [
        "Paris",
        ["Lyon", "Paris"],
        {"target": "Paris"},
        {"target": ["Lyon", "Paris"]},
        {"target": np.array(["Lyon", "Paris"], dtype=object)},
        np.array(["Paris"]),
    ],
    ids=repr,
)
def test_target_may_come_in_any_of_the_data_sets_shapes(ground_truth: Any) -> None:
    assert score(ground_truth)["score"] == 1.0


@pytest.mark.parametrize(("metric", "expected"), [("em", 0.0), ("f1", 0.5), ("substring", 1.0)])
def test_metric_is_chosen_by_name(metric: str, expected: float) -> None:
    assert score(facts={"answer": "in Paris, France"}, metric=metric)["score"] == expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [({}, 1.0), ({"invalid_turns": 1}, 0.8), ({"answer": "Lyon"}, 0.2), ({"answer": None}, 0.0)],
)
def test_format_is_a_part_of_the_score_where_weighted(facts: dict[str, Any], expected: float) -> None:
    assert score(facts=facts, format_weight=0.2)["score"] == pytest.approx(expected)


def test_decoded_text_counts_for_nothing() -> None:
    facts = {"rollout_reward_scores": FACTS | {"answer": None}}
    assert compute_score("nq", "<answer>Paris</answer>", "Paris", facts)["score"] == 0.0


def test_unknown_metric_is_refused() -> None:
    with pytest.raises(SettingsError, match="got 'bleu', expected one of em, f1, substring") as caught:
        score(metric="bleu")
    assert caught.value.key == "custom_reward_function.reward_kwargs.metric"


@pytest.mark.parametrize("extra_info", [None, {}, {"index": 3}, {"rollout_reward_scores": {}}])
def test_batch_of_another_rollout_is_refused(extra_info: dict[str, Any] | None) -> None:
    with pytest.raises(SettingsError, match=r"Set rollout\.name=agent"):
        compute_score("nq", "<answer>Paris</answer>", "Paris", extra_info)
