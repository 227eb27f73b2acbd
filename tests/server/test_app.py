from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentic_rollout.config import build_settings
from agentic_rollout.errors import SettingsError, ToolError
from agentic_rollout.retrieval.index import Hit
from agentic_rollout.retrieval.rerank import LexicalReranker
from agentic_rollout.search.cache import CacheSettings
from agentic_rollout.search.pages import CorpusPages
from agentic_rollout.search.wire import hits_json, passage_json
from agentic_rollout.server.service import SearchService
from agentic_rollout.server.settings import ServerSettings
from server.serving import PASSAGES, PLACES, ScriptedBackend, get, post, rivers, search_server

UNCACHED = CacheSettings(cache_size=0)


def call(service: SearchService, path: str, body: Any, method: str = "POST") -> tuple[int, Any]:
    """One request without a socket; closes the service."""

    async def main() -> tuple[int, Any]:
        async def read() -> bytes:
            return body if isinstance(body, bytes) else json.dumps(body).encode()

        reply = await service.answer(method, path, None, read)
        await service.aclose()
        return reply.status, orjson.loads(reply.body)

    return asyncio.run(main())


def retrieve(body: Any, **changes: Any) -> tuple[int, Any]:
    return call(SearchService(rivers(), ServerSettings(**changes)), "/retrieve", body)


# /retrieve


def test_scores_are_given_when_asked_for() -> None:
    with search_server() as url:
        scored = post(f"{url}/retrieve", {"queries": ["Havel"], "topk": 1, "return_scores": True}).json()
        plain = post(f"{url}/retrieve", {"queries": ["Havel"], "topk": 1, "return_scores": False}).json()
    assert plain == {"result": [[passage_json(PASSAGES[1])]]}
    assert scored["result"][0][0]["document"] == passage_json(PASSAGES[1])
    assert scored["result"][0][0]["score"] > 0


@pytest.mark.parametrize("body", [{}, {"topk": None}, {"topk": 0}])
def test_topk_null_zero_or_missing_means_the_servers_own(body: dict[str, Any]) -> None:
    status, reply = retrieve({"queries": ["river"], **body}, topk=2)
    assert (status, len(reply["result"][0])) == (200, 2)


def test_more_hits_asked_for_than_exist_are_fewer_never_wrong_ones() -> None:
    status, reply = retrieve({"queries": ["river", "Tarn"], "topk": 100})
    assert status == 200
    assert [len(hits) for hits in reply["result"]] == [len(PASSAGES), 1]


def test_every_query_is_answered_in_its_place_and_a_blank_one_has_no_hits() -> None:
    status, reply = retrieve({"queries": ["Isk", "", "Tarn", " \n", "Isk", "quixotic"], "topk": 1})
    assert status == 200
    assert [[document["title"] for document in hits] for hits in reply["result"]] == [
        ["Isk river"],
        [],
        ["Tarn river"],
        [],
        ["Isk river"],
        [],
    ]


@pytest.mark.parametrize(
    ("body", "number"), [({"queries": []}, 0), ({"queries": "Isk"}, 1), ({"query": "Isk"}, 1), ({"query": ["Isk"]}, 1)]
)
def test_no_query_and_a_single_one_are_requests_too(body: dict[str, Any], number: int) -> None:
    status, reply = retrieve(body)
    assert (status, len(reply["result"])) == (200, number)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"\xff", b"null", b"[]", b'"queries"', b'{"queries": ["\\ud800"]}'),
        *({}, {"queries": None}, {"queries": 7}, {"queries": ["a", 7]}, {"queries": [["a"]]}, {"query": None}),
        *({"queries": ["a"], "topk": topk} for topk in (-1, 101, 1.5, "3", True, [3], 2**70)),
        *({"queries": ["a"], "return_scores": flag} for flag in (1, "true", [])),
        {"queries": ["a"] * 5},
        {"queries": ["a" * 21]},
        {"queries": ["a"], "topk_rerank": 2},
        {"queries": ["a"], "topk_retrieval": 2},
    ],
)
def test_body_that_is_no_request_is_refused_with_the_reason(body: Any) -> None:
    status, reply = retrieve(body, max_queries=4, max_query_chars=20)
    assert (status, reply["error"]) == (422, "bad_request")
    assert reply["detail"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["queries", "query", "topk", "topk_retrieval", "topk_rerank", "return_scores", "documents", "rerank_topk", "urls"]
)
DOCUMENTS = st.lists(st.lists(st.fixed_dictionaries({"contents": st.text()}) | JSON, max_size=2), max_size=3)


@settings(max_examples=200)
@given(
    path=st.sampled_from(["/retrieve", "/rerank", "/access"]),
    body=st.dictionaries(FIELDS, JSON | st.lists(st.text(), max_size=3) | DOCUMENTS, max_size=5)
    | JSON
    | st.binary(max_size=20),
)
def test_no_body_makes_the_server_fail(path: str, body: Any) -> None:
    service = SearchService(rivers(), ServerSettings(), reranker=LexicalReranker(), pages=CorpusPages(PASSAGES))
    status, reply = call(service, path, body)
    assert status in (200, 422)
    assert ("result" if status == 200 else "error") in reply


def test_requests_that_arrive_together_are_one_search() -> None:
    backend = ScriptedBackend()

    async def main() -> list[bytes]:
        service = SearchService(backend, ServerSettings(cache=UNCACHED))
        bodies = [orjson.dumps({"queries": [f"q{n}", f"r{n}"], "topk": 1 + n % 2}) for n in range(8)]

        async def ask(body: bytes) -> bytes:
            async def read() -> bytes:
                return body

            return (await service.answer("POST", "/retrieve", None, read)).body

        replies = await asyncio.gather(*map(ask, bodies))
        await service.aclose()
        return list(replies)

    replies = [orjson.loads(body)["result"] for body in asyncio.run(main())]
    assert [[hits[0]["id"] for hits in reply] for reply in replies] == [[f"q{n}", f"r{n}"] for n in range(8)]
    assert [(len(queries), topk) for queries, topk in backend.asked] == [(8, 1), (8, 2)]


def test_batches_are_no_larger_than_the_backend_gains_from() -> None:
    backend = ScriptedBackend(max_batch=4)
    status, reply = call(
        SearchService(backend, ServerSettings(cache=UNCACHED)), "/retrieve", {"queries": [str(n) for n in range(10)]}
    )
    assert (status, len(reply["result"])) == (200, 10)
    assert [len(queries) for queries, _ in backend.asked] == [4, 4, 2]


def test_answers_are_cached() -> None:
    backend = ScriptedBackend()
    with search_server(backend) as url:
        first, second = (post(f"{url}/retrieve", {"queries": ["a"]}).json() for _ in range(2))
        metrics = get(f"{url}/metrics").text
    assert first == second
    assert len(backend.asked) == 1
    assert 'agentic_search_cache_lookups_total{origin="memory"} 1.0' in metrics


# Failures


def failing(error: Exception) -> Callable[[str], list[Hit]]:
    def reply(query: str) -> list[Hit]:
        raise error

    return reply


@pytest.mark.parametrize(
    ("status", "code"),
    [
        *(("timeout", 504), ("refused", 502), ("disconnected", 502), ("http_4xx", 502), ("http_5xx", 502)),
        *(("bad_reply", 502), ("rate_limited", 503), ("unavailable", 503), ("error", 500), ("of my own", 500)),
    ],
)
def test_failure_of_the_backend_is_told_by_its_status(status: str, code: int) -> None:
    with search_server(ScriptedBackend(failing(ToolError("gone", status)))) as url:
        response = post(f"{url}/retrieve", {"queries": ["a"]})
        metrics = get(f"{url}/metrics").text
    known = status if status != "of my own" else "error"
    assert (response.status_code, response.json()) == (code, {"error": known, "detail": "gone"})
    assert ("Retry-After" in response.headers) == (code == 503)
    assert f'agentic_search_backend_failures_total{{status="{known}"}} 1.0' in metrics


def test_bug_of_the_backend_is_a_500_that_tells_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    with search_server(ScriptedBackend(failing(KeyError("secret")))) as url:
        response = post(f"{url}/retrieve", {"queries": ["a"]})
    assert (response.status_code, response.json()["error"]) == (500, "error")
    assert "secret" not in response.text
    assert "KeyError" in caplog.text


def test_wrong_number_of_results_is_a_failure_and_no_ones_wrong_answer() -> None:
    class Short(ScriptedBackend):
        async def search(self, queries: Any, topk: int) -> list[list[Hit]]:
            return (await super().search(queries, topk))[1:]

    status, reply = call(SearchService(Short(), ServerSettings()), "/retrieve", {"queries": ["a", "b"]})
    assert (status, reply["error"]) == (502, "bad_reply")


def test_request_beyond_its_deadline_is_a_504() -> None:
    with search_server(ScriptedBackend(delay_s=30.0), ServerSettings(deadline_s=0.1)) as url:
        response = post(f"{url}/retrieve", {"queries": ["a"]})
        waiting = get(f"{url}/health").json()["waiting"]
    assert (response.status_code, response.json()["error"], waiting) == (504, "timeout", 0)


def test_full_queue_refuses_at_once_says_when_to_come_back_and_recovers() -> None:
    limits = ServerSettings(max_queue=4, max_queries=4, retry_after_s=7)
    with search_server(ScriptedBackend(delay_s=0.5), limits) as url:
        accepted: list[int] = []
        queries = {"queries": ["a", "b", "c"]}
        first = threading.Thread(target=lambda: accepted.append(post(f"{url}/retrieve", queries).status_code))
        first.start()
        while get(f"{url}/health").json()["waiting"] != 3:
            pass
        refused = post(f"{url}/retrieve", {"queries": ["d", "e"]})
        fits = post(f"{url}/retrieve", {"queries": ["d"]})
        first.join()
        after = post(f"{url}/retrieve", {"queries": ["e", "f"]})
    assert (refused.status_code, refused.json()["error"], refused.headers["Retry-After"]) == (503, "overloaded", "7")
    assert (accepted, fits.status_code, after.status_code) == ([200], 200, 200)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/retrieve", 405), ("POST", "/health", 405), ("POST", "/", 404), ("POST", "/retrieve/", 404)],
)
def test_wrong_path_or_method_is_told_in_json(method: str, path: str, status: int) -> None:
    code, reply = call(SearchService(rivers(), ServerSettings()), path, {}, method)
    assert code == status
    assert set(reply) == {"error", "detail"}


@pytest.mark.parametrize("path", ["/rerank", "/access"])
def test_route_that_this_server_has_not_is_told_in_json(path: str) -> None:
    status, reply = call(SearchService(rivers(), ServerSettings()), path, {"queries": [], "urls": []})
    assert (status, reply["error"]) == (404, "not_found")


@pytest.mark.parametrize("compressed", [False, True])
def test_body_too_large_is_a_413_compressed_or_not(compressed: bool) -> None:
    body = b'{"queries": ["' + b"a" * 100_000 + b'"]}'
    headers = {"Content-Encoding": "gzip"} if compressed else {}
    with search_server(settings=ServerSettings(max_body_bytes=10_000)) as url:
        response = post(f"{url}/retrieve", gzip.compress(body) if compressed else body, headers=headers)
    assert (response.status_code, response.json()["error"]) == (413, "too_large")


def test_compressed_body_is_read_and_a_damaged_one_is_no_failure_of_the_server() -> None:
    good = gzip.compress(b'{"queries": ["Isk"]}')
    with search_server() as url:
        replies = [
            post(f"{url}/retrieve", body, headers={"Content-Encoding": "gzip"}) for body in (good, b"not gzip at all")
        ]
    assert [reply.status_code for reply in replies] == [200, 422]


def test_client_that_hangs_up_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def main(url: str) -> int:
        host, _, port = url.removeprefix("http://").partition(":")
        for sent in (
            b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
            b"POST /retr",
            b"\x00\x01\x02\r\n\r\n",
        ):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        async with aiohttp.ClientSession() as session, session.post(f"{url}/retrieve", json={"query": "Isk"}) as reply:
            return reply.status

    with search_server() as url:
        assert asyncio.run(main(url)) == 200
    assert "Traceback" not in caplog.text


# Reranking


def test_server_with_a_reranker_reranks_for_clients_that_know_of_none() -> None:
    backend = ScriptedBackend(lambda query: [Hit(passage, 1.0) for passage in PASSAGES])
    with search_server(backend, ServerSettings(rerank_candidates=4), reranker=LexicalReranker()) as url:
        reply = post(f"{url}/retrieve", {"queries": ["Tarn"], "topk": 2, "return_scores": True}).json()
    assert backend.asked == [(["Tarn"], 4)]
    assert reply["result"][0][0]["document"]["title"] == "Tarn river"
    assert len(reply["result"][0]) == 2
    assert reply["result"][0][0]["score"] > reply["result"][0][1]["score"]


def test_reranking_form_sets_both_numbers() -> None:
    backend = ScriptedBackend(lambda query: [Hit(passage, 1.0) for passage in PASSAGES])
    service = SearchService(backend, ServerSettings(), reranker=LexicalReranker())
    body = {"queries": ["Isk", " "], "topk_retrieval": 50, "topk_rerank": 1}
    status, reply = call(service, "/retrieve", body)
    assert (status, backend.asked) == (200, [(["Isk"], 50)])
    assert [[document["title"] for document in hits] for hits in reply["result"]] == [["Isk river"], []]


@pytest.mark.parametrize("scored", [False, True])
def test_rerank_takes_what_retrieve_gives(scored: bool) -> None:
    documents = [hits_json([Hit(passage, 0.0) for passage in PASSAGES], return_scores=scored)] * 2
    body = {"queries": ["Rudun", "Havel"], "documents": documents, "rerank_topk": 2, "return_scores": scored}
    with search_server(reranker=LexicalReranker()) as url:
        reply = post(f"{url}/rerank", body).json()
    first = [hits[0]["document"] if scored else hits[0] for hits in reply["result"]]
    assert first == [passage_json(PASSAGES[2]), passage_json(PASSAGES[1])]
    assert [len(hits) for hits in reply["result"]] == [2, 2]


@pytest.mark.parametrize(
    "documents", [None, [], [[]], [[], 7], [[], [7]], [[], [{"id": 1}]], [[{"contents": "a"}] * 9, []]]
)
def test_documents_that_are_none_are_refused(documents: Any) -> None:
    service = SearchService(rivers(), ServerSettings(max_documents=8), reranker=LexicalReranker())
    status, reply = call(service, "/rerank", {"queries": ["a", "b"], "documents": documents})
    assert (status, reply["error"]) == (422, "bad_request")
    assert "documents" in reply["detail"]


# /access


def test_pages_are_given_in_their_places_and_a_missing_one_is_null_with_the_reason() -> None:
    urls = [PASSAGES[1].url, "https://rivers.test/nowhere", PASSAGES[0].url]
    with search_server(pages=CorpusPages(PASSAGES)) as url:
        reply = post(f"{url}/access", {"urls": urls}).json()
        metrics = get(f"{url}/metrics").text
    assert [page and (page["url"], page["title"]) for page in reply["result"]] == [
        (urls[0], "Havel river"),
        None,
        (urls[2], "Zomel river"),
    ]
    assert reply["result"][0]["contents"] == PASSAGES[1].contents
    assert reply["errors"] == [None, {"error": "bad_arguments", "detail": "there is no page at this address"}, None]
    assert "backend_failures_total{" not in metrics


@pytest.mark.parametrize("body", [{}, {"urls": None}, {"urls": [7]}, {"urls": ["a"] * 3}])
def test_addresses_that_are_none_are_refused(body: Any) -> None:
    service = SearchService(rivers(), ServerSettings(max_urls=2), pages=CorpusPages(PASSAGES))
    status, reply = call(service, "/access", body)
    assert (status, reply["error"]) == (422, "bad_request")


# Token, health, metrics


def test_token_guards_everything_but_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARCH_TOKEN", "s3cret")
    with search_server(settings=ServerSettings(token_env="SEARCH_TOKEN")) as url:
        attempts = [None, "Bearer wrong", "Bearer", "s3cret", "Basic s3cret", "Bearer s3cret", "bearer s3cret"]
        codes = []
        for attempt in attempts:
            headers = {} if attempt is None else {"Authorization": attempt}
            codes.append(post(f"{url}/retrieve", {"queries": ["Isk"]}, headers=headers).status_code)
        metrics, health = get(f"{url}/metrics"), get(f"{url}/health")
        odd = post(f"{url}/retrieve", {"queries": []}, headers={"Authorization": "Bearer é".encode()})
    assert codes == [401, 401, 401, 401, 401, 200, 200]
    assert (metrics.status_code, health.status_code, odd.status_code) == (401, 200, 401)
    assert metrics.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("value", [None, "", "  "])
def test_token_that_is_not_there_stops_the_server_rather_than_opening_it(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SEARCH_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("SEARCH_TOKEN", value)
    with pytest.raises(SettingsError, match="SEARCH_TOKEN"):
        SearchService(ScriptedBackend(), ServerSettings(token_env="SEARCH_TOKEN"))


def test_health_says_what_is_served() -> None:
    with search_server(pages=CorpusPages(PASSAGES)) as url:
        response = get(f"{url}/health")
    assert response.status_code == 200
    about = response.json()
    assert about.pop("version")
    assert about == {
        "status": "ready",
        "waiting": 0,
        "backend": "embedded",
        "passages": len(PASSAGES),
        "reranker": False,
        "pages": True,
    }


def test_metrics_count_requests_queries_batches_and_time() -> None:
    with search_server() as url:
        post(f"{url}/retrieve", {"queries": ["Isk", "Tarn"]})
        post(f"{url}/retrieve", {"queries": ["Havel", ""]})
        post(f"{url}/retrieve", b"{")
        post(f"{url}/no/such/path", b"{")
        response = get(f"{url}/metrics")
    assert response.headers["Content-Type"].startswith("text/plain")
    for line in (
        'agentic_search_requests_total{route="/retrieve",status="200"} 2.0',
        'agentic_search_requests_total{route="/retrieve",status="422"} 1.0',
        'agentic_search_requests_total{route="unknown",status="404"} 1.0',
        'agentic_search_request_seconds_count{route="/retrieve"} 3.0',
        "agentic_search_queries_total 4.0",
        "agentic_search_queue_queries 0.0",
        "agentic_search_batch_queries_sum 3.0",
        'agentic_search_cache_lookups_total{origin="backend"} 3.0',
    ):
        assert line in response.text.splitlines()
    assert "process_resident_memory_bytes" in response.text


def test_two_servers_of_one_process_count_apart() -> None:
    with search_server() as url, search_server() as other:
        post(f"{url}/retrieve", {"queries": ["Isk"]})
        assert "agentic_search_queries_total 1.0" in get(f"{url}/metrics").text
        assert "agentic_search_queries_total 0.0" in get(f"{other}/metrics").text


def test_server_closes_what_it_serves() -> None:
    backend = ScriptedBackend()
    with search_server(backend):
        assert not backend.closed
    assert backend.closed


def test_64_clients_at_once_get_their_own_answers_and_no_error() -> None:
    async def client(session: aiohttp.ClientSession, url: str, number: int, until: float) -> int:
        asked = 0
        while asyncio.get_running_loop().time() < until:
            place = PLACES[(number + asked) % len(PLACES)]
            queries = [f"{place} {number % 7}{asked}"]
            async with session.post(f"{url}/retrieve", json={"queries": queries, "topk": 1}) as response:
                assert response.status == 200
                assert (await response.json())["result"][0][0]["title"] == f"{place} river"
            asked += 1
        return asked

    async def main(url: str) -> list[int]:
        until = asyncio.get_running_loop().time() + 2.0
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as session:
            return list(await asyncio.gather(*(client(session, url, number, until) for number in range(64))))

    with search_server() as url:
        asked = asyncio.run(main(url))
        metrics = get(f"{url}/metrics").text
    assert min(asked) > 0
    assert f'agentic_search_requests_total{{route="/retrieve",status="200"}} {sum(asked)}.0' in metrics


@pytest.mark.parametrize(
    "limits", [{"topk": 0}, {"topk": 200}, {"rerank_candidates": 101}, {"max_queue": 10}, {"deadline_s": 0}]
)
def test_limits_that_contradict_each_other_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        build_settings(ServerSettings, limits, key="serve-search")
