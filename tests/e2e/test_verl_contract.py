"""What the installed verl expects of a rollout, checked on verl's own code."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from agentic_rollout.collate import collate
from agentic_rollout.types import Segment, StopReason, ToolCall, ToolStatus, Trajectory
from lines import verl06

pytestmark = [
    verl06,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # verl, Ray and vLLM warn on import
]

PROMPT_LENGTH, RESPONSE_LENGTH = 6, 12


@pytest.fixture(scope="module")
def rollout_class():
    from verl.workers.rollout.base import get_rollout_class

    return get_rollout_class("agent", "sync")


def trajectories() -> list[Trajectory]:
    call = ToolCall("search", {"query": "q"}, ToolStatus.OK, "found", 0.1)
    sampled = Segment((5, 6), True, (-0.5, -0.25))
    return [
        Trajectory((1, 2, 3), [sampled], StopReason.ANSWERED, answer="right"),
        Trajectory((1, 2), [sampled, Segment((8, 9, 8), False), sampled], StopReason.ANSWERED, [call], answer="right"),
        Trajectory((4,), [sampled, Segment((8,), False), sampled], StopReason.MAX_TURNS, [call]),
        Trajectory((4,), [sampled], StopReason.EOS),
    ]


def verl_batch():
    """The rollout's output, joined by what the trainer keeps to itself."""
    from verl import DataProto

    from agentic_rollout.verl_plugin.spmd import rollout_columns

    rows = trajectories()
    tensors = collate(rows, prompt_length=PROMPT_LENGTH, response_length=RESPONSE_LENGTH, pad_token_id=0)
    columns = rollout_columns(rows) | {
        "uid": np.array(["a", "a", "b", "b"], dtype=object),
        "data_source": np.array(["facts"] * 4, dtype=object),
        "reward_model": np.array([{"ground_truth": {"target": ["right"]}}] * 4, dtype=object),
        "extra_info": np.array([{} for _ in range(4)], dtype=object),
    }
    return DataProto.from_dict(tensors=tensors, non_tensors=columns)


class WordTokenizer:
    """All that verl's reward manager asks of a tokenizer."""

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool = True) -> str:
        return " ".join(str(int(token)) for token in ids)


def test_the_registry_names_our_rollout(rollout_class) -> None:
    from verl.workers.rollout.base import BaseRollout

    assert rollout_class.__module__ == "agentic_rollout.verl_plugin.spmd"
    assert issubclass(rollout_class, BaseRollout)
    assert not rollout_class.__abstractmethods__


@pytest.mark.parametrize("name", ["resume", "release", "update_weights"])
def test_the_worker_awaits_these_methods(rollout_class, name: str) -> None:
    from verl.workers.rollout.base import BaseRollout

    assert inspect.iscoroutinefunction(getattr(rollout_class, name))
    assert inspect.iscoroutinefunction(getattr(BaseRollout, name))


def test_signatures_are_those_of_the_base_class(rollout_class) -> None:
    from verl.workers.rollout.base import BaseRollout

    for name in ("__init__", "generate_sequences", "resume", "release", "update_weights"):
        base = list(inspect.signature(getattr(BaseRollout, name)).parameters)
        ours = inspect.signature(getattr(rollout_class, name)).parameters
        assert [parameter for parameter in ours if parameter in base] == base


def test_the_reward_manager_scores_the_answer_that_was_sampled() -> None:
    from verl.workers.reward_manager.naive import NaiveRewardManager

    from agentic_rollout.verl_plugin.reward import compute_score

    batch = verl_batch()
    result = NaiveRewardManager(WordTokenizer(), num_examine=0, compute_score=compute_score)(batch, return_dict=True)
    assert result["reward_tensor"].sum(dim=1).tolist() == [1.0, 1.0, 0.0, 0.0]
    rewarded = result["reward_tensor"] != 0
    assert (batch.batch["response_mask"][rewarded] == 1).all()  # the reward is on a sampled token
    assert result["reward_extra_info"]["tool_calls"] == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("estimator", ["grpo", "gae", "rloo", "reinforce_plus_plus_baseline", "opo", "grpo_vectorized"])
def test_advantages_are_zero_outside_the_mask(estimator: str) -> None:
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.ray_trainer import compute_advantage

    batch = verl_batch()
    mask = batch.batch["response_mask"]
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(4), batch.batch["attention_mask"][:, PROMPT_LENGTH:].sum(dim=1) - 1] = torch.tensor(
        [1.0, 0.0, 1.0, 0.0]
    )
    batch.batch["token_level_rewards"] = rewards
    batch.batch["values"] = torch.zeros(mask.shape)
    advantages = compute_advantage(batch, estimator, num_repeat=2, config=AlgoConfig()).batch["advantages"]
    assert advantages.isfinite().all()
    assert advantages[mask.bool()].abs().max() > 0
    if estimator != "gae":  # verl leaves values at masked positions there, and its losses mask them
        assert (advantages[~mask.bool()] == 0).all()


def test_kl_in_the_reward_counts_sampled_tokens_only() -> None:
    from verl.trainer.ppo.core_algos import FixedKLController
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty

    batch = verl_batch()
    mask = batch.batch["response_mask"]
    batch.batch["token_level_scores"] = torch.zeros(mask.shape)
    batch.batch["old_log_probs"] = torch.randn(mask.shape)
    batch.batch["ref_log_prob"] = torch.randn(mask.shape)
    penalized, _ = apply_kl_penalty(batch, FixedKLController(0.1))
    rewards = penalized.batch["token_level_rewards"]
    assert (rewards[~mask.bool()] == 0).all()
    assert (rewards[mask.bool()] != 0).all()


def test_the_trainer_logs_turns_and_tool_calls() -> None:
    from verl.trainer.ppo.metric_utils import compute_data_metrics

    batch = verl_batch()
    for key in ("token_level_scores", "token_level_rewards", "advantages", "returns"):
        batch.batch[key] = torch.zeros(batch.batch["response_mask"].shape)
    metrics = compute_data_metrics(batch, use_critic=False)
    assert (metrics["num_turns/max"], metrics["tool_call_counts/mean"]) == (2, 0.5)
    assert type(metrics["num_turns/max"]) is int  # verl's JSON logger refuses NumPy's


def test_the_drift_metric_reads_our_log_probs() -> None:
    from verl.utils.debug.metrics import calculate_debug_metrics

    batch = verl_batch()
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"].clone()
    # Whatever the actor says about observations must not count.
    batch.batch["old_log_probs"][batch.batch["response_mask"] == 0] = -7.0
    assert calculate_debug_metrics(batch)["training/rollout_probs_diff_max"] == 0.0
    batch.batch["old_log_probs"][0, 0] -= 1.0
    assert calculate_debug_metrics(batch)["training/rollout_probs_diff_max"] > 0.1
