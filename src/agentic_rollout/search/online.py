"""Online search services: Serper, SerpAPI, and Google's Custom Search JSON API."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentic_rollout.errors import ToolError
from agentic_rollout.retrieval.corpus import Passage
from agentic_rollout.retrieval.index import Hit
from agentic_rollout.search.backend import Outcome, settle
from agentic_rollout.search.http import HttpClient, HttpSettings
from agentic_rollout.types import ToolStatus

Json = Mapping[str, Any]

_GOOGLE_QUOTA = {"dailyLimitExceeded", "quotaExceeded", "rateLimitExceeded", "userRateLimitExceeded"}
_GOOGLE_MOST = 10  # results that one request can give
_SERPAPI_NOTHING_FOUND = "hasn't returned any results"


class OnlineBackend(ABC):
    """What the services have in common: one query a request, results with title, link and snippet.

    A hit's score is the reciprocal of its rank, as the services give none.
    """

    max_batch = 1

    def __init__(self, client: HttpClient) -> None:
        self.client = client
        self.name = client.name
        self.identity = client.name

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        return settle(await asyncio.gather(*(self._outcome(query, topk) for query in queries)))

    async def aclose(self) -> None:
        await self.client.aclose()

    async def _outcome(self, query: str, topk: int) -> Outcome:
        try:
            passages = await self._ask(query, topk)
        except ToolError as error:
            return error
        return [Hit(passage, 1.0 / rank) for rank, passage in enumerate(passages[:topk], start=1)]

    @abstractmethod
    async def _ask(self, query: str, topk: int) -> list[Passage]:
        """What the service finds for one query.

        Raises:
            ToolError: the request failed.
        """


class SerperBackend(OnlineBackend):
    """serper.dev. An answer box or a knowledge graph is the first hit.

    Raises:
        ToolError: `rate_limited` when the account has no credits left.
    """

    def __init__(self, http: HttpSettings, *, api_key: str, base_url: str = "https://google.serper.dev") -> None:
        super().__init__(HttpClient("serper", base_url, http, headers={"X-API-KEY": api_key}, judge=self._judge))

    async def _ask(self, query: str, topk: int) -> list[Passage]:
        return await self.client.request_json("POST", "/search", json={"q": query, "num": topk}, parse=self._parse)

    @staticmethod
    def _parse(reply: Any) -> list[Passage]:
        results = _results(reply, "organic", needed=True)
        boxes = [reply.get("answerBox"), reply.get("knowledgeGraph")]
        return [*_passages(boxes), *_passages(results)]

    @staticmethod
    def _judge(code: int, reply: Any) -> ToolStatus | None:
        out_of_credits = code in (400, 402, 403) and "credits" in _text_at(reply, "message").lower()
        return ToolStatus.RATE_LIMITED if out_of_credits else None


class SerpAPIBackend(OnlineBackend):
    """serpapi.com, with Google behind it. Answer box, results, then related questions.

    Raises:
        ToolError: `rate_limited` when the account has no searches left.
    """

    def __init__(
        self, http: HttpSettings, *, api_key: str, base_url: str = "https://serpapi.com", engine: str = "google"
    ) -> None:
        super().__init__(HttpClient("serpapi", base_url, http))
        self.identity = f"serpapi {engine}"
        self._params = {"api_key": api_key, "engine": engine}

    async def _ask(self, query: str, topk: int) -> list[Passage]:
        params = {**self._params, "q": query, "num": str(topk)}
        return await self.client.request_json("GET", "/search", params=params, parse=self._parse)

    @staticmethod
    def _parse(reply: Any) -> list[Passage]:
        error = _text_at(reply, "error")
        if error and _SERPAPI_NOTHING_FOUND not in error:
            raise _serpapi_failure(error)
        results = _results(reply, "organic_results", needed=not error)
        box = reply.get("answer_box")
        return [*_passages([box]), *_passages(results), *_passages(_results(reply, "related_questions", needed=False))]


class GoogleBackend(OnlineBackend):
    """Google's Custom Search JSON API: at most ten results a query.

    Raises:
        ToolError: `rate_limited` when the quota is used up.
    """

    def __init__(
        self, http: HttpSettings, *, api_key: str, engine_id: str, base_url: str = "https://customsearch.googleapis.com"
    ) -> None:
        super().__init__(HttpClient("google", base_url, http, judge=self._judge))
        self.identity = f"google {engine_id}"
        self._params = {"key": api_key, "cx": engine_id}

    async def _ask(self, query: str, topk: int) -> list[Passage]:
        params = {**self._params, "q": query, "num": str(min(topk, _GOOGLE_MOST))}
        return await self.client.request_json("GET", "/customsearch/v1", params=params, parse=self._parse)

    @staticmethod
    def _parse(reply: Any) -> list[Passage]:
        # Nothing found is told by the number of results; `items` is then left out.
        found = isinstance(reply, Mapping) and "searchInformation" in reply
        return list(_passages(_results(reply, "items", needed=not found)))

    @staticmethod
    def _judge(code: int, reply: Any) -> ToolStatus | None:
        error = reply.get("error") if isinstance(reply, Mapping) else None
        details = error.get("errors") if isinstance(error, Mapping) else None
        reasons = {_text_at(detail, "reason") for detail in details} if isinstance(details, list) else set()
        return ToolStatus.RATE_LIMITED if code == 403 and reasons & _GOOGLE_QUOTA else None


def _serpapi_failure(error: str) -> ToolError:
    """The service tells most failures in the text of a reply that is otherwise fine."""
    if "run out of searches" in error:
        return ToolError("no searches are left", ToolStatus.RATE_LIMITED)
    if "API key" in error:
        return ToolError("the API key was rejected", ToolStatus.HTTP_4XX)
    return ToolError("the search failed", ToolStatus.HTTP_5XX)


def _results(reply: Any, name: str, *, needed: bool) -> list[Any]:
    """A list of the reply; where it need not be there, its absence is an empty one.

    Raises:
        ToolError: `bad_reply`: a reply of another shape must not pass for one without results.
    """
    results = reply.get(name) if isinstance(reply, Mapping) else None
    if isinstance(results, list):
        return results
    if needed or not isinstance(reply, Mapping) or results is not None:
        raise ToolError(f"the reply has no list `{name}`", ToolStatus.BAD_REPLY)
    return []


def _passages(results: Sequence[Any]) -> Iterator[Passage]:
    """Results, boxes and questions as passages; those without text are left out."""
    for result in results:
        text = next(filter(None, (_text_at(result, name) for name in ("answer", "snippet", "description"))), "")
        title = _text_at(result, "title") or _text_at(result, "question")
        url = _text_at(result, "link") or _text_at(result, "descriptionLink")
        if text or title:
            yield Passage(url or title, f'"{title}"\n{text}', url)


def _text_at(value: Any, name: str) -> str:
    """The text under `name`, empty if there is none."""
    text = value.get(name) if isinstance(value, Mapping) else None
    return text if isinstance(text, str) else ""
