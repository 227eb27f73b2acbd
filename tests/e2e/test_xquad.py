"""The rollout over real text: every question of XQuAD against all its passages, through a real engine and BM25."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentic_rollout.retrieval.corpus import open_corpus
from agentic_rollout.tools.base import BaseTool, ToolContext
from agentic_rollout.tools.search import SearchSettings, SearchTool
from agentic_rollout.trace import read_trace
from e2e._engine import Worker, free_port, join_ranks, write_tiny_model
from lines import verl06

XQUAD = Path(__file__).resolve().parents[3] / "shared" / "data" / "xquad"

pytestmark = [
    verl06,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not XQUAD.is_dir(), reason=f"the data set is not at {XQUAD}"),
]

PROMPT_LENGTH, RESPONSE_LENGTH = 176, 224
TURN_TOKENS, OBSERVATION_TOKENS = 8, 192  # three passages have about 1,700 tokens: most of each observation is cut
TOPK = 3


class QuestionSearch(BaseTool):
    """BM25 for the row's question, as a random model has no query of its own."""

    def __init__(self, **settings: Any) -> None:
        self._search = SearchTool.from_settings(SearchSettings(**settings))

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        return await self._search.call({"query": context.row["question"]}, context)


@dataclass
class Subject:
    """The rollout, and the tokenizer for its prompts."""

    rollout: Any
    tokenizer: Any


def build_subject(folder: str, trace_dir: str) -> Subject:
    """What verl's worker does, up to the rollout."""
    write_tiny_model(folder)
    from verl.workers.config import HFModelConfig, RolloutConfig
    from verl.workers.rollout.base import get_rollout_class

    mesh = join_ranks()
    corpus = str(XQUAD / "corpus.jsonl")
    agent = {
        "format": "e2e._engine.EveryTurnCalls",
        "max_turns": 1,
        "final_turn": True,
        "max_turn_tokens": TURN_TOKENS,
        "max_observation_tokens": OBSERVATION_TOKENS,
        "reserve_answer_tokens": TURN_TOKENS,
        "trace_dir": trace_dir,
        "tools": {"tool": {"type": f"{__name__}.QuestionSearch", "source": corpus, "topk": TOPK}},
    }
    config = RolloutConfig(
        name="agent",
        prompt_length=PROMPT_LENGTH,
        response_length=RESPONSE_LENGTH,
        dtype="float32",
        tensor_model_parallel_size=1,
        free_cache_engine=False,
        load_format="auto",
        max_num_seqs=256,
        calculate_log_probs=True,
        ignore_eos=True,
        engine_kwargs={"agent": agent, "vllm": {"logprobs_mode": "processed_logprobs"}},
    )
    model_config = HFModelConfig(path=folder)
    return Subject(get_rollout_class("agent", "sync")(config, model_config, mesh), model_config.tokenizer)


def generate(subject: Subject, questions: list[str], step: int) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Rolls out one row per question; the tensors as NumPy arrays, the columns as lists."""
    import numpy as np
    from verl import DataProto

    encoded = subject.tokenizer(
        [f"Question: {question}\n" for question in questions],
        padding="max_length",
        padding_side="left",
        max_length=PROMPT_LENGTH,
        return_tensors="pt",
    )
    attention_mask = encoded["attention_mask"]
    batch = DataProto.from_dict(
        tensors={
            "input_ids": encoded["input_ids"],
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        },
        non_tensors={"question": np.array(questions, dtype=object), "index": np.arange(len(questions), dtype=object)},
        meta_info={"global_steps": step},
    )
    output = subject.rollout.generate_sequences(batch)
    tensors = {name: tensor.numpy() for name, tensor in output.batch.items()}
    tensors["given"] = encoded["input_ids"].numpy()
    return tensors, {name: list(column) for name, column in output.non_tensor_batch.items()}


@pytest.fixture(scope="module")
def trace_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, trace_dir: Path) -> Iterator[Worker]:
    port = str(free_port())
    launcher = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    worker = Worker(build_subject, str(tmp_path_factory.mktemp("model")), str(trace_dir), environment=launcher)
    worker.result(240)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def questions() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (XQUAD / "questions.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("rows", [1, 2, 7, 256])
def test_no_row_is_lost_or_malformed(
    worker: Worker, trace_dir: Path, questions: list[dict[str, Any]], rows: int
) -> None:
    roll_out_and_check(worker, trace_dir, questions[-rows:])


def test_every_question_is_rolled_out_and_finds_its_passage(
    worker: Worker, trace_dir: Path, questions: list[dict[str, Any]]
) -> None:
    """`Doc N` in what the tool answered is the rank at which a passage was found."""
    passages = {passage.id: passage for passage in open_corpus(XQUAD / "corpus.jsonl")}
    ranks = []
    for question, record in zip(questions, roll_out_and_check(worker, trace_dir, questions), strict=True):
        passage, text = passages[question["passage_id"]], record["tool_calls"][0]["text"]
        ranks.append([f"Doc {n}(Title: {passage.title}) {passage.text}" in text for n in range(1, TOPK + 1)])
    assert len(ranks) == 1190
    assert sum(any(found) for found in ranks) / len(ranks) >= 0.97
    assert sum(found[0] for found in ranks) / len(ranks) >= 0.92


def roll_out_and_check(worker: Worker, trace_dir: Path, questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One batch, with all that must hold of it; returns its trace."""
    rows, asked = len(questions), [question["question"] for question in questions]
    tensors, columns = worker.call(generate, asked, rows, timeout_s=200)
    check_tensors(tensors, rows)
    assert columns["question"] == asked
    assert columns["index"] == list(range(rows))
    assert columns["__num_turns__"] == [2] * rows
    assert columns["tool_call_counts"] == [1] * rows
    assert not any(facts["failed_tool_calls"] for facts in columns["reward_scores"])
    records = list(read_trace(trace_dir / "train" / f"step_{rows:06d}_rank_0.jsonl"))
    assert [record["index"] for record in records] == list(range(rows))
    for row, (question, record) in enumerate(zip(asked, records, strict=True)):
        assert record["prompt"] == f"Question: {question}\n"
        turn, observation, last = record["segments"]
        token_ids = turn["token_ids"] + observation["token_ids"] + last["token_ids"]
        assert tensors["responses"][row, : len(token_ids)].tolist() == token_ids
        assert tensors["response_mask"][row].sum() == len(turn["token_ids"]) + len(last["token_ids"])
        assert tensors["attention_mask"][row, PROMPT_LENGTH:].sum() == len(token_ids)
        assert len(observation["token_ids"]) <= OBSERVATION_TOKENS
        assert observation["text"].startswith("<information>Doc 1(Title: ")
        assert observation["text"].endswith("</information>")
        assert "\ufffd" not in observation["text"], "cut inside a character"
    return records


def check_tensors(tensors: dict[str, Any], rows: int) -> None:
    """What must hold of every batch, whatever is in it."""
    prompts, responses, mask = tensors["prompts"], tensors["responses"], tensors["response_mask"]
    input_ids, attention, info = tensors["input_ids"], tensors["attention_mask"], tensors["info_mask"]
    assert prompts.shape == (rows, PROMPT_LENGTH)
    assert responses.shape == mask.shape == tensors["rollout_log_probs"].shape == (rows, RESPONSE_LENGTH)
    assert (prompts == tensors["given"]).all()
    assert (input_ids[:, :PROMPT_LENGTH] == prompts).all()
    assert (input_ids[:, PROMPT_LENGTH:] == responses).all()
    assert (info <= attention).all()
    assert (info[:, PROMPT_LENGTH:] == mask).all()
    assert ((mask.sum(axis=1) >= 2) & (mask.sum(axis=1) <= 2 * TURN_TOKENS)).all()
    assert ((tensors["rollout_log_probs"] < 0) == (mask == 1)).all()
    lengths = attention[:, PROMPT_LENGTH:].sum(axis=1)
    assert (mask[range(rows), lengths - 1] == 1).all(), "a row ends on an observation"
    assert (attention[:, PROMPT_LENGTH:].cumsum(axis=1)[range(rows), lengths - 1] == lengths).all(), "a gap"
