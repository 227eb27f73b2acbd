"""`SearchRollout` as verl's worker builds and calls it, over a real engine: bad input, modes, order of rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentic_rollout.errors import CorpusError, PromptError, SettingsError
from agentic_rollout.tools.base import BaseTool, ToolContext
from e2e._engine import Worker, free_port, join_ranks, prompt_batch, write_tiny_model
from lines import verl06

pytestmark = [verl06, pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT_LENGTH, RESPONSE_LENGTH = 24, 160
# verl launches its workers with these.
LAUNCHER = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
AGENT = {
    "format": "e2e._engine.EveryTurnCalls",
    "max_turns": 2,
    "max_turn_tokens": 16,
    "max_observation_tokens": 48,
    "seed": 3,
    "tools": {"tool": {"type": "e2e.test_rollout.FailsForOddRows"}},
}


class FailsForOddRows(BaseTool):
    """Breaks for every other row."""

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        if context.row["index"] % 2:
            raise RuntimeError("the tool is broken")
        return f"row {context.row['index']}"


@dataclass
class Subject:
    """A rollout, and what another would be built from."""

    folder: str
    mesh: Any
    model_config: Any
    rollout: Any = None

    def build(self, agent: Mapping[str, Any], **config: Any) -> Any:
        from verl.workers.config import RolloutConfig, SamplingConfig
        from verl.workers.rollout.base import get_rollout_class

        values = {
            "name": "agent",
            "prompt_length": PROMPT_LENGTH,
            "response_length": RESPONSE_LENGTH,
            "dtype": "float32",
            "tensor_model_parallel_size": 1,
            "free_cache_engine": False,
            "load_format": "auto",
            "calculate_log_probs": True,
            "val_kwargs": SamplingConfig(temperature=0.7, do_sample=True),
            "engine_kwargs": {"agent": dict(agent), "vllm": {"logprobs_mode": "processed_logprobs"}},
        }
        return get_rollout_class("agent", "sync")(RolloutConfig(**{**values, **config}), self.model_config, self.mesh)


def build_subject(folder: str) -> Subject:
    write_tiny_model(folder)
    from verl.workers.config import HFModelConfig

    mesh = join_ranks()
    subject = Subject(folder, mesh, HFModelConfig(path=folder))
    subject.rollout = subject.build(AGENT)
    return subject


def build_badly(subject: Subject, agent: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    subject.build({**AGENT, **agent}, **config)


def generate(subject: Subject, lengths: list[int], meta_info: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Rolls out one row per prompt length; returns tensors as lists, and the columns."""
    import torch

    batch = prompt_batch(lengths, PROMPT_LENGTH, subject.rollout.pad_token_id, meta_info)
    input_ids = batch.batch["input_ids"].clone()
    output = subject.rollout.generate_sequences(batch)
    assert torch.equal(output.batch["prompts"], input_ids)
    assert torch.equal(output.batch["input_ids"][:, PROMPT_LENGTH:], output.batch["responses"])
    return {name: tensor.tolist() for name, tensor in output.batch.items()}, dict(output.non_tensor_batch)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    environment = LAUNCHER | {"MASTER_PORT": str(free_port())}
    worker = Worker(build_subject, str(tmp_path_factory.mktemp("model")), environment=environment)
    worker.result(240)
    yield worker
    worker.close()


@pytest.mark.parametrize(
    ("agent", "config", "words"),
    [
        ({"max_turn": 3}, {}, ["engine_kwargs.agent.max_turn", "3", "Did you mean 'max_turns'?"]),
        ({"max_turns": 0}, {}, ["engine_kwargs.agent.max_turns", "0", "greater than or equal to 1"]),
        ({"format": "search_r2"}, {}, ["engine_kwargs.agent.format", "search_r2", "Did you mean 'search_r1'?"]),
        ({"tools": {"search": {"type": "search"}}}, {}, ["tools.search.source", "Set it"]),
        ({"tools": {"search": {"type": "serach", "source": "c"}}}, {}, ["tools.search.type", "serach", "search"]),
        ({}, {"max_model_len": 100}, ["rollout.max_model_len", "100", "184"]),
        ({"trace_dir": f"{__file__}/traces"}, {}, ["agent.trace_dir", "test_rollout.py/traces", "cannot be made"]),
    ],
)
def test_wrong_setting_is_named_before_a_model_is_loaded(
    worker: Worker, agent: Mapping[str, Any], config: Mapping[str, Any], words: list[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        worker.call(build_badly, agent, config, timeout_s=20)
    for word in words:
        assert word in str(caught.value)


def test_missing_corpus_is_named(worker: Worker, tmp_path: Path) -> None:
    corpus = tmp_path / "nowhere.jsonl"
    with pytest.raises(CorpusError, match=r"nowhere\.jsonl cannot be read"):
        worker.call(build_badly, {"tools": {"search": {"type": "search", "source": str(corpus)}}}, {})


def test_corpus_line_that_is_not_json_is_named_by_its_number(worker: Worker, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "0", "contents": '"A"\nb'}) + "\nnot json\n")
    with pytest.raises(CorpusError, match=r"line 2: not JSON .*'not json'"):
        worker.call(build_badly, {"tools": {"search": {"type": "search", "source": str(corpus)}}}, {})


def test_empty_prompt_is_refused_and_the_rollout_goes_on(worker: Worker) -> None:
    with pytest.raises(PromptError, match="row 1 has an empty prompt"):
        worker.call(generate, [5, 0, 7], {})
    tensors, _ = worker.call(generate, [5, 6, 7], {})
    assert len(tensors["responses"]) == 3


def test_tool_that_raises_costs_no_row(worker: Worker) -> None:
    tensors, columns = worker.call(generate, [5] * 32, {})
    failed = [facts["failed_tool_calls"] for facts in columns["reward_scores"]]
    assert len(failed) == 32
    assert all(count == 0 for count in failed[::2])
    assert all(count > 0 for count in failed[1::2])
    assert all(sum(mask) > 0 for mask in tensors["response_mask"])


def test_rows_come_back_in_order_with_their_columns(worker: Worker) -> None:
    tensors, columns = worker.call(generate, [3, 9, 5, 24, 1], {})
    assert list(columns["index"]) == [0, 1, 2, 3, 4]
    assert [sum(mask[:PROMPT_LENGTH]) for mask in tensors["attention_mask"]] == [3, 9, 5, 24, 1]
    for info, attention in zip(tensors["info_mask"], tensors["attention_mask"], strict=True):
        assert all(i <= a for i, a in zip(info, attention, strict=True))


def test_greedy_validation_repeats_itself_and_sampling_does_not(worker: Worker) -> None:
    def responses(**meta_info: Any) -> list[list[int]]:
        return worker.call(generate, [5, 6, 7, 8], meta_info)[0]["responses"]

    assert responses(do_sample=False, global_steps=1) == responses(do_sample=False, global_steps=2)
    assert responses(global_steps=1) != responses(global_steps=2)
    assert responses(global_steps=1) == responses(global_steps=1)  # the setting `seed`
    assert responses(global_steps=1) != responses(global_steps=1, validate=True, do_sample=True)
