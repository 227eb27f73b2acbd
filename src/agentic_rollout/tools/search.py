"""The search tool: an index in the worker, a search server or an online service, by one setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from agentic_rollout.errors import ToolError
from agentic_rollout.retrieval.corpus import Passage
from agentic_rollout.search.backend import SearchBackend
from agentic_rollout.search.batched import BatchedBackend
from agentic_rollout.search.build import BackendSettings, build_backend, is_remote
from agentic_rollout.search.cache import CachedBackend, CacheSettings
from agentic_rollout.tools.base import BaseTool, ToolContext
from agentic_rollout.tools.schemas import signature_schema


class SearchSettings(BackendSettings, CacheSettings):
    """Settings of a tool of type `search`."""

    type: Literal["search"] = "search"
    source: str = Field(
        min_length=1, description="path of a corpus or index, URL of a search server, or serper, serpapi, google"
    )
    topk: int = Field(default=3, ge=1, description="passages per query")
    timeout_s: float = Field(default=60.0, gt=0, description="for one call of the tool, all waiting included")
    window_s: float = Field(default=0.0, ge=0, description="how long a query waits for others to share its request")
    max_in_flight: int | None = Field(
        default=None, ge=1, description="requests at a time; null: 1 to an index, 8 to a server, no limit online"
    )


def _search(query: Annotated[str, Field(description="what to look for")]) -> None:
    """Finds passages of text about a query."""


class SearchTool(BaseTool):
    """Shows the passages that a backend finds for a `query`."""

    schema = signature_schema(_search)

    def __init__(self, backend: SearchBackend, *, topk: int = 3, timeout_s: float = 60.0) -> None:
        self.backend = backend
        self.timeout_s = timeout_s
        self._topk = topk

    @classmethod
    def from_settings(cls, settings: SearchSettings, *, key: str = "search") -> SearchTool:
        """The tool over a cache, over batches, over the backend of `settings.source`.

        Args:
            key: name of the mapping that the settings came from, for error messages.

        Raises:
            SettingsError: the source cannot be used.
            CorpusError: the corpus is missing or malformed.
            SearchIndexError: the index is.
        """
        backend = build_backend(settings.source, settings, key=key)
        batched = BatchedBackend(backend, window_s=settings.window_s, max_in_flight=_max_in_flight(settings, backend))
        # What an index in this process finds is not worth a disk, and a corpus may change under the same path.
        kept = settings if is_remote(settings.source) else settings.model_copy(update={"cache_dir": None})
        return cls(CachedBackend(batched, kept), topk=settings.topk, timeout_s=settings.timeout_s)

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        query = arguments.get("query")
        if not isinstance(query, str) or not query.strip():
            raise ToolError("search needs a text `query`", status="bad_arguments")
        query = query.encode(errors="replace").decode()  # a lone surrogate cannot be sent
        (hits,) = await self.backend.search([query], self._topk)
        return render_passages([hit.passage for hit in hits])

    async def aclose(self) -> None:
        await self.backend.aclose()


def _max_in_flight(settings: SearchSettings, backend: SearchBackend) -> int:
    if settings.max_in_flight is not None:
        return settings.max_in_flight
    if not is_remote(settings.source):
        return 1
    return 8 if backend.max_batch > 1 else settings.http.max_concurrency


def render_passages(passages: Sequence[Passage]) -> str:
    """Passages as Search-R1 shows them: `Doc 1(Title: …) text`, one a line."""
    if not passages:
        return "No passage matches this query."
    return "\n".join(
        f"Doc {rank}(Title: {passage.title}) {passage.text}" for rank, passage in enumerate(passages, start=1)
    )
