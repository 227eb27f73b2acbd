"""Advantage estimators that stand in for those of verl which lose credit at observations."""

from __future__ import annotations

from typing import Any

import torch
from verl.utils.torch_functional import masked_whiten


def reinforce_plus_plus(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, config: Any = None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ (arXiv 2501.03262), whose returns reach back over observations.

    verl 0.6 sets the running return to 0 wherever the mask is 0, so that only the last turn learns from the reward.
    Here an observation passes the return on, undiscounted: it is no step of the policy's. As in verl 0.9.

    Args:
        token_level_rewards: (B, R).
        response_mask: (B, R), 1 at sampled tokens.
        config: verl's `algorithm` section; `gamma` is read.

    Returns:
        Advantages, whitened over sampled tokens, and returns; both (B, R), 0 where the mask is.
    """
    mask = response_mask.to(token_level_rewards.dtype)
    returns = torch.zeros_like(token_level_rewards)
    with torch.no_grad():
        running = torch.zeros_like(token_level_rewards[:, 0])
        for step in reversed(range(token_level_rewards.shape[1])):
            sampled = mask[:, step]
            running = sampled * (token_level_rewards[:, step] + config.gamma * running) + (1 - sampled) * running
            returns[:, step] = running * sampled
        advantages = masked_whiten(returns, mask) * mask
    return advantages, returns
