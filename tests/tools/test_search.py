from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentic_rollout.config import LoopSettings
from agentic_rollout.engines.scripted import ScriptedEngine
from agentic_rollout.formats import SearchR1Format
from agentic_rollout.loop import AgentLoop, Prompt
from agentic_rollout.retrieval.corpus import Passage
from agentic_rollout.retrieval.index import Hit, Index
from agentic_rollout.retrieval.open import open_index
from agentic_rollout.search.backend import LocalBackend
from agentic_rollout.search.batched import BatchedBackend
from agentic_rollout.server.app import create_app
from agentic_rollout.server.settings import ServerSettings
from agentic_rollout.tools.base import Toolbox, ToolContext
from agentic_rollout.tools.build import build_toolbox
from agentic_rollout.tools.search import SearchTool, render_passages
from agentic_rollout.types import ToolCall, ToolRequest, ToolStatus
from rollouts import CODEC, EOS, play, spoken
from search.backends import Library
from search.services import serving

PASSAGES = [
    Passage(str(number), f'"{place} river"\nThe river of {place} is R{number}.')
    for number, place in enumerate(["Zomel", "Havel", "Rudun"])
]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "corpus.jsonl"
    lines = (json.dumps({"id": passage.id, "contents": passage.contents}) for passage in PASSAGES)
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def call(settings: dict[str, Any], *queries: object) -> list[ToolCall]:
    """Calls of a tool built from settings, all at once."""

    async def main() -> list[ToolCall]:
        toolbox = build_toolbox({"search": {"type": "search", "topk": 2, **settings}})
        requests = [ToolRequest("search", {"query": query}) for query in queries]
        try:
            return await asyncio.gather(*(toolbox.call(request, ToolContext("row")) for request in requests))
        finally:
            await toolbox.aclose()

    return asyncio.run(main())


def test_passages_are_shown_as_search_r1_shows_them() -> None:
    assert render_passages(PASSAGES[:2]) == (
        "Doc 1(Title: Zomel river) The river of Zomel is R0.\nDoc 2(Title: Havel river) The river of Havel is R1."
    )


def test_search_finds_the_passage(corpus: str) -> None:
    (record,) = call({"source": corpus}, "river of Havel")
    assert record.status is ToolStatus.OK
    assert record.text.startswith("Doc 1(Title: Havel river) The river of Havel is R1.\nDoc 2(")


def test_nothing_found_is_said_and_is_no_failure(corpus: str) -> None:
    (record,) = call({"source": corpus}, "quixotic")
    assert (record.status, record.text) == (ToolStatus.OK, "No passage matches this query.")


@pytest.mark.parametrize("query", [None, "", " \n", 7, ["river"]])
def test_arguments_without_a_query_are_the_models_mistake(query: object, corpus: str) -> None:
    (record,) = call({"source": corpus}, query)
    assert (record.status, record.error) == (ToolStatus.BAD_ARGUMENTS, "ToolError")
    assert "query" in record.text


def test_lone_surrogate_in_a_query_is_searched_for_as_a_question_mark(corpus: str) -> None:
    async def main() -> list[ToolCall]:
        async with serving(create_app(LocalBackend(open_index(corpus)), ServerSettings())) as url:
            return await asyncio.to_thread(call, {"source": url}, "Havel \ud800")

    (record,) = asyncio.run(main())
    assert (record.status, "R1" in record.text) == (ToolStatus.OK, True)


def test_server_gives_what_the_index_in_the_worker_gives(corpus: str) -> None:
    queries = [*(f"river of {place}" for place in ("Zomel", "Havel", "Rudun")), "quixotic"]

    async def main() -> list[ToolCall]:
        async with serving(create_app(LocalBackend(open_index(corpus)), ServerSettings())) as url:
            return await asyncio.to_thread(call, {"source": url}, *queries)

    served, embedded = asyncio.run(main()), call({"source": corpus}, *queries)
    assert [record.status for record in served] == [ToolStatus.OK] * 4
    assert [record.text for record in served] == [record.text for record in embedded]


def test_ready_queries_are_one_request_and_equal_ones_one_query() -> None:
    library = Library()

    async def main() -> list[ToolCall]:
        async with serving(create_app(library, ServerSettings())) as url:
            return await asyncio.to_thread(call, {"source": url}, *[str(number % 10) for number in range(64)])

    records = asyncio.run(main())
    assert [record.text.split(")")[0] for record in records] == [f"Doc 1(Title: {n % 10}" for n in range(64)]
    assert library.asked == [([str(number) for number in range(10)], 2)]


def test_answers_on_disk_serve_the_next_worker_without_the_server(tmp_path: Path) -> None:
    library = Library()

    async def main() -> tuple[list[ToolCall], list[ToolCall]]:
        async with serving(create_app(library, ServerSettings(cache={"cache_size": 0}))) as url:
            settings = {"source": url, "cache_dir": str(tmp_path)}
            return await asyncio.to_thread(call, settings, "a"), await asyncio.to_thread(call, settings, "a")

    first, second = asyncio.run(main())
    assert [record.text for record in first] == [record.text for record in second]
    assert len(library.asked) == 1


class WatchedIndex:
    """Keeps the batches that an index is asked."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.batches: list[list[str]] = []

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        self.batches.append(list(queries))
        return self.index.search(queries, topk)

    def __len__(self) -> int:
        return len(self.index)


def test_searches_of_many_rows_are_one_batch_off_the_event_loop(corpus: str) -> None:
    index = WatchedIndex(open_index(corpus))
    toolbox = Toolbox({"search": SearchTool(BatchedBackend(LocalBackend(index)))})
    rows = range(32)
    turns = {row: [spoken(f"<search>Zomel {row}</search>"), spoken("<answer>R0</answer>")] for row in rows}
    engine = ScriptedEngine(play(turns), CODEC, eos_token_id=EOS)
    loop = AgentLoop(engine, toolbox, SearchR1Format(), CODEC, LoopSettings(), prompt_length=4, response_length=900)
    trajectories = asyncio.run(loop.run_batch([Prompt((row,), f"row {row}") for row in rows]))
    assert index.batches == [[f"Zomel {row}" for row in rows]]
    assert all("Zomel is R0" in trajectory.tool_calls[0].text for trajectory in trajectories)


def test_tool_closes_its_backend() -> None:
    library = Library()
    asyncio.run(SearchTool(library).aclose())
    assert library.closed == 1
