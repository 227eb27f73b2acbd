"""The embedded search tool: BM25 inside the worker, no server needed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from agentic_rollout.batching import Batcher
from agentic_rollout.config import Settings
from agentic_rollout.errors import ToolError
from agentic_rollout.retrieval.bm25 import BM25Index
from agentic_rollout.retrieval.corpus import Passage, load_corpus
from agentic_rollout.tools.base import BaseTool, ToolContext


class SearchSettings(Settings):
    """Settings of a tool of type `bm25`."""

    type: Literal["bm25"] = "bm25"
    corpus: str = Field(description="JSON lines with id and contents")
    topk: int = Field(default=3, ge=1, description="passages per query")
    k1: float = Field(default=0.9, ge=0)
    b: float = Field(default=0.4, ge=0, le=1)
    timeout_s: float = Field(default=30.0, gt=0)
    max_batch: int = Field(default=512, ge=1, description="queries answered as one batch")


class EmbeddedSearch(BaseTool):
    """Searches an index held in memory. Queries that become ready together are one batch, off the event loop."""

    def __init__(self, index: BM25Index, *, topk: int = 3, timeout_s: float = 30.0, max_batch: int = 512) -> None:
        self.timeout_s = timeout_s
        self._index = index
        self._topk = topk
        self._batcher = Batcher(self._search, max_batch=max_batch)

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> EmbeddedSearch:
        """Reads and indexes the corpus.

        Raises:
            CorpusError: the corpus is missing or malformed.
        """
        index = BM25Index.build(load_corpus(settings.corpus), k1=settings.k1, b=settings.b)
        return cls(index, topk=settings.topk, timeout_s=settings.timeout_s, max_batch=settings.max_batch)

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        query = arguments.get("query")
        if not isinstance(query, str) or not query.strip():
            raise ToolError("search needs a text `query`", status="bad_arguments")
        return await self._batcher.submit(query)

    async def _search(self, queries: list[str]) -> list[str]:
        results = await asyncio.to_thread(self._index.search, queries, self._topk)
        return [render_passages([hit.passage for hit in hits]) for hits in results]


def render_passages(passages: Sequence[Passage]) -> str:
    """Passages as Search-R1 shows them: `Doc 1(Title: …) text`, one a line."""
    if not passages:
        return "No passage matches this query."
    return "\n".join(
        f"Doc {rank}(Title: {passage.title}) {passage.text}" for rank, passage in enumerate(passages, start=1)
    )
