from __future__ import annotations

import pytest
import torch

from agentic_rollout.collate import collate
from agentic_rollout.errors import InvariantError
from agentic_rollout.types import Segment, Trajectory
from rollouts import EOS

SHORT = Trajectory((7,), [Segment((10,), True, (-1.0,))])
LONG = Trajectory(
    (7, 8, 9),
    [Segment((10, 11), True, (-1.0, -2.0)), Segment((20, 21), False), Segment((12,), True, (-3.0,))],
)


def collated(*trajectories: Trajectory, **changes: object) -> dict[str, list[list[float]]]:
    arguments: dict[str, object] = {"prompt_length": 4, "response_length": 6, "pad_token_id": 0} | changes
    batch = collate(trajectories, **arguments)  # type: ignore[arg-type]
    return {name: tensor.tolist() for name, tensor in batch.items()}


def test_two_rows_are_laid_out_as_verl_wants_them() -> None:
    assert collated(SHORT, LONG) == {
        "prompts": [[0, 0, 0, 7], [0, 7, 8, 9]],
        "responses": [[10, 0, 0, 0, 0, 0], [10, 11, 20, 21, 12, 0]],
        "input_ids": [[0, 0, 0, 7, 10, 0, 0, 0, 0, 0], [0, 7, 8, 9, 10, 11, 20, 21, 12, 0]],
        "attention_mask": [[0, 0, 0, 1, 1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1, 1, 0]],
        "info_mask": [[0, 0, 0, 1, 1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 0, 0, 1, 0]],
        "response_mask": [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 1, 0]],
        "position_ids": [[0, 0, 0, 0, 1, 2, 3, 4, 5, 6], [0, 0, 1, 2, 3, 4, 5, 6, 7, 8]],
        "rollout_log_probs": [[-1.0, 0.0, 0.0, 0.0, 0.0, 0.0], [-1.0, -2.0, 0.0, 0.0, -3.0, 0.0]],
    }


def test_tensors_are_long_and_logprobs_single_precision() -> None:
    batch = collate([LONG], prompt_length=4, response_length=6, pad_token_id=EOS)
    assert {name: tensor.dtype for name, tensor in batch.items()} == {
        **dict.fromkeys(batch, torch.long),
        "rollout_log_probs": torch.float32,
    }


def test_rows_that_fill_their_budget_have_no_padding() -> None:
    batch = collated(LONG, prompt_length=3, response_length=5)
    assert batch["attention_mask"] == [[1] * 8]
    assert batch["position_ids"] == [list(range(8))]


def test_observations_count_as_sampled_only_on_demand() -> None:
    batch = collated(LONG, mask_observations=False)
    assert batch["response_mask"] == [[1, 1, 1, 1, 1, 0]]
    assert batch["info_mask"] == batch["attention_mask"]


def test_one_row_without_logprobs_leaves_the_batch_without() -> None:
    assert "rollout_log_probs" not in collated(LONG, Trajectory((7,), [Segment((10,), True)]))


def test_no_row_makes_an_empty_batch() -> None:
    batch = collate([], prompt_length=4, response_length=6, pad_token_id=0)
    assert {tuple(tensor.shape) for tensor in batch.values()} == {(0, 4), (0, 6), (0, 10)}


@pytest.mark.parametrize(
    ("trajectory", "problem"),
    [
        (Trajectory((7,)), "row 1 is empty"),
        (Trajectory((), [Segment((10,), True)]), "row 1 has 0 prompt tokens, not 1 to 4"),
        (Trajectory((7,) * 5, [Segment((10,), True)]), "row 1 has 5 prompt tokens, not 1 to 4"),
        (Trajectory((7,), [Segment((10,) * 7, True)]), "row 1 has 7 response tokens, over 6"),
        (Trajectory((7,), [Segment((10,), True), Segment((20,), False)]), "row 1 ends on an observation"),
    ],
)
def test_row_that_cannot_be_trained_on_is_refused(trajectory: Trajectory, problem: str) -> None:
    with pytest.raises(InvariantError, match=problem):
        collated(SHORT, trajectory)
