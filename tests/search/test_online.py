from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from agentic_rollout.search.backend import search_each
from agentic_rollout.search.http import HttpSettings
from agentic_rollout.search.online import GoogleBackend, OnlineBackend, SerpAPIBackend, SerperBackend
from search.services import serving

HTTP = HttpSettings(total_timeout_s=2.0, backoff_s=0.001, attempts=2)
KEY = "k3y"

SERPER = {
    "searchParameters": {"q": "everest", "type": "search", "num": 3, "engine": "google"},
    "answerBox": {"title": "Mount Everest / Elevation", "answer": "8,849 m"},
    "knowledgeGraph": {
        "title": "Mount Everest",
        "type": "Mountain",
        "description": "The highest mountain.",
        "descriptionSource": "Wikipedia",
        "descriptionLink": "https://en.example/Everest",
        "attributes": {"Elevation": "8,849 m"},
    },
    "organic": [
        {"title": "Everest", "link": "https://a.example", "snippet": "It is 8,849 m high.", "position": 1},
        {"title": "Peaks", "link": "https://b.example", "position": 2},
        {"title": "Climb", "link": "https://c.example", "snippet": "How to.", "position": 3},
    ],
    "relatedSearches": [{"query": "k2"}],
    "credits": 1,
}
SERPAPI = {
    "search_metadata": {"id": "1", "status": "Success"},
    "search_parameters": {"engine": "google", "q": "everest"},
    "answer_box": {"type": "organic_result", "title": "Elevation", "answer": "8,849 m", "link": "https://x.example"},
    "organic_results": [
        {"position": 1, "title": "Everest", "link": "https://a.example", "snippet": "It is high."},
    ],
    "related_questions": [
        {
            "question": "Who climbed it first?",
            "snippet": "Hillary and Tenzing.",
            "title": "First",
            "link": "https://d.example",
        }
    ],
}
GOOGLE = {
    "kind": "customsearch#search",
    "searchInformation": {"totalResults": "2"},
    "items": [
        {"kind": "customsearch#result", "title": "Everest", "link": "https://a.example", "snippet": "High."},
        {"kind": "customsearch#result", "title": "Peaks", "link": "https://b.example", "snippet": "Many."},
    ],
}


def serper(url: str) -> OnlineBackend:
    return SerperBackend(HTTP, api_key=KEY, base_url=url)


def serpapi(url: str) -> OnlineBackend:
    return SerpAPIBackend(HTTP, api_key=KEY, base_url=url)


def google(url: str) -> OnlineBackend:
    return GoogleBackend(HTTP, api_key=KEY, engine_id="cx1", base_url=url)


class Stub:
    """Gives one reply, and keeps what it was asked."""

    def __init__(self, reply: Any, code: int = 200) -> None:
        self.reply = reply
        self.code = code
        self.requests: list[tuple[str, str, dict[str, str], Any, str | None]] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.requests.append(
            (request.method, request.path, dict(request.query), body, request.headers.get("X-API-KEY"))
        )
        return web.json_response(self.reply, status=self.code)


def search(build: Callable[[str], OnlineBackend], stub: Stub, *queries: str, topk: int = 3) -> list[Any]:
    async def main() -> list[Any]:
        async with serving(stub) as url:
            backend = build(url)
            try:
                return await search_each(backend, queries or ["everest"], topk)
            finally:
                await backend.aclose()

    return asyncio.run(main())


def shown(found: list[Any]) -> list[tuple[str, str, str]]:
    return [(hit.passage.title, hit.passage.text, hit.passage.url) for hit in found]


def test_serper() -> None:
    stub = Stub(SERPER)
    (found,) = search(serper, stub, topk=4)
    assert stub.requests == [("POST", "/search", {}, {"q": "everest", "num": 4}, KEY)]
    assert shown(found) == [
        ("Mount Everest / Elevation", "8,849 m", ""),
        ("Mount Everest", "The highest mountain.", "https://en.example/Everest"),
        ("Everest", "It is 8,849 m high.", "https://a.example"),
        ("Peaks", "", "https://b.example"),
    ]
    assert [hit.score for hit in found] == sorted((hit.score for hit in found), reverse=True)


def test_serpapi() -> None:
    stub = Stub(SERPAPI)
    (found,) = search(serpapi, stub)
    query = {"api_key": KEY, "engine": "google", "q": "everest", "num": "3"}
    assert stub.requests == [("GET", "/search", query, None, None)]
    assert shown(found) == [
        ("Elevation", "8,849 m", "https://x.example"),
        ("Everest", "It is high.", "https://a.example"),
        ("First", "Hillary and Tenzing.", "https://d.example"),
    ]


def test_google() -> None:
    stub = Stub(GOOGLE)
    (found,) = search(google, stub, topk=20)
    query = {"key": KEY, "cx": "cx1", "q": "everest", "num": "10"}
    assert stub.requests == [("GET", "/customsearch/v1", query, None, None)]
    assert shown(found) == [("Everest", "High.", "https://a.example"), ("Peaks", "Many.", "https://b.example")]


def test_each_query_is_a_request_of_its_own() -> None:
    stub = Stub(SERPER)
    assert len(search(serper, stub, "a", "b", "c")) == 3
    assert sorted(body["q"] for _, _, _, body, _ in stub.requests) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("build", "reply"),
    [
        (serper, {"searchParameters": {"q": "q"}, "organic": []}),
        (serpapi, {"search_metadata": {}, "error": "Google hasn't returned any results for this query."}),
        (serpapi, {"organic_results": []}),
        (google, {"kind": "customsearch#search", "searchInformation": {"totalResults": "0"}}),
    ],
)
def test_nothing_found_is_an_empty_list(build: Callable[[str], OnlineBackend], reply: Any) -> None:
    assert search(build, Stub(reply)) == [[]]


def google_error(code: int, reason: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": "…", "errors": [{"reason": reason, "domain": "usageLimits"}]}}


@pytest.mark.parametrize(
    ("build", "code", "reply", "status"),
    [
        (serper, 403, {"message": "Unauthorized.", "statusCode": 403}, "http_4xx"),
        (serper, 400, {"message": "Not enough credits", "statusCode": 400}, "rate_limited"),
        (serper, 400, {"message": "Missing query parameter", "statusCode": 400}, "http_4xx"),
        (serper, 429, {"message": "Too many requests"}, "rate_limited"),
        (serper, 500, "oops", "http_5xx"),
        (serper, 200, {"message": "odd"}, "bad_reply"),
        (serper, 200, [], "bad_reply"),
        (serpapi, 401, {"error": "Invalid API key."}, "http_4xx"),
        (serpapi, 429, {"error": "Your account has run out of searches."}, "rate_limited"),
        (serpapi, 200, {"error": "Your account has run out of searches."}, "rate_limited"),
        (serpapi, 200, {"error": "Invalid API key."}, "http_4xx"),
        (serpapi, 200, {"error": "We couldn't get valid results for this search. Try later."}, "http_5xx"),
        (serpapi, 200, {"search_metadata": {}}, "bad_reply"),
        (serpapi, 200, {"organic_results": {"a": 1}}, "bad_reply"),
        (google, 400, google_error(400, "badRequest"), "http_4xx"),
        (google, 403, google_error(403, "accessNotConfigured"), "http_4xx"),
        (google, 403, google_error(403, "dailyLimitExceeded"), "rate_limited"),
        (google, 403, google_error(403, "quotaExceeded"), "rate_limited"),
        (google, 403, {"error": "no object"}, "http_4xx"),
        (google, 429, {"error": {"code": 429, "status": "RESOURCE_EXHAUSTED"}}, "rate_limited"),
        (google, 200, {}, "bad_reply"),
        (google, 200, None, "bad_reply"),
    ],
)
def test_failure_is_typed_and_holds_no_key(
    build: Callable[[str], OnlineBackend], code: int, reply: Any, status: str
) -> None:
    (error,) = search(build, Stub(reply, code))
    assert (error.status, KEY in str(error)) == (status, False)
    assert str(error).startswith(build("http://h").name)


@pytest.mark.parametrize("field", ["title", "link", "snippet"])
@pytest.mark.parametrize("value", [None, 7, {"a": 1}])
def test_odd_fields_of_a_result_do_no_harm(field: str, value: Any) -> None:
    result = {"title": "t", "link": "l", "snippet": "s", field: value}
    (found,) = search(serper, Stub({"organic": [result, "no object", None, {"title": "T", "snippet": "S"}]}))
    assert shown(found)[-1] == ("T", "S", "")
