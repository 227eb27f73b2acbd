"""REINFORCE++ on trajectories with observations, on either line of verl."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

import agentic_rollout  # noqa: F401  (repairs verl's registry)
from lines import NAME as LINE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # verl, Ray and vLLM warn on import
    pytest.mark.skipif(LINE == "none", reason="verl is not installed"),
]

CONFIG = SimpleNamespace(gamma=0.9)


def registered():
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    return get_adv_estimator_fn("reinforce_plus_plus")


def rows(*masks: str):
    """Response masks as text, and a reward of 1 at each row's last sampled token."""
    import torch

    mask = torch.tensor([[int(c == "1") for c in text.ljust(12, "0")] for text in masks])
    rewards = torch.zeros(mask.shape)
    for row, text in enumerate(masks):
        rewards[row, text.rindex("1")] = 1.0
    return rewards, mask


def test_every_turn_gets_credit_for_the_reward() -> None:
    rewards, mask = rows("110001100011", "111", "1110001")
    _, returns = registered()(token_level_rewards=rewards, response_mask=mask, config=CONFIG)
    gamma = CONFIG.gamma
    # Five sampled tokens after the first one: an observation is no step, and discounts nothing.
    assert returns[0].tolist() == pytest.approx(
        [gamma**5, gamma**4, 0, 0, 0, gamma**3, gamma**2, 0, 0, 0, gamma, 1.0], abs=1e-6
    )
    assert returns[2].tolist()[:7] == pytest.approx([gamma**3, gamma**2, gamma, 0, 0, 0, 1.0], abs=1e-6)


def test_without_observations_it_is_verls_own() -> None:
    import torch
    from verl.trainer.ppo import core_algos

    rewards, mask = rows("11", "11111", "1", "111111111111")
    own = core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config=CONFIG)
    ours = registered()(token_level_rewards=rewards, response_mask=mask, config=CONFIG)
    # verl 0.6 leaves returns in the padding; no loss reads them there.
    torch.testing.assert_close([ours[0], ours[1] * mask], [own[0], own[1] * mask])


def test_the_repair_is_registered_where_it_is_needed_and_nowhere_else() -> None:
    module = inspect.getmodule(registered())
    assert module is not None
    assert module.__name__.startswith("agentic_rollout" if LINE == "0.6" else "verl")


def test_the_repair_is_what_newer_verl_does() -> None:
    """Where verl's own needs no repair, both must agree on any mask."""
    import torch

    from agentic_rollout.verl_plugin.estimators import reinforce_plus_plus

    torch.manual_seed(0)
    mask = (torch.rand(16, 40) < 0.6).long()
    mask[:, 0] = 1
    rewards = torch.randn(16, 40) * mask
    ours = reinforce_plus_plus(rewards, mask, config=CONFIG)
    torch.testing.assert_close(ours, registered()(rewards, mask, config=CONFIG))
