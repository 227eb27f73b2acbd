"""verl's stock trainer, run as a user runs it."""

from __future__ import annotations

import json
import re
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from agentic_rollout.config import AGENT_KEY
from agentic_rollout.demo.prepare import DemoFiles
from agentic_rollout.trace import parse_trajectory, read_trace
from agentic_rollout.verl_plugin.launch import config_dir, cpu_platform
from lines import NAME as LINE
from lines import verl09

from .conftest import RunTrainer, TrainerResult

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DRIFT = "training/rollout_probs_diff_max"

LORA = [
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.lora_alpha=16",
    "actor_rollout_ref.model.target_modules=all-linear",
    "actor_rollout_ref.rollout.load_format=safetensors",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "trainer.test_freq=-1",
]


def recording(path: Path) -> list[str]:
    """Settings that have verl 0.9 write down what its trainer takes out of its storage."""
    if LINE != "0.9":
        return []
    sampler = "trainer.v1.sampler"
    module = Path(__file__).with_name("recording_buffer.py")
    return [
        f"{sampler}.custom_sampler.path={module}",
        f"{sampler}.custom_sampler.name=RecordingBuffer",
        f"+{sampler}.sampler_kwargs.record={path}",
    ]


def check_masks_in_storage(path: Path, result: TrainerResult, *, rows: int) -> None:
    """Every row that the trainer trains on is one of our trajectories, masked and scored as we have it."""
    ours = defaultdict(list)
    for step in (1, 2):
        for trajectory in map(parse_trajectory, traced(result, "train", step)):
            ours[trajectory.prompt_ids + trajectory.response_ids].append(trajectory)
    stored = list(read_trace(path))
    assert len(stored) == rows
    observed = 0
    for row in stored:
        assert row["input_ids"] == [*row["prompts"], *row["responses"]]
        assert row["loss_mask"] == row["response_mask"]
        mask, logprobs = tuple(row["response_mask"]), pytest.approx(row["rollout_log_probs"], abs=1e-6)
        assert all(value < 0.0 for value, sampled in zip(row["rollout_log_probs"], mask, strict=True) if sampled)
        same = ours[tuple(row["input_ids"])]
        assert any(mine.response_mask == mask and mine.response_logprobs == logprobs for mine in same)
        observed += mask.count(0)
    assert observed > 0


def traced(result: TrainerResult, purpose: str, step: int) -> list[dict[str, Any]]:
    files = sorted((result.folder / "trajectories" / purpose).glob(f"step_{step:06d}_*.jsonl"))
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


def check_groups(result: TrainerResult) -> None:
    """Whole groups of n = 4; on verl 0.6 each rank rolls out its own."""
    files = list((result.folder / "trajectories" / "train").glob("step_000001_*.jsonl"))
    parts = [[record["index"] for record in read_trace(file)] for file in files]
    assert all(part.count(index) == 4 for part in parts for index in part)
    if LINE == "0.6":
        assert [len(part) for part in parts] == [16, 16]
        assert not set(parts[0]) & set(parts[1])


def test_grpo_with_validation_checkpoint_and_resume(run_trainer: RunTrainer, tmp_path: Path) -> None:
    recorded = tmp_path / "recorded.jsonl"
    first = run_trainer("first", ["trainer.save_freq=2", *recording(recorded)])
    check_trained(first, {1, 2}, rows=32)
    assert any("/em/mean" in name for name in first.metrics[2])  # validated
    assert (tmp_path / "checkpoints" / "global_step_2" / "actor").is_dir()

    if LINE == "0.9":
        check_masks_in_storage(recorded, first, rows=64)

    resumed = run_trainer("resumed", ["trainer.total_training_steps=3"])
    assert "global_step_2" in resumed.log
    check_trained(resumed, {3}, rows=32)


def test_two_ranks_roll_out_whole_groups_and_share_a_search_server(run_trainer: RunTrainer, search_server: str) -> None:
    result = run_trainer(
        "ranks",
        [
            f"{AGENT_KEY}.tools.search.source={search_server}",
            "trainer.n_gpus_per_node=2",
            "trainer.balance_batch=false",
        ],
    )
    check_trained(result, {1, 2}, rows=32)
    check_groups(result)
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
    if LINE == "0.6":
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
    result = run_trainer("ppo", [f"+platform={cpu_platform()}", *overrides], base="search_ppo")
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
    result = run_trainer("lora", LORA)
    check_trained(result, {1, 2}, rows=32)


@verl09
def test_partial_rollouts_of_the_asynchronous_trainer(run_trainer: RunTrainer) -> None:
    mode = ["trainer.v1.trainer_mode=colocate_async", "trainer.total_training_steps=3", "trainer.test_freq=3"]
    result = run_trainer("async", mode)
    trained = {step: metrics for step, metrics in result.metrics.items() if "actor/pg_loss" in metrics}
    assert set(trained) == {1, 2, 3}
    assert all(metrics["actor/grad_norm"] > 0 for metrics in trained.values())
    assert any("/em/mean" in name for name in result.metrics[3])
    # Some were sampled by older weights than those that train on them, which is what this mode is for.
    assert max(metrics["training/off_policy/trajectory_staleness/max"] for metrics in trained.values()) >= 1


@verl09
def test_the_legacy_trainer(run_trainer: RunTrainer) -> None:
    result = run_trainer("legacy", ["trainer.use_v1=false"])
    check_trained(result, {1, 2}, rows=32)
    assert any("/em/mean" in name for name in result.metrics[2])
    assert max(metrics.get("tool_call_counts/max", 0) for metrics in result.metrics.values()) >= 1


@verl09
def test_verls_own_loop_calls_our_tools(
    run_trainer: RunTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tool_agent` on verl's own vLLM rollout, with both tools of the shipped file."""
    from agentic_rollout.demo.task import write_questions
    from chatml import END, ToolCallTask, write_model

    class BothTools(ToolCallTask):
        @classmethod
        def render_call(cls, call: str) -> str:
            if sum(call.encode()) % 2:
                return super().render_call(call)
            code = f"print(len('{call}'))"
            return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>{END}"

    files = DemoFiles(tmp_path / "task")
    write_questions(write_model(files.folder, steps=300, task_class=BothTools), files.train, files.validation)
    monkeypatch.setenv("SEARCH_SOURCE", str(files.corpus))
    dump = tmp_path / "dump"
    rollout = "actor_rollout_ref.rollout"
    result = run_trainer(
        "tools",
        [
            f"{rollout}.name=vllm",
            f"{rollout}.agent.default_agent_loop=tool_agent",
            f"{rollout}.multi_turn.tool_config_path={config_dir() / 'tools' / 'tool_agent.yaml'}",
            f"{rollout}.multi_turn.max_tool_response_length=2000",
            f"custom_reward_function.path={Path(__file__).with_name('length_reward.py')}",
            f"trainer.rollout_data_dir={dump}",
            "trainer.test_freq=-1",
            "data.max_response_length=256",
        ],
        task=files,
    )
    steps = [metrics for metrics in result.metrics.values() if "actor/pg_loss" in metrics]
    assert len(steps) == 2
    assert all(metrics[DRIFT] <= 1e-5 for metrics in steps)
    outputs = [json.loads(line)["output"] for file in dump.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert len(outputs) == 64
    assert any('"search"' in output and "Doc 1(Title" in output for output in outputs)
    assert any(
        re.search(r'"python".*<tool_response>\s*\d+\s*</tool_response>', output, re.DOTALL) for output in outputs
    )
