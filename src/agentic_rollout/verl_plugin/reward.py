"""A reward function for verl's `custom_reward_function`.

It trusts the answer that the rollout parsed from sampled tokens, not the decoded response: that text holds
observations, and a model can write any tag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentic_rollout.errors import SettingsError
from agentic_rollout.rewards import exact_match, f1_score, format_score, substring_match

_SCORES = {"em": exact_match, "f1": f1_score, "substring": substring_match}


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    metric: str = "em",
    format_weight: float = 0.0,
) -> dict[str, float]:
    """Scores one trajectory.

    Args:
        data_source: unused; verl passes it.
        solution_str: unused; the decoded response.
        ground_truth: `{"target": [...]}`, a list of strings or one string.
        extra_info: holds the facts written by the rollout, as `rollout_reward_scores` (verl 0.6) or `reward_scores`
            (verl 0.9).
        metric: `em`, `f1` or `substring`.
        format_weight: part of the score given for a well-formed trajectory, 0.0 to 1.0.

    Returns:
        `score` for the trainer; `em`, `f1`, `format`, `answered`, `tool_calls` and `failed_tool_calls` for its logs.

    Raises:
        SettingsError: `metric` is unknown, or the facts of the rollout are missing.
    """
    if metric not in _SCORES:
        raise SettingsError(
            "custom_reward_function.reward_kwargs.metric", metric, f"one of {', '.join(_SCORES)}", "Choose one."
        )
    extra_info = extra_info or {}
    facts = extra_info.get("rollout_reward_scores") or extra_info.get("reward_scores")
    if not facts:
        raise SettingsError(
            "actor_rollout_ref.rollout.name",
            "another rollout",
            "agent, whose output carries the parsed answer",
            "Set rollout.name=agent, or use another reward function.",
        )
    targets = _targets(ground_truth)
    answer = facts["answer"]
    well_formed = format_score(answer, facts["invalid_turns"])
    score = (1.0 - format_weight) * _SCORES[metric](answer, targets) + format_weight * well_formed
    return {
        "score": score,
        "em": exact_match(answer, targets),
        "f1": f1_score(answer, targets),
        "format": well_formed,
        "answered": float(answer is not None),
        "tool_calls": float(facts["tool_calls"]),
        "failed_tool_calls": float(facts["failed_tool_calls"]),
    }


def _targets(ground_truth: Any) -> Sequence[str]:
    if isinstance(ground_truth, Mapping):
        ground_truth = ground_truth["target"]
    return [ground_truth] if isinstance(ground_truth, str) else [str(target) for target in ground_truth]
