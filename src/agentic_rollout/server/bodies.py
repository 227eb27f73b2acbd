"""The bodies of requests to the search server, checked by hand: one query a request, thousands of requests a second.

Search-R1, ASearcher, AReaL and verl send `queries`, skyrl-gym one `query`. Fields that no route knows are ignored, as
clients send more than is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from agentic_rollout.errors import ToolError
from agentic_rollout.retrieval.index import Hit
from agentic_rollout.search.wire import parse_hits
from agentic_rollout.server.replies import bad_body
from agentic_rollout.server.routing import parse_flag, parse_object
from agentic_rollout.server.settings import ServerSettings

_MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class RetrieveRequest:
    """`POST /retrieve`.

    Attributes:
        topk: hits returned for each query.
        candidates: hits that a reranker chooses them from; None if the request does not ask for reranking.
    """

    queries: list[str]
    topk: int
    candidates: int | None
    return_scores: bool


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """`POST /rerank`.

    Attributes:
        results: the hits of each query, to be put in a new order.
        topk: how many of them are returned.
    """

    queries: list[str]
    results: list[list[Hit]]
    topk: int
    return_scores: bool


def parse_retrieve(body: bytes, settings: ServerSettings) -> RetrieveRequest:
    """Reads `queries` (or `query`), `topk`, `return_scores`, `topk_retrieval` and `topk_rerank`.

    Raises:
        RefusedError: 422; it names the field.
    """
    fields = parse_object(body)
    topk = _count(fields, "topk", settings.max_topk)
    topk_rerank = _count(fields, "topk_rerank", settings.max_topk)
    candidates = _count(fields, "topk_retrieval", settings.max_topk)
    if topk_rerank and not candidates:
        candidates = max(topk_rerank, settings.rerank_candidates)
    return RetrieveRequest(
        queries=_queries(fields, settings),
        topk=topk_rerank or topk or settings.topk,
        candidates=candidates or None,
        return_scores=parse_flag(fields, "return_scores"),
    )


def parse_rerank(body: bytes, settings: ServerSettings) -> RerankRequest:
    """Reads `queries`, `documents` (a list for each query), `rerank_topk` and `return_scores`.

    A document is what `/retrieve` returns, with its score or without.

    Raises:
        RefusedError: 422; it names the field.
    """
    fields = parse_object(body)
    queries = _queries(fields, settings)
    lists = fields.get("documents")
    if not isinstance(lists, list) or len(lists) != len(queries):
        raise bad_body(f"`documents` must hold one list for each of the {len(queries)} queries")
    try:
        results = [parse_hits(entry) for entry in lists]
    except ToolError as error:
        raise bad_body(f"`documents`: {error}") from None
    if sum(map(len, results)) > settings.max_documents:
        raise bad_body(f"`documents` may hold at most {settings.max_documents} documents")
    topk = _count(fields, "rerank_topk", settings.max_topk) or settings.topk
    return RerankRequest(queries, results, topk, parse_flag(fields, "return_scores"))


def parse_access(body: bytes, settings: ServerSettings) -> list[str]:
    """Reads `urls`, or one `url`.

    Raises:
        RefusedError: 422; it names the field.
    """
    return _texts(parse_object(body), "urls", "url", settings.max_urls)


def _queries(fields: dict[str, Any], settings: ServerSettings) -> list[str]:
    queries = _texts(fields, "queries", "query", settings.max_queries)
    for query in queries:
        if len(query) > settings.max_query_chars:
            raise bad_body(f"a query may have at most {settings.max_query_chars} characters")
    return queries


def _texts(fields: dict[str, Any], plural: str, singular: str, limit: int) -> list[str]:
    """A list of texts, or one text, under either name."""
    texts = fields.get(plural, _MISSING)
    if texts is _MISSING:
        texts = fields.get(singular, _MISSING)
    if isinstance(texts, str):
        return [texts]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise bad_body(f"`{plural}` must be a list of texts")
    if len(texts) > limit:
        raise bad_body(f"`{plural}` may hold at most {limit} texts")
    return texts


def _count(fields: dict[str, Any], name: str, limit: int) -> int:
    """A number of hits; 0 where the server's own is meant."""
    value = fields.get(name)
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value <= limit:
        raise bad_body(f"`{name}` must be null or a whole number from 0 to {limit}")
    return value
