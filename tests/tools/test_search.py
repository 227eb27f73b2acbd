from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentic_rollout.config import LoopSettings
from agentic_rollout.engines.scripted import ScriptedEngine
from agentic_rollout.formats import SearchR1Format
from agentic_rollout.loop import AgentLoop, Prompt
from agentic_rollout.retrieval.bm25 import BM25Index
from agentic_rollout.retrieval.corpus import Passage
from agentic_rollout.tools.base import Toolbox, ToolContext
from agentic_rollout.tools.build import build_toolbox
from agentic_rollout.tools.search import EmbeddedSearch, render_passages
from agentic_rollout.types import ToolCall, ToolRequest, ToolStatus
from rollouts import CODEC, EOS, play, spoken

PASSAGES = [
    Passage(str(number), f'"{place} river"\nThe river of {place} is R{number}.')
    for number, place in enumerate(["Zomel", "Havel", "Rudun"])
]


def call(**arguments: Any) -> ToolCall:
    toolbox = Toolbox({"search": EmbeddedSearch(BM25Index.build(PASSAGES), topk=2)})
    return asyncio.run(toolbox.call(ToolRequest("search", arguments), ToolContext("row")))


def test_passages_are_shown_as_search_r1_shows_them() -> None:
    assert render_passages(PASSAGES[:2]) == (
        "Doc 1(Title: Zomel river) The river of Zomel is R0.\nDoc 2(Title: Havel river) The river of Havel is R1."
    )


def test_search_finds_the_passage() -> None:
    record = call(query="river of Havel")
    assert record.status is ToolStatus.OK
    assert record.text.startswith("Doc 1(Title: Havel river) The river of Havel is R1.\nDoc 2(")


def test_nothing_found_is_said_and_is_no_failure() -> None:
    record = call(query="quixotic")
    assert (record.status, record.text) == (ToolStatus.OK, "No passage matches this query.")


@pytest.mark.parametrize("arguments", [{}, {"query": ""}, {"query": " \n"}, {"query": 7}, {"query": ["river"]}])
def test_arguments_without_a_query_are_the_models_mistake(arguments: dict[str, Any]) -> None:
    record = call(**arguments)
    assert (record.status, record.error) == (ToolStatus.BAD_ARGUMENTS, "ToolError")
    assert "query" in record.text


def test_searches_of_many_rows_are_one_batch_off_the_event_loop() -> None:
    batches: list[list[str]] = []

    class WatchedIndex(BM25Index):
        def search(self, queries: Any, topk: int) -> Any:
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()
            batches.append(list(queries))
            return super().search(queries, topk)

    toolbox = Toolbox({"search": EmbeddedSearch(WatchedIndex.build(PASSAGES))})
    rows = range(32)
    turns = {row: [spoken(f"<search>Zomel {row}</search>"), spoken("<answer>R0</answer>")] for row in rows}
    engine = ScriptedEngine(play(turns), CODEC, eos_token_id=EOS)
    loop = AgentLoop(engine, toolbox, SearchR1Format(), CODEC, LoopSettings(), prompt_length=4, response_length=900)
    trajectories = asyncio.run(loop.run_batch([Prompt((row,), f"row {row}") for row in rows]))
    assert batches == [[f"Zomel {row}" for row in rows]]
    assert all("Zomel is R0" in trajectory.tool_calls[0].text for trajectory in trajectories)


def test_search_is_built_from_settings(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    lines = (json.dumps({"id": passage.id, "contents": passage.contents}) for passage in PASSAGES)
    corpus.write_text("\n".join(lines), encoding="utf-8")
    toolbox = build_toolbox({"search": {"type": "bm25", "corpus": str(corpus), "topk": 1, "timeout_s": 5}})
    record = asyncio.run(toolbox.call(ToolRequest("search", {"query": "river"}), ToolContext("row")))
    assert record.text == "Doc 1(Title: Zomel river) The river of Zomel is R0."
