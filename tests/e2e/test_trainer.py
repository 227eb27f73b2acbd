"""verl's stock trainer, run as a user runs it."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from agentic_rollout.config import AGENT_KEY
from agentic_rollout.demo.prepare import DemoFiles
from agentic_rollout.trace import parse_trajectory, read_trace

from .conftest import RunTrainer, TrainerResult

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DRIFT = "training/rollout_probs_diff_max"


def traced(result: TrainerResult, purpose: str, step: int) -> list[dict[str, Any]]:
    files = sorted((result.folder / "trajectories" / purpose).glob(f"step_{step:06d}_rank_*.jsonl"))
    return [record for file in files for record in read_trace(file)]


def check_trained(result: TrainerResult, steps: set[int], rows: int) -> None:
    """Every step was taken with all rows, several turns, real gradients, and no drift."""
    trained = {step: metrics for step, metrics in result.metrics.items() if "actor/pg_loss" in metrics}
    assert set(trained) == steps
    for step, metrics in trained.items():
        assert metrics[DRIFT] <= 1e-5
        assert metrics["actor/grad_norm"] > 0
        records = traced(result, "train", step)
        assert len(records) == rows
        assert metrics["num_turns/mean"] == pytest.approx(
            sum(parse_trajectory(record).num_turns for record in records) / rows
        )
    assert max(metrics["num_turns/max"] for metrics in trained.values()) >= 2


def test_grpo_with_validation_checkpoint_and_resume(run_trainer: RunTrainer, tmp_path: Path) -> None:
    first = run_trainer("first", ["trainer.save_freq=2"])
    check_trained(first, {1, 2}, rows=32)
    assert any("/em/mean" in name for name in first.metrics[2])  # validated
    assert (tmp_path / "checkpoints" / "global_step_2" / "actor").is_dir()

    resumed = run_trainer("resumed", ["trainer.total_training_steps=3"])
    assert "global_step_2" in resumed.log
    check_trained(resumed, {3}, rows=32)


def test_two_ranks_roll_out_their_own_halves_and_share_a_search_server(
    run_trainer: RunTrainer, search_server: str
) -> None:
    result = run_trainer(
        "ranks",
        [
            f"{AGENT_KEY}.tools.search.source={search_server}",
            "trainer.n_gpus_per_node=2",
            "trainer.balance_batch=false",
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        ],
    )
    check_trained(result, {1, 2}, rows=16)
    files = list((result.folder / "trajectories" / "train").glob("step_000001_rank_*.jsonl"))
    assert len(files) == 2
    halves = [[record["index"] for record in read_trace(file)] for file in files]
    assert [len(half) for half in halves] == [8, 8]
    assert not set(halves[0]) & set(halves[1])
    assert all(half.count(index) == 4 for half in halves for index in half)  # whole groups, n = 4
    calls = [call for step in (1, 2) for record in traced(result, "train", step) for call in record["tool_calls"]]
    assert {call["status"] for call in calls} == {"ok"}
    with urllib.request.urlopen(f"{search_server}/metrics") as reply:
        metrics = reply.read().decode()
    answered = re.search(
        r'^agentic_search_requests_total\{route="/retrieve",status="200"\} (\S+)$', metrics, re.MULTILINE
    )
    assert answered is not None
    assert float(answered[1]) >= 2  # from either rank


def test_tensor_parallel_ranks_share_one_rollout(run_trainer: RunTrainer) -> None:
    result = run_trainer(
        "parallel",
        [
            "trainer.n_gpus_per_node=2",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "trainer.test_freq=-1",
        ],
    )
    check_trained(result, {1, 2}, rows=16)
    assert len(list((result.folder / "trajectories" / "train").glob("step_000001_rank_*.jsonl"))) == 1


def test_ppo_with_critic_gae_and_kl_in_the_reward(run_trainer: RunTrainer, tiny_task: DemoFiles) -> None:
    overrides = [
        "data.max_prompt_length=64",
        "data.max_response_length=224",
        "data.train_batch_size=32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.rollout.n=1",
        f"critic.model.path={tiny_task.model}",
        "critic.ppo_micro_batch_size_per_gpu=32",
        "trainer.logger=[console,file]",
        "trainer.balance_batch=false",
    ]
    result = run_trainer("ppo", ["+platform=cpu", *overrides], base="search_ppo")
    check_trained(result, {1, 2}, rows=32)
    for metrics in result.metrics.values():
        assert metrics["critic/vf_loss"] > 0
        assert "actor/reward_kl_penalty" in metrics
        if metrics["critic/score/max"] == 1.0:
            # gamma = lambda = 1: a rewarded row's returns hold its reward at sampled tokens
            assert metrics["critic/returns/max"] == pytest.approx(1.0, abs=0.05)
    assert max(metrics["critic/score/max"] for metrics in result.metrics.values()) == 1.0


def test_programs_of_the_policy_run_in_the_workers_sandbox(run_trainer: RunTrainer, tiny_code_task: DemoFiles) -> None:
    result = run_trainer("code", [], base="demo_code", task=tiny_code_task)
    check_trained(result, {1, 2}, rows=32)
    records = [record for step in (1, 2) for record in traced(result, "train", step)]
    calls = [call for record in records for call in record["tool_calls"]]
    assert {(call["name"], call["status"]) for call in calls} == {("python", "ok")}
    assert any(record["answer"] == call["text"] for record in records for call in record["tool_calls"])


def test_lora_adapters_reach_the_sampler(run_trainer: RunTrainer) -> None:
    result = run_trainer(
        "lora",
        [
            "actor_rollout_ref.model.lora_rank=8",
            "actor_rollout_ref.model.lora_alpha=16",
            "actor_rollout_ref.model.target_modules=all-linear",
            "actor_rollout_ref.rollout.load_format=safetensors",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            "trainer.test_freq=-1",
        ],
    )
    check_trained(result, {1, 2}, rows=32)
