from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import aiohttp
import pytest
import requests

from agentic_rollout.errors import AgenticRolloutError, CorpusError, SettingsError
from agentic_rollout.retrieval.index import Hit
from agentic_rollout.search.build import BackendSettings
from agentic_rollout.search.web import WebSettings
from agentic_rollout.server import cli
from agentic_rollout.server.build import open_backend, open_pages
from agentic_rollout.server.command import warn_if_open
from agentic_rollout.server.settings import ServerSettings
from server.serving import PASSAGES, ScriptedBackend, get, post, search_server, server_command


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    lines = (json.dumps({"id": p.id, "contents": p.contents, "url": p.url}) for p in PASSAGES)
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def command(*arguments: object, **environment: str) -> AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    """The real command in a process of its own; gives it and its address."""
    return server_command("serve-search", *arguments, **environment)


def test_command_serves_and_ends_cleanly(corpus: Path) -> None:
    with command(corpus, "--port", "0", "--pages", corpus, "--topk", "2") as (process, url):
        hits = post(f"{url}/retrieve", {"queries": ["the river Havel"]}).json()["result"][0]
        page = post(f"{url}/access", {"urls": [PASSAGES[1].url]}).json()["result"][0]
        health = get(f"{url}/health").json()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    assert (hits[0]["title"], len(hits), page["contents"]) == ("Havel river", 2, PASSAGES[1].contents)
    assert (health["status"], health["passages"], health["pages"]) == ("ready", len(PASSAGES), True)
    assert (process.returncode, errors) == (0, "")
    assert url.startswith("http://127.0.0.1:")


def test_command_asks_for_its_token(corpus: Path) -> None:
    with command(corpus, "--port", "0", "--token-env", "TOKEN", TOKEN="s3cret") as (_, url):
        codes = [
            post(f"{url}/retrieve", {"queries": ["Isk"]}, headers=headers).status_code
            for headers in ({}, {"Authorization": "Bearer s3cret"})
        ]
    assert codes == [401, 200]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_answers_what_was_accepted_and_says_draining_meanwhile(number: signal.Signals) -> None:
    slow = ScriptedBackend(delay_s=1.0)
    with search_server(slow) as behind, command(behind, "--port", "0") as (process, url), requests.Session() as kept:
        assert kept.get(f"{url}/health").status_code == 200
        replies: list[requests.Response] = []
        client = threading.Thread(target=lambda: replies.append(post(f"{url}/retrieve", {"queries": ["a"]})))
        client.start()
        wait_until(lambda: bool(slow.asked))
        process.send_signal(number)
        time.sleep(0.3)
        draining = kept.get(f"{url}/health")
        with pytest.raises(requests.ConnectionError):
            get(f"{url}/health")
        client.join()
        _, errors = process.communicate(timeout=20)
    assert (draining.status_code, draining.json()["status"]) == (503, "draining")
    assert draining.headers["Connection"] == "close"
    assert [(reply.status_code, reply.json()["result"][0][0]["title"]) for reply in replies] == [(200, "a")]
    assert (process.returncode, errors) == (0, "")


def test_stop_waits_no_longer_than_it_is_told() -> None:
    slow = ScriptedBackend(delay_s=20.0)
    with search_server(slow) as behind, command(behind, "--port", "0", "--drain", "0.2") as (process, url):
        client = threading.Thread(target=ask_in_vain, args=(url,))
        client.start()
        wait_until(lambda: bool(slow.asked))
        process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        _, errors = process.communicate(timeout=20)
        took_s = time.monotonic() - started
        client.join()
    assert took_s < 10
    assert "stopped with requests unanswered" in errors
    assert process.returncode == 0


def test_clients_lose_no_answer_to_a_stop(corpus: Path) -> None:
    """Under load, every request that was sent is answered, or its connection refused before it was."""
    answered: list[int] = []
    lost: list[Exception] = []

    async def client(session: aiohttp.ClientSession, url: str) -> None:
        while True:
            try:
                async with session.post(f"{url}/retrieve", json={"queries": ["Isk"]}) as response:
                    answered.append(response.status)
                    await response.read()
            except aiohttp.ClientConnectorError:
                return
            except aiohttp.ClientError as error:
                lost.append(error)
                return

    async def main(process: subprocess.Popen[str], url: str) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=16)) as session:
            clients = [asyncio.create_task(client(session, url)) for _ in range(16)]
            await asyncio.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            await asyncio.gather(*clients)

    with command(corpus, "--port", "0") as (process, url):
        asyncio.run(main(process, url))
        process.wait(20)
    assert set(answered) == {200}
    assert len(answered) > 16
    assert (lost, process.returncode) == ([], 0)


def ask_in_vain(url: str) -> None:
    with contextlib.suppress(requests.ConnectionError):
        post(f"{url}/retrieve", {"queries": ["a"]})


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def options(*arguments: str | Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args([str(argument) for argument in arguments])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--topk", "0"],
        ["--max-queue", "0"],
        ["--threads", "0"],
        ["--port", "70000"],
        ["--host", "203.0.113.1"],
        ["--token-env", "NOT_SET_ANYWHERE"],
        ["--pages", "/no/such/file"],
        ["--rerank", "/no/such/model"],
    ],
)
def test_wrong_option_is_said_and_not_a_traceback(arguments: list[str], corpus: Path) -> None:
    with pytest.raises(AgenticRolloutError):
        cli.run(options(corpus, *arguments))


def test_port_in_use_is_said(corpus: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"127.0.0.1:{port}"):
            cli.run(options(corpus, "--port", str(port)))


@pytest.mark.parametrize(
    ("host", "token", "warned"),
    [
        *(("127.0.0.1", None, False), ("localhost", None, False), ("::1", None, False)),
        *(("0.0.0.0", None, True), ("::", None, True), ("0.0.0.0", "NAME", False)),
    ],
)
def test_address_open_to_others_without_a_token_is_warned_of(
    host: str, token: str | None, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_open(host, ServerSettings(token_env=token))
    assert ("without a token" in caplog.text) == warned


def test_several_indexes_are_fused(corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_bytes(corpus.read_bytes())
    backend = open_backend([str(corpus), str(other)], BackendSettings())

    async def main() -> list[list[Hit]]:
        hits = await backend.search(["Tarn"], 3)
        await backend.aclose()
        return hits

    (hits,) = asyncio.run(main())
    assert [(hit.passage.title, hit.score) for hit in hits] == [("Tarn river", pytest.approx(2 / 61))]


def test_online_source_is_not_fused(corpus: Path) -> None:
    with pytest.raises(SettingsError, match="serper"):
        open_backend([str(corpus), "serper"], BackendSettings())


def test_pages_come_from_the_first_source_that_has_them(corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    rows = [{"id": 1, "contents": '"x"\nother', "url": url} for url in (PASSAGES[0].url, "https://other.test/")]
    other.write_text("\n".join(map(json.dumps, rows)))
    pages = open_pages([str(corpus), str(other)], WebSettings())
    assert pages is not None
    titles = [asyncio.run(pages.fetch(url)).title for url in (PASSAGES[0].url, "https://other.test/")]
    assert titles == ["Zomel river", "x"]


def test_pages_of_a_corpus_without_addresses_are_refused_at_the_start(tmp_path: Path) -> None:
    bare = tmp_path / "bare.jsonl"
    bare.write_text('{"id": 1, "contents": "a"}')
    with pytest.raises(CorpusError, match="url"):
        open_pages([str(bare)], WebSettings())
