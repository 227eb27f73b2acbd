"""What other systems' clients send and read, against the real server.

verl's and skyrl-gym's clients are their own code; of those that cannot be installed, the request is sent as they send
it, and the fields are read that they read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
import requests
from skyrl_gym.tools.search import SearchToolGroup

from agentic_rollout.retrieval.rerank import LexicalReranker
from agentic_rollout.search.pages import CorpusPages
from lines import verl06
from server.serving import PASSAGES, post, search_server

ZOMEL = "The river of Zomel is R0."


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with search_server(pages=CorpusPages(PASSAGES)) as url:
        yield url


@pytest.fixture(scope="module")
def reranking_url() -> Iterator[str]:
    with search_server(reranker=LexicalReranker()) as url:
        yield url


# verl


@verl06  # verl 0.9 has no search client any more
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of verl's imports
def test_verls_call_search_api(url: str) -> None:
    from verl.tools.utils.search_r1_like_utils import call_search_api, perform_single_search_batch

    for return_scores in (True, False):
        reply, error = call_search_api(f"{url}/retrieve", ["Zomel", "Tarn"], topk=2, return_scores=return_scores)
        assert (error, len(reply["result"])) == (None, 2)
    text, about = perform_single_search_batch(f"{url}/retrieve", ["Zomel", "quixotic"], topk=1)
    assert (about["status"], about["total_results"]) == ("success", 1)
    assert json.loads(text)["result"] == f'Doc 1 (Title: "Zomel river")\n{ZOMEL}\n---\n'


# skyrl-gym


def test_skyrl_gyms_search_tool(url: str) -> None:
    tool = SearchToolGroup(search_url=f"{url}/retrieve", topk=1, log_requests=False)
    try:
        assert json.loads(tool.search(" Zomel ")) == {"result": f'Doc 1: "Zomel river"\n{ZOMEL}\n'}
        nothing = json.loads(tool.search("quixotic"))["result"]
    finally:
        tool.session.close()
        SearchToolGroup._session_pool.clear()
    assert nothing == ""


# Search-R1


def search_r1(url: str, queries: list[str], **changes: Any) -> list[str]:
    """`batch_search` of its training loop and of its inference script, and how they lay documents out."""
    payload = {"queries": queries, "topk": 3, "return_scores": True, **changes}
    found = requests.post(f"{url}/retrieve", json=payload).json()["result"]
    return [
        "".join(
            f"Doc {rank}(Title: {contents.partition(chr(10))[0]}) {contents.partition(chr(10))[2]}\n"
            for rank, contents in enumerate((entry["document"]["contents"] for entry in hits), start=1)
        )
        for hits in found
    ]


@pytest.mark.parametrize("topk", [1, None, 0])
def test_search_r1s_batch_search(url: str, topk: int | None) -> None:
    shown = search_r1(url, ["Zomel", "Tarn"], topk=topk)
    assert shown == [
        f'Doc 1(Title: "Zomel river") {ZOMEL}\n',
        'Doc 1(Title: "Tarn river") The river of Tarn is R3.\n',
    ]


def test_search_r1s_loop_sends_no_query_when_no_row_searches(url: str) -> None:
    assert search_r1(url, []) == []


def test_search_r1s_client_without_scores(url: str) -> None:
    body = {"queries": ["Zomel"], "topk": 5, "return_scores": False}
    documents = requests.post(f"{url}/retrieve", json=body).json()["result"][0]
    assert [(document["id"], document["contents"]) for document in documents] == [("0", PASSAGES[0].contents)]


def test_search_r1s_loop_at_a_server_that_reranks(reranking_url: str) -> None:
    assert search_r1(reranking_url, ["Zomel river"], topk=1) == [f'Doc 1(Title: "Zomel river") {ZOMEL}\n']
    shown = search_r1(reranking_url, ["river of Tarn"], topk_retrieval=5, topk_rerank=1)
    assert shown == ['Doc 1(Title: "Tarn river") The river of Tarn is R3.\n']


def test_search_r1s_request_of_a_reranking_of_what_was_retrieved(reranking_url: str) -> None:
    queries = ["river of Isk", "river of Havel"]
    body = {"queries": queries, "topk": 10, "return_scores": True}
    retrieved = requests.post(f"{reranking_url}/retrieve", json=body).json()
    body = {"queries": queries, "documents": retrieved["result"], "rerank_topk": 3, "return_scores": True}
    reranked = requests.post(f"{reranking_url}/rerank", json=body).json()["result"]
    assert [hits[0]["document"]["id"] for hits in reranked] == ["4", "1"]
    assert [len(hits) for hits in reranked] == [3, 3]
    assert all(isinstance(entry["score"], float) for hits in reranked for entry in hits)


# ASearcher and AReaL


def asked(url: str, path: str, body: dict[str, Any]) -> Any:
    """aiohttp, a session for each request, `raise_for_status`, and JSON by its content type."""

    async def main() -> Any:
        async with aiohttp.ClientSession() as session:
            timeout = aiohttp.ClientTimeout(total=120, sock_connect=120)
            async with session.post(f"{url}{path}", json=body, timeout=timeout) as response:
                response.raise_for_status()
                return await response.json()

    return asyncio.run(main())


@pytest.mark.parametrize("topk", [1, 3])
def test_asearchers_search(url: str, topk: int) -> None:
    reply = asked(url, "/retrieve", {"queries": ["Zomel"], "topk": topk, "return_scores": False})
    documents = [[(r["wikipedia_title"], r["contents"], r["url"]) for r in result] for result in reply["result"]]
    assert documents == [[("Zomel river", PASSAGES[0].contents, PASSAGES[0].url)]]


def test_asearchers_access(url: str) -> None:
    reply = asked(url, "/access", {"urls": [PASSAGES[0].url, "https://rivers.test/nowhere"]})
    pages = [result["contents"] if result is not None else "" for result in reply["result"]]
    assert pages == [PASSAGES[0].contents, ""]


def test_areals_search_with_scores(url: str) -> None:
    reply = asked(url, "/retrieve", {"queries": ["Zomel"], "topk": 3, "return_scores": True})
    document = reply["result"][0][0]["document"]
    assert (document["wikipedia_title"], document["url"]) == ("Zomel river", PASSAGES[0].url)
    assert document["contents"] == PASSAGES[0].contents


def test_every_client_finds_its_fields_in_one_and_the_same_document(url: str) -> None:
    (document,) = post(f"{url}/retrieve", {"queries": ["Zomel"]}).json()["result"][0]
    assert document == {
        "id": "0",
        "contents": f'"Zomel river"\n{ZOMEL}',
        "title": "Zomel river",
        "text": ZOMEL,
        "url": "https://rivers.test/Zomel",
        "wikipedia_title": "Zomel river",
    }
