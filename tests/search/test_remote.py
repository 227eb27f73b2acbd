from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from aiohttp import web

from agentic_rollout.errors import SettingsError, ToolError
from agentic_rollout.retrieval.index import Hit
from agentic_rollout.search.backend import search_each
from agentic_rollout.search.http import HttpSettings
from agentic_rollout.search.remote import RemoteBackend
from agentic_rollout.search.wire import hits_json
from search.backends import hits
from search.services import serving

HTTP = HttpSettings(total_timeout_s=2.0, read_timeout_s=1.0, backoff_s=0.001, attempts=2)


class Server:
    """Finds `hits`; a request with a poisonous query gets `poisoned` instead."""

    def __init__(self, poisoned: Callable[[], web.StreamResponse] | None = None, *, scores: bool = True) -> None:
        self.poisoned = poisoned
        self.scores = scores
        self.requests: list[tuple[str, dict[str, Any], str | None]] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((request.path, body, request.headers.get("Authorization")))
        if self.poisoned is not None and any("poison" in query for query in body["queries"]):
            return self.poisoned()
        result = [hits_json(hits(query, body["topk"]), return_scores=self.scores) for query in body["queries"]]
        return web.json_response({"result": result})


def coded(code: int) -> Callable[[], web.Response]:
    return lambda: web.Response(status=code)


def sent(reply: Any) -> Callable[[], web.Response]:
    return lambda: web.Response(body=orjson.dumps(reply))


def search(server: Server, *queries: str, path: str = "", **options: Any) -> list[Any]:
    """What comes of each query."""

    async def main() -> list[Any]:
        async with serving(server) as url:
            backend = RemoteBackend(url + path, HTTP, **options)
            try:
                return await search_each(backend, queries, 2)
            finally:
                await backend.aclose()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "route"),
    [
        *[(path, "/retrieve") for path in ("", "/", "/retrieve", "/retrieve/")],
        *[(path, "/wiki/retrieve") for path in ("/wiki", "/wiki/", "/wiki/retrieve")],
    ],
)
def test_url_is_taken_with_the_route_and_without(path: str, route: str) -> None:
    server = Server()
    assert search(server, "a", "b", path=path) == [hits("a", 2), hits("b", 2)]
    assert server.requests == [(route, {"queries": ["a", "b"], "topk": 2, "return_scores": True}, None)]


def test_token_is_sent() -> None:
    server = Server()
    search(server, "a", token="t0k3n")
    assert server.requests[0][2] == "Bearer t0k3n"


def test_documents_without_scores_are_understood() -> None:
    (found,) = search(Server(scores=False), "a")
    assert found == [Hit(hit.passage, 0.0) for hit in hits("a", 2)]


def test_more_hits_than_asked_for_are_cut() -> None:
    server = Server(sent({"result": [hits_json(hits("poison", 9), return_scores=True)]}))
    assert search(server, "poison") == [hits("poison", 2)]


@pytest.mark.parametrize(
    ("poisoned", "status"),
    [
        (coded(400), "http_4xx"),
        (coded(422), "http_4xx"),
        (coded(500), "http_5xx"),
        (coded(504), "http_5xx"),
        (sent([]), "bad_reply"),
        (sent({"result": None}), "bad_reply"),
        (sent({"result": []}), "bad_reply"),
        (sent({"result": [["text"]] * 99}), "bad_reply"),
        (sent({"result": [[{"document": {"contents": "c"}, "score": "high"}]]}), "bad_reply"),
        (lambda: web.Response(text="<html>"), "bad_reply"),
    ],
)
def test_poisonous_query_fails_alone(poisoned: Callable[[], web.StreamResponse], status: str) -> None:
    queries = [*"abcdefgh", "poison", *"ijklmno"]
    outcomes = search(Server(poisoned), *queries)
    error = outcomes.pop(8)
    assert isinstance(error, ToolError)
    assert error.status == status
    assert outcomes == [hits(query, 2) for query in "abcdefghijklmno"]


@pytest.mark.parametrize("code", [401, 403, 404, 429, 503])
def test_failure_that_is_no_querys_fault_is_not_asked_about_again_and_again(code: int) -> None:
    server = Server(coded(code))
    outcomes = search(server, "poison", *"abcdefg")
    assert len(set(map(str, outcomes))) == 1
    assert len(server.requests) <= HTTP.attempts


def test_two_poisonous_queries_fail_alone() -> None:
    queries = [f"q{number}" for number in range(64)]
    queries[3] = queries[60] = "poison"
    outcomes = search(Server(coded(500)), *queries)
    failed = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, ToolError)]
    assert failed == [3, 60]


def test_server_that_chokes_on_all_is_not_asked_about_each() -> None:
    server = Server(coded(500))
    outcomes = search(server, *["poison"] * 64)
    assert {outcome.status for outcome in outcomes} == {"http_5xx"}
    assert len(server.requests) < 64


def test_asking_the_halves_apart_ends_with_the_deadline_and_keeps_the_first_failure() -> None:
    class Slow(Server):
        async def __call__(self, request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(0.7)
            return await super().__call__(request)

    start = time.monotonic()
    outcomes = search(Slow(coded(500)), *["poison"] * 64)
    assert {outcome.status for outcome in outcomes} == {"http_5xx"}
    assert time.monotonic() - start < HTTP.total_timeout_s + 3.0


def test_failure_names_the_server_and_what_was_wrong() -> None:
    (error,) = search(Server(sent({"result": [[], []]})), "poison", token="t0k3n")
    assert str(error).startswith("search server 127.0.0.1:")
    assert str(error).endswith(": 1 queries got 2 results")


@pytest.mark.parametrize(
    "url", ["http://", "ftp://host/retrieve", "http://me:pass@host", "http://host/retrieve?token=pass"]
)
def test_url_that_cannot_be_used_is_named_by_its_setting(url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        RemoteBackend(url, HTTP, key="agent.tools.search.source")
    assert caught.value.key == "agent.tools.search.source"
    assert "pass@" not in str(caught.value)
    assert "token=" not in str(caught.value)
