"""The in-process engine over a real vLLM, with a tiny random model."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from agentic_rollout.errors import EngineError
from agentic_rollout.loop import Prompt
from agentic_rollout.tools.base import BaseTool, Toolbox, ToolContext
from agentic_rollout.types import Completion, FinishReason, StopReason, Trajectory
from e2e._engine import BLOCK_TOKENS, LLMSubject, Worker, build_llm, roll_out
from lines import verl06

pytestmark = [verl06, pytest.mark.slow, pytest.mark.timeout(300)]

MAX_MODEL_LEN = 768


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(build_llm, str(tmp_path_factory.mktemp("model")), MAX_MODEL_LEN)
    worker.result(240)
    yield worker
    worker.close()


class EchoTool(BaseTool):
    """Answers at once with a text of its own."""

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        return f"this is what was found for {context.trajectory_id} " * 3


def random_prompts(count: int, length: int, seed: int | None = None) -> list[Prompt]:
    """Prompts of `length` tokens; with `seed`, each trajectory has a sampling seed of its own."""
    rng = random.Random(7)
    return [
        Prompt(
            tuple(rng.randrange(10, 250) for _ in range(length)),
            str(index),
            seed=None if seed is None else 1000 * seed + index,
        )
        for index in range(count)
    ]


def complete(subject: LLMSubject, prompts: list[Prompt], max_tokens: int, stop: tuple[str, ...]) -> list[Completion]:
    """One turn of every prompt."""
    from agentic_rollout.engines.vllm_inprocess import VLLMInProcessEngine

    async def run() -> list[Completion]:
        engine = VLLMInProcessEngine(subject.llm_engine, subject.sampling)
        turns = [engine.generate(p.token_ids, max_tokens=max_tokens, stop=stop, seed=p.seed) for p in prompts]
        async with engine.running():
            return await asyncio.gather(*turns)

    return asyncio.run(run())


# Stop strings


def complete_with_text(
    subject: LLMSubject, prompts: list[Prompt], max_tokens: int, stop: tuple[str, ...]
) -> list[tuple[Completion, str, str]]:
    """Each turn with its text, and its text without the last token."""
    assert subject.sampling.detokenize is False, "verl's base parameters leave text out"
    decode = subject.codec.decode
    return [
        (turn, decode(turn.token_ids), decode(turn.token_ids[:-1]))
        for turn in complete(subject, prompts, max_tokens, stop)
    ]


def test_a_stop_string_ends_the_turn_and_its_last_token_stays_whole(worker: Worker) -> None:
    turns = worker.call(complete_with_text, random_prompts(48, 40, seed=1), 64, ("i", "qu"))
    stopped = [turn for turn in turns if turn[0].finish_reason is FinishReason.STOP]
    assert len(stopped) >= 24
    for _, text, without_last in stopped:
        assert "i" in text or "qu" in text
        assert "i" not in without_last
        assert "qu" not in without_last
    assert any(not text.endswith(("i", "qu")) for _, text, _ in stopped), "no token went on after a stop string"


def test_every_turn_ends_for_the_reason_it_gives(worker: Worker) -> None:
    turns = worker.call(complete_with_text, random_prompts(64, 40, seed=2), 160, ("</search>", "</answer>"))
    for turn, text, without_last in turns:
        assert not any(tag in without_last for tag in ("</search>", "</answer>", "<|endoftext|>"))
        assert turn.logprobs is not None
        assert len(turn.logprobs) == len(turn.token_ids) <= 160
        match turn.finish_reason:
            case FinishReason.STOP:
                assert text.endswith(("</search>", "</answer>"))
            case FinishReason.EOS:
                assert text.endswith("<|endoftext|>")
            case FinishReason.LENGTH:
                assert len(turn.token_ids) == 160
    assert {turn.finish_reason for turn, _, _ in turns} == set(FinishReason)


# Log-probabilities


def largest_logprob_error(subject: LLMSubject, trajectories: list[Trajectory], temperature: float) -> float:
    """Largest difference between the sampler's log-probabilities and those of `transformers` in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(subject.model_path, dtype=torch.float32)
    largest = 0.0
    for trajectory in trajectories:
        ids = torch.tensor([trajectory.prompt_ids + trajectory.response_ids])  # (1, P+R)
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0, :-1] / temperature, dim=-1)  # (P+R-1, vocabulary)
        taken = logprobs.gather(1, ids[0, 1:, None])[len(trajectory.prompt_ids) - 1 :, 0]  # (R,)
        sampled = torch.tensor(trajectory.response_mask, dtype=torch.bool)
        assert trajectory.response_logprobs is not None
        difference = (taken - torch.tensor(trajectory.response_logprobs))[sampled].abs().max().item()
        largest = max(largest, difference)
    return largest


def roll_out_and_compare(subject: LLMSubject, temperature: float) -> tuple[list[Trajectory], float]:
    sampling = copy.copy(subject.sampling)
    sampling.temperature = temperature
    toolbox = Toolbox({"tool": EchoTool()})
    trajectories = roll_out(subject, toolbox, random_prompts(8, 70, seed=3), sampling=sampling, max_turn_tokens=48)
    return trajectories, largest_logprob_error(subject, trajectories, temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_model_over_the_whole_dialogue(worker: Worker, temperature: float) -> None:
    trajectories, error = worker.call(roll_out_and_compare, temperature)
    assert max(trajectory.num_turns for trajectory in trajectories) == 3
    assert any(0 in trajectory.response_mask for trajectory in trajectories)
    assert error < 1e-4


# The prefix cache


class Recorder:
    """Notes how many tokens of each finished request's prompt the prefix cache served."""

    def __init__(self, llm_engine: Any) -> None:
        self.served: list[tuple[int, int]] = []  # (prompt tokens, of them cached)
        self._llm_engine = llm_engine
        self._step = llm_engine.step

    def __enter__(self) -> Recorder:
        self._llm_engine.step = self._recorded_step
        return self

    def __exit__(self, *exception: object) -> None:
        del self._llm_engine.step

    def _recorded_step(self) -> Any:
        outputs = self._step()
        self.served += [(len(o.prompt_token_ids), o.num_cached_tokens) for o in outputs if o.finished]
        return outputs


def cached_tokens_by_turn(subject: LLMSubject) -> tuple[Trajectory, list[tuple[int, int]]]:
    subject.llm.reset_prefix_cache()
    with Recorder(subject.llm_engine) as recorder:
        toolbox = Toolbox({"tool": EchoTool()})
        (trajectory,) = roll_out(subject, toolbox, random_prompts(1, 100, seed=5), max_turn_tokens=48)
    return trajectory, recorder.served


def test_later_turns_reuse_what_earlier_turns_computed(worker: Worker) -> None:
    trajectory, served = worker.call(cached_tokens_by_turn)
    assert len(served) == trajectory.num_turns == 3
    assert served[0] == (100, 0)
    computed = 0
    for index, (prompt_tokens, cached) in enumerate(served):
        assert cached == computed // BLOCK_TOKENS * BLOCK_TOKENS
        sampled = len(trajectory.segments[2 * index].token_ids)
        computed = prompt_tokens + sampled - 1  # the last token of a turn was sampled, not yet read


def load_weights(subject: LLMSubject, seed: int, *, reset: bool) -> None:
    """Puts the weights of another random model into the engine and into `model_path`, as an update of verl's does."""
    from transformers import AutoTokenizer

    from agentic_rollout.demo.model import build_model

    model = build_model(AutoTokenizer.from_pretrained(subject.model_path), seed)
    model.save_pretrained(subject.model_path)
    runner = subject.llm_engine.model_executor.driver_worker.worker.model_runner
    runner.model.load_weights(model.state_dict().items())
    if reset:
        subject.llm.reset_prefix_cache()


def update_and_compare(subject: LLMSubject, seed: int, reset: bool) -> tuple[int, float]:
    """Warms the prefix cache, changes the weights, rolls out the same prompts.

    Returns:
        How many prompt tokens the cache then served on first turns, and the largest error of a log-probability.
    """
    prompts, toolbox = random_prompts(4, 100, seed=6), Toolbox({"tool": EchoTool()})
    roll_out(subject, toolbox, prompts, max_turn_tokens=40)
    load_weights(subject, seed, reset=reset)
    with Recorder(subject.llm_engine) as recorder:
        trajectories = roll_out(subject, toolbox, prompts, max_turn_tokens=40)
    first_turns = sum(cached for prompt_tokens, cached in recorder.served if prompt_tokens == 100)
    return first_turns, largest_logprob_error(subject, trajectories, 1.0)


def test_nothing_stale_survives_a_weight_update(worker: Worker) -> None:
    cached, error = worker.call(update_and_compare, 11, True)
    assert cached == 0
    assert error < 1e-4
    # The same without the reset, to see that the check would notice.
    cached, error = worker.call(update_and_compare, 12, False)
    assert cached > 0
    assert error > 1e-2
    worker.call(load_original_weights)


def load_original_weights(subject: LLMSubject) -> None:
    load_weights(subject, 0, reset=True)


# Seeds


def roll_out_seeded(subject: LLMSubject, seed: int) -> list[Trajectory]:
    return roll_out(subject, Toolbox({"tool": EchoTool()}), random_prompts(8, 50, seed=seed), max_turn_tokens=32)


def test_the_same_seed_gives_the_same_trajectories(worker: Worker) -> None:
    first, again, other = (worker.call(roll_out_seeded, seed) for seed in (1, 1, 2))
    assert [t.response_ids for t in first] == [t.response_ids for t in again]
    assert all(a.response_ids != b.response_ids for a, b in zip(first, other, strict=True))


# Failures


def roll_out_with_one_too_long(subject: LLMSubject) -> tuple[Exception, int, list[Trajectory]]:
    """One prompt over `max_model_len` among good ones, then the good ones alone."""
    prompts, toolbox = random_prompts(6, 50), Toolbox({"tool": EchoTool()})
    too_long = Prompt(tuple([65] * (MAX_MODEL_LEN + 1)), "too-long")
    try:
        roll_out(subject, toolbox, [*prompts, too_long], max_turn_tokens=32)
    except Exception as error:
        failure = error
    left = subject.llm_engine.get_num_unfinished_requests()
    return failure, left, roll_out(subject, toolbox, prompts, max_turn_tokens=32)


def test_an_engine_failure_reaches_the_caller_and_leaves_the_engine_usable(worker: Worker) -> None:
    failure, left, trajectories = worker.call(roll_out_with_one_too_long)
    assert type(failure) is EngineError
    assert "vLLM failed: ValueError" in str(failure)
    assert str(MAX_MODEL_LEN) in str(failure)
    assert left == 0
    assert all(trajectory.stop_reason is not None for trajectory in trajectories)


# Overlap


class WaitingTool(BaseTool):
    """Keeps trajectory `0` waiting until every other trajectory has ended."""

    timeout_s = 120.0

    def __init__(self, others: int) -> None:
        self.events: list[str] = []
        self._running = others
        self._alone = asyncio.Event()

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        if context.trajectory_id == "0":
            await self._alone.wait()
        self.events.append(f"answered {context.trajectory_id}")
        return "nothing"

    async def finish(self, trajectory_id: str) -> None:
        self.events.append(f"ended {trajectory_id}")
        if trajectory_id != "0":
            self._running -= 1
        if self._running == 0:
            self._alone.set()


def roll_out_beside_a_waiting_one(subject: LLMSubject) -> tuple[list[str], list[Trajectory]]:
    tool = WaitingTool(others=5)
    trajectories = roll_out(subject, Toolbox({"tool": tool}), random_prompts(6, 50, seed=8), max_turn_tokens=24)
    return tool.events, trajectories


def test_no_trajectory_waits_for_the_tool_of_another(worker: Worker) -> None:
    events, trajectories = worker.call(roll_out_beside_a_waiting_one)
    ended = {f"ended {index}" for index in range(1, 6)}
    assert ended <= set(events[: events.index("answered 0")])
    assert events[-1] == "ended 0"
    assert {trajectory.stop_reason for trajectory in trajectories} == {StopReason.MAX_TURNS}
    assert [trajectory.num_turns for trajectory in trajectories] == [3] * 6
