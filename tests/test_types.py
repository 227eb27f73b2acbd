from __future__ import annotations

import pytest

from agentic_rollout.errors import InvariantError
from agentic_rollout.types import Segment, Trajectory

THREE_TURNS = Trajectory(
    prompt_ids=(1, 2),
    segments=[
        Segment((3, 4), True, (-0.1, -0.2)),
        Segment((5,), False),
        Segment((6,), True, (-0.3,)),
    ],
)


def test_response_is_derived_from_the_segments() -> None:
    assert THREE_TURNS.response_ids == (3, 4, 5, 6)
    assert THREE_TURNS.response_mask == (1, 1, 0, 1)
    assert THREE_TURNS.response_logprobs == (-0.1, -0.2, 0.0, -0.3)
    assert THREE_TURNS.response_length == 4
    assert THREE_TURNS.num_turns == 2


def test_one_turn_without_logprobs_leaves_the_row_without() -> None:
    trajectory = Trajectory((1,), [Segment((2,), True, (-0.1,)), Segment((3,), True)])
    assert trajectory.response_logprobs is None


def test_new_trajectory_is_empty() -> None:
    trajectory = Trajectory((1,))
    assert (trajectory.response_ids, trajectory.response_logprobs, trajectory.num_turns) == ((), (), 0)


@pytest.mark.parametrize(
    ("token_ids", "sampled", "logprobs", "problem"),
    [
        ((), True, None, "no token"),
        ((1, 2), True, (-0.1,), "2 tokens has 1 log-prob"),
        ((1,), False, (-0.1,), "observation has log-prob"),
    ],
)
def test_segment_that_contradicts_itself_is_refused(
    token_ids: tuple[int, ...], sampled: bool, logprobs: tuple[float, ...] | None, problem: str
) -> None:
    with pytest.raises(InvariantError, match=problem):
        Segment(token_ids, sampled, logprobs)
