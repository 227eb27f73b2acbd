"""verl 0.9's real server and agent-loop workers: generations that are aborted, in every place where that can happen."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentic_rollout.tools.base import BaseTool, ToolContext
from agentic_rollout.trace import parse_trajectory, read_trace
from agentic_rollout.types import StopReason, Trajectory
from lines import verl09

pytestmark = [
    verl09,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # verl, Ray and vLLM warn on import
]

AGENT = "actor_rollout_ref.rollout.engine_kwargs.agent"
QUESTIONS = [f"What is the river of Nokel{number}?" for number in range(8)]
TURNS, TURN_TOKENS = 3, 40


class SlowTool(BaseTool):
    """Takes long enough for an abort to come in between."""

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        await asyncio.sleep(1.5)
        return "Doc 1: the river of Nokel is Gopun."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: what is sampled is long, and different each time."""
    from agentic_rollout.demo.model import build_model, build_tokenizer
    from agentic_rollout.demo.search_task import search_language

    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(search_language(0, places=400), folder)
    build_model(tokenizer, 0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def server(model: Path, traces: Path) -> Iterator[Any]:
    from serving import serving

    tests = str(Path(__file__).resolve().parents[1])
    overrides = [
        f"{AGENT}.format=e2e._engine.EveryTurnCalls",
        f"~{AGENT}.tools.search",
        f"+{AGENT}.tools.tool.type=e2e.test_server.SlowTool",
        f"{AGENT}.max_turns={TURNS}",
        f"+{AGENT}.max_turn_tokens={TURN_TOKENS}",
        f"{AGENT}.max_observation_tokens=24",
        f"+{AGENT}.trace_dir={traces}",
        f"+{AGENT}.seed=5",
        "data.max_response_length=320",
        "actor_rollout_ref.rollout.ignore_eos=true",
    ]
    with serving(model, overrides, environment={"PYTHONPATH": tests}) as started:
        yield started
    del started
    gc.collect()  # here, where the sockets that verl leaves open are no errors


@pytest.mark.parametrize("client", ["plain", "resuming"])
@pytest.mark.parametrize("moment", ["while sampling", "during tool calls"])
def test_an_abort_changes_no_mask_and_loses_no_trajectory(
    server: Any, model: Path, traces: Path, client: str, moment: str
) -> None:
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

    from serving import question_batch

    workers = server.workers(client=FullyAsyncLLMServerClient if client == "resuming" else LLMServerClient)
    workers.generate_sequences(question_batch(QUESTIONS[:1]))  # imports, and the first kernels
    for file in (traces / "train").glob("*"):
        file.unlink()
    aborter = Aborter(server.replica, while_sampling=moment == "while sampling")
    with aborter:
        output = workers.generate_sequences(question_batch(QUESTIONS))
    aborted = aborter.counts
    assert max(aborted) > 0 if moment == "while sampling" else 0 in aborted
    trajectories = [parse_trajectory(record) for file in (traces / "train").glob("*") for record in read_trace(file)]
    assert len(trajectories) == len(output) == len(QUESTIONS)
    by_ids = {(t.prompt_ids, t.response_ids): t for t in trajectories}
    for row in range(len(output)):
        check_row(output, row, by_ids)
    assert worst_logprob_error(model, trajectories) < 1e-4


class Aborter:
    """Aborts all generations a few times, as weight updates do, at moments of one kind."""

    def __init__(self, replica: Any, *, while_sampling: bool) -> None:
        self._replica = replica
        self._while_sampling = while_sampling
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._abort)
        self.counts: list[int] = []  # generations that each abort hit

    def __enter__(self) -> Aborter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _abort(self) -> None:
        while not self._stopped.wait(0.15):
            if self._while_sampling and len([count for count in self.counts if count]) >= 3:
                return
            self.counts.append(asyncio.run(self._abort_once()))
            if not self._while_sampling:
                self._stopped.wait(0.4)

    async def _abort_once(self) -> int:
        result = await self._replica.abort_all_requests()
        await asyncio.sleep(0.1)
        await self._replica.resume_generation()
        return int(result["aborted_count"])


def check_row(output: Any, row: int, trajectories: Mapping[Any, Trajectory]) -> None:
    """verl's padded row is the trajectory that our loop ran."""
    batch = output.batch
    prompt_width = batch["prompts"].shape[1]
    attended = batch["attention_mask"][row].bool()
    ids = batch["input_ids"][row][attended].tolist()
    prompt_length = int(attended[:prompt_width].sum())
    trajectory = trajectories[tuple(ids[:prompt_length]), tuple(ids[prompt_length:])]
    length = trajectory.response_length
    assert trajectory.num_turns == TURNS + 1
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert max(len(segment.token_ids) for segment in trajectory.segments if segment.sampled) == TURN_TOKENS
    assert batch["response_mask"][row].tolist()[:length] == list(trajectory.response_mask)
    assert not batch["response_mask"][row][length:].any()
    assert trajectory.response_mask.count(0) > 0
    assert batch["rollout_log_probs"][row].tolist()[:length] == pytest.approx(trajectory.response_logprobs)


def worst_logprob_error(model: Path, trajectories: list[Trajectory]) -> float:
    """The largest difference between the sampler's log-probabilities and those of a forward pass over the whole."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model).eval()
    worst = 0.0
    for trajectory in trajectories:
        ids = torch.tensor([trajectory.prompt_ids + trajectory.response_ids])
        with torch.inference_mode():
            logprobs = policy(ids).logits[0, :-1].log_softmax(-1)
        scored = logprobs.gather(1, ids[0, 1:, None])[-trajectory.response_length :, 0]
        mask = torch.tensor(trajectory.response_mask, dtype=torch.bool)
        sampled = torch.tensor(trajectory.response_logprobs or ())
        worst = max(worst, float((scored - sampled)[mask].abs().max()))
    return worst
