"""Trajectories to tensors: the only place where ragged rows are padded, and the only torch in the core.

Masks come from lengths and from the origin of each segment, never from token values, so a pad token that equals EOS or
occurs in a text changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentic_rollout.errors import InvariantError
from agentic_rollout.types import Trajectory


def collate(
    trajectories: Sequence[Trajectory],
    *,
    prompt_length: int,
    response_length: int,
    pad_token_id: int,
    mask_observations: bool = True,
) -> dict[str, torch.Tensor]:
    """Pads B trajectories to P prompt tokens (left) and R response tokens (right).

    Args:
        trajectories: B of them, each ending on a sampled token.
        prompt_length: P.
        response_length: R.
        pad_token_id: fills what the masks exclude.
        mask_observations: False counts observations as sampled, to study what that does; there are then no
            `rollout_log_probs`, as nobody sampled those tokens.

    Returns:
        Long tensors `prompts` (B, P), `responses` and `response_mask` (B, R), `input_ids`, `attention_mask`,
        `info_mask` and `position_ids` (B, P+R), and, if every sampled token has one, float32 `rollout_log_probs`
        (B, R), 0.0 where nothing was sampled. `info_mask` is `attention_mask` with observations set to 0.

    Raises:
        InvariantError: a row is empty, too long, or ends on an observation.
    """
    for index, trajectory in enumerate(trajectories):
        _check(trajectory, index, prompt_length, response_length)
    prompts = _pad_left([t.prompt_ids for t in trajectories], prompt_length, pad_token_id)
    prompt_mask = _pad_left([(1,) * len(t.prompt_ids) for t in trajectories], prompt_length, 0)
    responses = _pad_right([t.response_ids for t in trajectories], response_length, pad_token_id)
    attended = _pad_right([(1,) * t.response_length for t in trajectories], response_length, 0)
    sampled = _pad_right([t.response_mask for t in trajectories], response_length, 0)
    response_mask = sampled if mask_observations else attended
    attention_mask = torch.cat([prompt_mask, attended], dim=1)
    batch = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask,
        "info_mask": torch.cat([prompt_mask, response_mask], dim=1),
        "response_mask": response_mask,
        "position_ids": _position_ids(prompt_mask, response_length),
    }
    logprobs = [t.response_logprobs for t in trajectories]
    if mask_observations and all(row is not None for row in logprobs):
        batch["rollout_log_probs"] = _pad_right([row or () for row in logprobs], response_length, 0.0)
    return batch


def _check(trajectory: Trajectory, index: int, prompt_length: int, response_length: int) -> None:
    if not trajectory.segments:
        raise InvariantError(f"row {index} is empty")
    if not trajectory.segments[-1].sampled:
        raise InvariantError(f"row {index} ends on an observation: its reward would be lost")
    if not 1 <= len(trajectory.prompt_ids) <= prompt_length:
        raise InvariantError(f"row {index} has {len(trajectory.prompt_ids)} prompt tokens, not 1 to {prompt_length}")
    if trajectory.response_length > response_length:
        raise InvariantError(f"row {index} has {trajectory.response_length} response tokens, over {response_length}")


def _pad_right(rows: Sequence[Sequence[float]], width: int, fill: float) -> torch.Tensor:
    dtype = torch.float32 if isinstance(fill, float) else torch.long
    padded = torch.full((len(rows), width), fill, dtype=dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.tensor(row, dtype=dtype)
    return padded  # (B, width)


def _pad_left(rows: Sequence[Sequence[int]], width: int, fill: int) -> torch.Tensor:
    padded = torch.full((len(rows), width), fill, dtype=torch.long)
    for index, row in enumerate(rows):
        padded[index, width - len(row) :] = torch.tensor(row, dtype=torch.long)
    return padded  # (B, width)


def _position_ids(prompt_mask: torch.Tensor, response_length: int) -> torch.Tensor:
    """Positions from 0 at the first prompt token on, continued through the padding on the right, as verl does."""
    prompt_positions = (prompt_mask.cumsum(dim=1) - 1).clamp(min=0)  # (B, P)
    steps = torch.arange(1, response_length + 1)  # (R,)
    return torch.cat([prompt_positions, prompt_positions[:, -1:] + steps], dim=1)  # (B, P+R)
