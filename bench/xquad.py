"""Real questions and passages through the real engine: is anything lost, is the right passage found, how fast is it?

    python bench/xquad.py --data ../shared/data/xquad

Each of XQuAD's 1,190 questions is a row: the model's first turn counts as a search for the row's question among all 240
passages, its second ends the trajectory. What comes back is checked row by row, for batches of several sizes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tiny  # isort: skip  # first, as it sets the environment that torch and vLLM read at import

import torch
from rich.console import Console
from rich.table import Table
from vllm import SamplingParams

from agentic_rollout.codec import HFCodec
from agentic_rollout.collate import collate
from agentic_rollout.config import LoopSettings
from agentic_rollout.engines.vllm_inprocess import VLLMInProcessEngine
from agentic_rollout.loop import AgentLoop, Prompt
from agentic_rollout.retrieval.corpus import Passage, open_corpus
from agentic_rollout.tools.base import BaseTool, Toolbox, ToolContext
from agentic_rollout.tools.search import SearchSettings, SearchTool
from agentic_rollout.types import Action, Call, Observation, StopReason, ToolCall, ToolRequest, ToolStatus, Trajectory

PROMPT_LENGTH, RESPONSE_LENGTH = 160, 352
TURN_TOKENS, OBSERVATION_TOKENS = 16, 256
TOPK = 3


class EveryTurnSearches:
    """An action format to which every turn is a search."""

    stop = ("</search>", "</answer>")

    def parse(self, text: str) -> Action:
        return Call((ToolRequest("search", {}),))

    def render(self, calls: Sequence[ToolCall]) -> Observation:
        return Observation("<information>", "\n".join(call.text for call in calls), "</information>")

    def render_invalid(self, problem: str) -> Observation:
        return Observation("", problem, "")


class QuestionSearch(BaseTool):
    """BM25 for the row's question, as a random model has no query of its own."""

    def __init__(self, search: SearchTool) -> None:
        self._search = search

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        return await self._search.call({"query": context.row["question"]}, context)


def build_prompts(questions: Sequence[Mapping[str, Any]], codec: HFCodec) -> list[Prompt]:
    return [
        Prompt(tuple(codec.encode(f"Question: {row['question']}\n")), row["id"], {"question": row["question"]})
        for row in questions
    ]


def roll_out(llm: Any, codec: HFCodec, toolbox: Toolbox, prompts: Sequence[Prompt]) -> list[Trajectory]:
    settings = LoopSettings(
        max_turns=1,
        final_turn=True,
        max_turn_tokens=TURN_TOKENS,
        max_observation_tokens=OBSERVATION_TOKENS,
        reserve_answer_tokens=TURN_TOKENS,
    )

    async def run() -> list[Trajectory]:
        engine = VLLMInProcessEngine(llm.llm_engine, SamplingParams(temperature=1.0, logprobs=0, ignore_eos=True))
        loop = AgentLoop(
            engine,
            toolbox,
            EveryTurnSearches(),
            codec,
            settings,
            prompt_length=PROMPT_LENGTH,
            response_length=RESPONSE_LENGTH,
        )
        async with engine.running():
            return await loop.run_batch(prompts)

    return asyncio.run(run())


def count_faults(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], pad_token_id: int) -> int:
    """Rows that are missing, out of order, unfinished or malformed.

    Raises:
        InvariantError: a row cannot be collated at all.
    """
    tensors = collate(
        trajectories, prompt_length=PROMPT_LENGTH, response_length=RESPONSE_LENGTH, pad_token_id=pad_token_id
    )
    assert torch.equal(tensors["input_ids"][:, PROMPT_LENGTH:], tensors["responses"])
    assert bool((tensors["info_mask"] <= tensors["attention_mask"]).all())
    sound = sum(
        trajectory.prompt_ids == prompt.token_ids
        and trajectory.num_turns == 2
        and trajectory.stop_reason is StopReason.MAX_TURNS
        and [call.status for call in trajectory.tool_calls] == [ToolStatus.OK]
        and int(tensors["response_mask"][row].sum()) == sum(trajectory.response_mask)
        for row, (prompt, trajectory) in enumerate(zip(prompts, trajectories, strict=True))
    )
    return len(prompts) - sound


def measure_recall(
    questions: Sequence[Mapping[str, Any]], trajectories: Sequence[Trajectory], passages: Mapping[str, Passage]
) -> dict[str, float]:
    """The share of rows whose search showed the passage that holds the answer, at rank 1 and among the first three."""
    found = {1: 0, TOPK: 0}
    for question, trajectory in zip(questions, trajectories, strict=True):
        passage = passages[question["passage_id"]]
        shown = [f"Doc {n}(Title: {passage.title}) {passage.text}" for n in range(1, TOPK + 1)]
        for k in found:
            found[k] += any(text in trajectory.tool_calls[0].text for text in shown[:k])
    return {f"recall@{k}": count / len(questions) for k, count in found.items()}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="XQuAD through the agent loop on one vLLM engine.")
    default = Path(__file__).resolve().parents[2] / "shared" / "data" / "xquad"
    parser.add_argument("--data", type=Path, default=default, help="folder of corpus.jsonl and questions.jsonl")
    parser.add_argument("--model", help="path of a model; default: a tiny random one")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 7, 256, 1190])
    parser.add_argument("--out", type=Path, default=tiny.OUTPUTS)
    return parser.parse_args()


def run(arguments: argparse.Namespace, llm: Any) -> dict[str, Any]:
    """All batches, as they are written to `xquad.json`."""
    codec = HFCodec(llm.get_tokenizer())
    questions = [json.loads(line) for line in (arguments.data / "questions.jsonl").read_text().splitlines()]
    corpus = arguments.data / "corpus.jsonl"
    passages = open_corpus(corpus)
    search = SearchTool.from_settings(SearchSettings(source=str(corpus), topk=TOPK, cache_size=0))
    toolbox = Toolbox({"search": QuestionSearch(search)})
    roll_out(llm, codec, toolbox, build_prompts(questions[:1], codec))
    batches = []
    for rows in arguments.batches:
        asked = questions[:rows]
        prompts = build_prompts(asked, codec)
        llm.reset_prefix_cache()
        start = time.perf_counter()
        trajectories = roll_out(llm, codec, toolbox, prompts)
        seconds = time.perf_counter() - start
        batches.append(
            {
                "rows": len(asked),
                "faulty_rows": count_faults(prompts, trajectories, llm.get_tokenizer().pad_token_id),
                "wall_s": seconds,
                "rows_per_s": len(asked) / seconds,
                **measure_recall(asked, trajectories, {passage.id: passage for passage in passages}),
            }
        )
    return {"machine": tiny.machine(), "passages": len(passages), "batches": batches}


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    if not arguments.data.is_dir():
        console.print(f"No data at {arguments.data}: give the folder with --data.")
        return
    tiny.quiet_logs()
    with tempfile.TemporaryDirectory() as folder:
        llm = tiny.build_llm(arguments.model, Path(folder), max_model_len=PROMPT_LENGTH + RESPONSE_LENGTH)
        figures = run(arguments, llm)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "xquad.json").write_text(json.dumps(figures, indent=1) + "\n")
    table = Table("rows", "faulty rows", "wall s", "rows/s", "recall@1", f"recall@{TOPK}")
    for batch in figures["batches"]:
        table.add_row(
            str(batch["rows"]),
            str(batch["faulty_rows"]),
            f"{batch['wall_s']:.2f}",
            f"{batch['rows_per_s']:.0f}",
            f"{batch['recall@1']:.4f}",
            f"{batch[f'recall@{TOPK}']:.4f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
