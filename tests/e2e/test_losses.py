"""verl's own losses see no observation: gradients at those positions are exactly zero."""

from __future__ import annotations

import random

import pytest
import torch

from agentic_rollout.collate import collate
from agentic_rollout.types import Segment, StopReason, Trajectory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # verl, Ray and vLLM warn on import
]

VOCABULARY = 50
PROMPT_LENGTH, RESPONSE_LENGTH = 8, 24
AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
POLICY_LOSSES = ["vanilla", "gspo", "gpg", "clip_cov", "kl_cov", "geo_mean"]


@pytest.fixture(scope="module")
def core_algos():
    from verl.trainer.ppo import core_algos

    return core_algos


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Eight rows of one to three sampled turns with observations of random content between them."""
    rng = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCABULARY) for _ in range(count))

    trajectories = []
    for row in range(8):
        segments = [Segment(tokens(4), True, (-1.0,) * 4)]
        for _ in range(row % 3):
            segments += [Segment(tokens(rng.randint(1, 5)), False), Segment(tokens(3), True, (-1.0,) * 3)]
        trajectories.append(Trajectory(tokens(5), segments, StopReason.ANSWERED))
    return collate(trajectories, prompt_length=PROMPT_LENGTH, response_length=RESPONSE_LENGTH, pad_token_id=0)


def actor_config():
    from verl.workers.config import FSDPActorConfig, FSDPOptimizerConfig, PolicyLossConfig

    return FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=8,
        optim=FSDPOptimizerConfig(lr=1e-3),
        policy_loss=PolicyLossConfig(clip_cov_ratio=0.2, kl_cov_ratio=0.2),
    )


def random_logits() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(8, RESPONSE_LENGTH, VOCABULARY, requires_grad=True)


def log_probs_of(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    from verl.utils.torch_functional import logprobs_from_logits

    return logprobs_from_logits(logits, batch["responses"])


def observed_and_sampled(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients at observations (attended, not sampled) and at sampled tokens, as (positions, vocabulary)."""
    assert logits.grad is not None
    attended = batch["attention_mask"][:, PROMPT_LENGTH:].bool()
    sampled = batch["response_mask"].bool()
    assert (attended & ~sampled).sum() > 10
    return logits.grad[attended & ~sampled], logits.grad[sampled]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_policy_loss_has_no_gradient_at_observations(core_algos, batch, loss: str, aggregation: str) -> None:
    logits = random_logits()
    log_prob = log_probs_of(logits, batch)
    old_log_prob = log_prob.detach() + 0.05 * torch.randn_like(log_prob)
    advantages = torch.randn_like(log_prob)  # observations too are given one: the mask alone must keep them out
    policy_loss, _ = core_algos.get_policy_loss_fn(loss)(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=batch["response_mask"],
        loss_agg_mode=aggregation,
        config=actor_config(),
    )
    policy_loss.backward()
    observed, sampled = observed_and_sampled(logits, batch)
    assert observed.abs().max() == 0.0
    assert sampled.abs().max() > 0.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("penalty", ["kl", "abs", "mse", "low_var_kl"])
def test_kl_loss_has_no_gradient_at_observations(core_algos, batch, penalty: str, aggregation: str) -> None:
    logits = random_logits()
    log_prob = log_probs_of(logits, batch)
    divergence = core_algos.kl_penalty(log_prob, log_prob.detach() + torch.randn_like(log_prob), penalty)
    core_algos.agg_loss(divergence, batch["response_mask"], aggregation).backward()
    observed, sampled = observed_and_sampled(logits, batch)
    assert observed.abs().max() == 0.0
    assert sampled.abs().max() > 0.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_entropy_has_no_gradient_at_observations(core_algos, batch, aggregation: str) -> None:
    from verl.utils.torch_functional import entropy_from_logits

    logits = random_logits()
    core_algos.agg_loss(entropy_from_logits(logits), batch["response_mask"], aggregation).backward()
    observed, sampled = observed_and_sampled(logits, batch)
    assert observed.abs().max() == 0.0
    assert sampled.abs().max() > 0.0


def test_the_mask_is_what_keeps_them_out(core_algos, batch) -> None:
    """The same loss with observations counted as sampled does reach them: the tests above can fail."""
    logits = random_logits()
    log_prob = log_probs_of(logits, batch)
    unmasked = batch["attention_mask"][:, PROMPT_LENGTH:]
    core_algos.agg_loss(-log_prob, unmasked, "token-mean").backward()
    observed, _ = observed_and_sampled(logits, batch)
    assert observed.abs().max() > 0.0


def test_gae_brings_the_reward_to_every_sampled_token(core_algos, batch) -> None:
    """With values of zero and gamma = lambda = 1 each sampled token's return is the final reward."""
    mask = batch["response_mask"]
    last = batch["attention_mask"][:, PROMPT_LENGTH:].sum(dim=1) - 1  # where verl's reward managers put the score
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(len(mask)), last] = 1.0
    assert (mask[torch.arange(len(mask)), last] == 1).all()
    _, returns = core_algos.compute_gae_advantage_return(rewards, torch.zeros(mask.shape), mask.float(), 1.0, 1.0)
    assert torch.equal(returns[mask.bool()], torch.ones(int(mask.sum())))
