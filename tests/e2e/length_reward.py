"""A reward for any rollout: short responses are better."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    return 1.0 / (1 + len(solution_str) % 7)
