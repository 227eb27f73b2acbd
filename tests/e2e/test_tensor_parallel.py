"""Two tensor-parallel ranks, each a process with half of the model, through the rollout class that verl builds."""

from __future__ import annotations

import asyncio
import datetime
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from agentic_rollout.errors import EngineError, PromptError
from agentic_rollout.tools.base import BaseTool, ToolContext
from agentic_rollout.types import Action
from e2e._engine import (
    BLOCK_TOKENS,
    EveryTurnCalls,
    Worker,
    free_port,
    join_ranks,
    prompt_batch,
    write_tiny_model,
)
from lines import verl06

pytestmark = [verl06, pytest.mark.slow, pytest.mark.timeout(300)]

RANKS = (0, 1)
PROMPT_LENGTH, RESPONSE_LENGTH = 48, 256


class RandomDelay(BaseTool):
    """Answers after a random time; the bounds, in seconds, can be changed while the rollout lives."""

    bounds_s = (0.0, 0.05)

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        await asyncio.sleep(random.uniform(*RandomDelay.bounds_s))
        return f"an answer to row {context.row['index']}, number {random.randrange(1000)}"


class FailingFormat(EveryTurnCalls):
    """Breaks at the turns of one trajectory while the others are under way, if told to."""

    failing = False
    _turns = 0

    def parse(self, text: str) -> Action:
        FailingFormat._turns += 1
        if FailingFormat.failing and FailingFormat._turns > 5:
            raise ZeroDivisionError("the format broke")
        return super().parse(text)


@dataclass
class Rank:
    """One rank's rollout, and the weights that its actor would send."""

    rollout: Any
    model_path: str


def build_rank(folder: str, rank: int) -> Rank:
    """What verl's worker does, up to the rollout; the first rank writes the model."""
    if rank == 0:
        write_tiny_model(folder)
    from verl.workers.config import HFModelConfig, RolloutConfig
    from verl.workers.rollout.base import get_rollout_class

    mesh = join_ranks(tensor_parallel_size=2)
    agent = {
        "format": f"{__name__}.FailingFormat",
        "max_turns": 3,
        "final_turn": False,
        "max_turn_tokens": 24,
        "max_observation_tokens": 40,
        "seed": 5,
        "tools": {"tool": {"type": f"{__name__}.RandomDelay"}},
    }
    config = RolloutConfig(
        name="agent",
        prompt_length=PROMPT_LENGTH,
        response_length=RESPONSE_LENGTH,
        dtype="float32",
        tensor_model_parallel_size=2,
        free_cache_engine=False,
        load_format="auto",
        max_num_seqs=8,
        calculate_log_probs=True,
        engine_kwargs={"agent": agent, "vllm": {"block_size": BLOCK_TOKENS, "logprobs_mode": "processed_logprobs"}},
    )
    return Rank(get_rollout_class("agent", "sync")(config, HFModelConfig(path=folder), mesh), folder)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    folder, port = str(tmp_path_factory.mktemp("model")), str(free_port())
    workers = []
    for rank in RANKS:
        launcher = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "VLLM_CPU_OMP_THREADS_BIND": "all|all",
        }
        workers.append(Worker(build_rank, folder, rank, environment=launcher))
    for worker in workers:
        worker.result(240)
    yield workers
    for worker in workers:
        worker.close()


def on_both(ranks: Sequence[Worker], function: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs the same on both ranks at the same time, as a collective needs; failures are returned, not raised."""
    for worker in ranks:
        worker.submit(function, *args)
    results = []
    for worker in ranks:
        try:
            results.append(worker.result())
        except Exception as error:
            results.append(error)
    return results


def generate(subject: Rank, lengths: Sequence[int], step: int) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Rolls out one row per prompt length; tensors and columns as lists."""
    batch = prompt_batch(lengths, PROMPT_LENGTH, subject.rollout.pad_token_id, {"global_steps": step})
    output = subject.rollout.generate_sequences(batch)
    tensors = {name: tensor.tolist() for name, tensor in output.batch.items()}
    return tensors, {name: list(column) for name, column in output.non_tensor_batch.items()}


def half_of_the_model(subject: Rank) -> tuple[str, int]:
    """The executor in use, and the width of this rank's share of the attention heads."""
    engine = subject.rollout.inference_engine.llm_engine
    model = engine.model_executor.driver_worker.worker.model_runner.model
    return type(engine.model_executor).__name__, model.model.layers[0].self_attn.num_heads


def test_each_rank_holds_half_of_the_model_in_its_own_process(ranks: list[Worker]) -> None:
    assert on_both(ranks, half_of_the_model) == [("ExecutorWithExternalLauncher", 1)] * 2


def test_both_ranks_end_with_the_same_trajectories(ranks: list[Worker]) -> None:
    """Twenty rows, more than the engine takes at once, and tools whose delay and answer only the leader knows."""
    first, second = on_both(ranks, generate, [5 + row for row in range(20)], 1)
    assert first == second
    tensors, columns = first
    assert columns["index"] == list(range(20))
    assert columns["tool_call_counts"] == [2] * 20
    assert all(0 < sum(mask) < RESPONSE_LENGTH for mask in tensors["response_mask"])


def generate_and_compare(subject: Rank, lengths: Sequence[int], step: int) -> float:
    """The largest difference of a log-probability from that of `transformers` with the whole model."""
    import torch
    from transformers import AutoModelForCausalLM

    tensors, _ = generate(subject, lengths, step)
    ids, attention, positions, mask, logprobs = (
        torch.tensor(tensors[name])
        for name in ("input_ids", "attention_mask", "position_ids", "response_mask", "rollout_log_probs")
    )
    model = AutoModelForCausalLM.from_pretrained(subject.model_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(ids, attention_mask=attention, position_ids=positions).logits  # (B, P+R, vocabulary)
    expected = torch.log_softmax(logits[:, PROMPT_LENGTH - 1 : -1], -1).gather(2, ids[:, PROMPT_LENGTH:, None])[..., 0]
    return (expected - logprobs)[mask.bool()].abs().max().item()


def update_weights(subject: Rank, seed: int) -> None:
    """Sends the weights of another random model as verl's worker does; `model_path` follows."""
    from transformers import AutoTokenizer

    from agentic_rollout.demo.model import build_model

    model = build_model(AutoTokenizer.from_pretrained(subject.model_path), seed)
    if subject.rollout._leads:
        model.save_pretrained(subject.model_path)
    asyncio.run(subject.rollout.update_weights(iter(model.state_dict().items())))


def test_logprobs_are_those_of_the_whole_model_before_and_after_an_update(ranks: list[Worker]) -> None:
    assert max(on_both(ranks, generate_and_compare, [30, 40, 48], 2)) < 1e-4
    assert on_both(ranks, update_weights, 9) == [None, None]
    assert max(on_both(ranks, generate_and_compare, [30, 40, 48], 2)) < 1e-4


# Failures


def set_failing(subject: Rank, failing: bool) -> None:
    FailingFormat.failing, FailingFormat._turns = failing, 0


def test_a_failure_of_the_leader_in_mid_flight_reaches_the_follower(ranks: list[Worker]) -> None:
    on_both(ranks, set_failing, True)
    errors = on_both(ranks, generate, [5 + row for row in range(20)], 3)
    on_both(ranks, set_failing, False)
    assert [type(error) for error in errors] == [ZeroDivisionError] * 2
    assert [error.args for error in errors] == [("the format broke",)] * 2
    # Nothing of the failed batch is left in either engine, so that they go on in step.
    first, second = on_both(ranks, generate, [5 + row for row in range(20)], 4)
    assert first == second
    assert len(first[0]["responses"]) == 20


def test_bad_input_is_refused_alike(ranks: list[Worker]) -> None:
    errors = on_both(ranks, generate, [5, 0, 7], 5)
    assert [type(error) for error in errors] == [PromptError] * 2
    assert "row 1 has an empty prompt" in str(errors[1])


def test_a_failure_of_both_engines_is_the_leaders_word(ranks: list[Worker]) -> None:
    """Every rank refuses a request that is too long; the follower must not leave before the leader has spoken."""
    errors = on_both(ranks, generate_too_much)
    assert [type(error) for error in errors] == [EngineError] * 2
    assert "ValueError" in str(errors[1])
    first, second = on_both(ranks, generate, [5, 6, 7], 6)
    assert first == second


def generate_too_much(subject: Rank) -> None:
    """A prompt longer than the engine's limit, past the loop's own check."""
    import torch
    from verl import DataProto

    input_ids = torch.full((2, PROMPT_LENGTH + RESPONSE_LENGTH + 9), 65)
    tensors = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    subject.rollout.generate_sequences(DataProto.from_dict(tensors=tensors))


# The heartbeat


class CountingLink:
    """A link that notes how many requests came with each command that it followed."""

    def __init__(self, link: Any) -> None:
        self.commands: list[int] = []
        self._link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def follow(self, step: Callable[[Sequence[Any]], object]) -> Any:
        def counted(added: Sequence[Any]) -> object:
            self.commands.append(len(added))
            return step(added)

        return self._link.follow(counted)


def generate_with_slow_tools(subject: Rank, timeout_s: float) -> tuple[list[int], list[Any]]:
    """Rolls out with tools that take longer than the link's collectives may.

    Returns:
        How many requests came with each command that this rank followed, and the responses.
    """
    from torch.distributed import get_world_size, new_group

    from agentic_rollout.engines import vllm_inprocess
    from agentic_rollout.engines.tensor_parallel import TensorParallelLink

    group = new_group(range(get_world_size()), timeout=datetime.timedelta(seconds=timeout_s), backend="gloo")
    link = CountingLink(TensorParallelLink(group))
    usual_link, subject.rollout._link = subject.rollout._link, link
    usual_heartbeat_s, vllm_inprocess._HEARTBEAT_S = vllm_inprocess._HEARTBEAT_S, timeout_s / 10
    usual_bounds_s, RandomDelay.bounds_s = RandomDelay.bounds_s, (1.5 * timeout_s, 2.0 * timeout_s)
    try:
        tensors, _ = generate(subject, [5, 6], 7)
    finally:
        subject.rollout._link, vllm_inprocess._HEARTBEAT_S = usual_link, usual_heartbeat_s
        RandomDelay.bounds_s = usual_bounds_s
    return link.commands, tensors["responses"]


def test_followers_outlast_slow_tools(ranks: list[Worker]) -> None:
    """While all trajectories wait, the leader keeps the followers' collective from timing out."""
    leader, follower = on_both(ranks, generate_with_slow_tools, 2.0)
    assert leader[1] == follower[1]
    assert sum(follower[0]) == 6, "two trajectories of three turns"
    steps = 3 * 24 * 2
    assert len(follower[0]) <= steps + 80, "heartbeats are rare"
