"""Rewards as pure functions of the answer that the rollout parsed from sampled tokens."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, articles and surplus space: SQuAD's normalisation."""
    without_articles = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION))
    return " ".join(without_articles.split())


def exact_match(answer: str | None, targets: Sequence[str]) -> float:
    """1.0 if the normalised answer equals a normalised target."""
    if answer is None:
        return 0.0
    return float(normalize_answer(answer) in {normalize_answer(target) for target in targets})


def substring_match(answer: str | None, targets: Sequence[str]) -> float:
    """1.0 if a normalised target occurs in the normalised answer."""
    if answer is None:
        return 0.0
    normalized = normalize_answer(answer)
    return float(any(_occurs(normalize_answer(target), normalized) for target in targets))


def f1_score(answer: str | None, targets: Sequence[str]) -> float:
    """The best token-level F1 of the answer against any target, 0.0 to 1.0."""
    if answer is None:
        return 0.0
    words = normalize_answer(answer).split()
    return max((_f1(words, normalize_answer(target).split()) for target in targets), default=0.0)


def format_score(answer: str | None, invalid_turns: int) -> float:
    """1.0 for a trajectory that answered and never needed feedback on an invalid action."""
    return float(answer is not None and invalid_turns == 0)


def _occurs(target: str, answer: str) -> bool:
    """An empty target (a name made of articles, say) occurs in an empty answer only, not in every answer."""
    return target in answer if target else not answer


def _f1(answer: list[str], target: list[str]) -> float:
    if not answer or not target:
        return float(answer == target)
    common = sum((Counter(answer) & Counter(target)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(answer), common / len(target)
    return 2 * precision * recall / (precision + recall)
