from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from aiohttp import web

from agentic_rollout.errors import SettingsError, ToolError
from agentic_rollout.search.http import HttpClient, HttpSettings, parse_retry_after, split_url
from search.services import serving, talking, unused_port

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]

SECRET = "k3y-of-the-service"


def settings(**changes: Any) -> HttpSettings:
    quick = {"total_timeout_s": 5.0, "read_timeout_s": 2.0, "backoff_s": 0.01, "breaker_failures": 1000}
    return HttpSettings(**{**quick, **changes})


class Replies:
    """A service that gives one reply after the other, the last one for ever."""

    def __init__(self, *replies: Callable[[], web.StreamResponse]) -> None:
        self.replies = replies
        self.requests: list[web.Request] = []
        self.times: list[float] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        reply = self.replies[min(len(self.requests), len(self.replies) - 1)]
        self.requests.append(request)
        self.times.append(time.monotonic())
        return reply()


def good() -> web.Response:
    return web.json_response({"answer": 42})


def coded(code: int, **headers: str) -> Callable[[], web.Response]:
    return lambda: web.json_response({"detail": SECRET}, status=code, headers=headers)


def sent(body: bytes) -> Callable[[], web.Response]:
    return lambda: web.Response(body=body, content_type="application/json")


async def asked(client: HttpClient) -> Any:
    """The reply, or the status of the failure."""
    try:
        return await client.request_json("POST", "/ask", json={"q": "é"})
    except ToolError as error:
        return error.status


def ask(service: Replies, **changes: Any) -> tuple[Any, HttpClient]:
    async def main() -> tuple[Any, HttpClient]:
        async with serving(service) as url:
            client = HttpClient("library", url, settings(**changes))
            try:
                return await asked(client), client
            finally:
                await client.aclose()

    return asyncio.run(main())


# What comes back


def test_reply_is_its_json_and_is_counted() -> None:
    reply, client = ask(Replies(good))
    assert (reply, client.outcomes, client.attempts) == ({"answer": 42}, {"ok": 1}, {"ok": 1})


@pytest.mark.parametrize(
    ("failing", "status", "attempts"),
    [
        (coded(400), "http_4xx", 1),
        (coded(401), "http_4xx", 1),
        (coded(422), "http_4xx", 1),
        (coded(429), "rate_limited", 3),
        (coded(500), "http_5xx", 3),
        (coded(501), "http_5xx", 1),
        (coded(502), "http_5xx", 3),
        (coded(503), "http_5xx", 3),
        (coded(504), "http_5xx", 3),
        (coded(302, Location="http://127.0.0.1:9/"), "bad_reply", 1),
        (sent(b'{"answer": 4'), "bad_reply", 3),
        (sent(b"<html>busy</html>"), "bad_reply", 3),
        (sent(b""), "bad_reply", 3),
        (sent(b'"' + b"x" * 5000 + b'"'), "bad_reply", 1),
    ],
)
def test_failure_is_typed_and_tried_again_only_where_that_may_help(
    failing: Callable[[], web.Response], status: str, attempts: int
) -> None:
    outcome, client = ask(Replies(failing), attempts=3, max_reply_bytes=4096)
    assert (outcome, client.outcomes, client.attempts) == (status, {status: 1}, {status: attempts})


@pytest.mark.parametrize("failing", [coded(500), coded(503), coded(429), sent(b"[")])
def test_passing_failure_is_retried_until_it_has_passed(failing: Callable[[], web.Response]) -> None:
    reply, client = ask(Replies(failing, failing, good))
    assert (reply, client.outcomes, client.attempts["ok"]) == ({"answer": 42}, {"ok": 1}, 1)
    assert client.attempts.total() == 3


def test_what_parse_refuses_counts_as_the_outcome_and_is_retried() -> None:
    def parse(reply: Any) -> Any:
        if reply["answer"] != 42:
            raise ToolError("wrong answer", "bad_reply")
        return reply["answer"]

    async def main() -> tuple[int, HttpClient]:
        async with serving(Replies(sent(b'{"answer": 41}'), good)) as url:
            client = HttpClient("library", url, settings())
            answer = await client.request_json("GET", "/", parse=parse)
            await client.aclose()
            return answer, client

    answer, client = asyncio.run(main())
    assert (answer, client.attempts) == (42, {"bad_reply": 1, "ok": 1})


def talk_to(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]], **changes: Any
) -> Any:
    async def main() -> tuple[Any, dict[str, int], float]:
        async with talking(talk) as url:
            client = HttpClient("library", url, settings(attempts=2, **changes))
            start = time.monotonic()
            outcome = await asked(client)
            await client.aclose()
            return outcome, dict(client.attempts), time.monotonic() - start

    return asyncio.run(main())


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.transport.abort()


async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"answer"')
    await writer.drain()


async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"220 mail.example ESMTP\r\n\r\n")


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
    while not writer.is_closing():
        writer.write(b" ")
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("talk", "status"), [(hang_up, "disconnected"), (break_off, "disconnected"), (babble, "bad_reply")]
)
def test_broken_connection_is_typed_and_retried(talk: Talk, status: str) -> None:
    outcome, attempts, _ = talk_to(talk)
    assert (outcome, attempts) == (status, {status: 2})


def test_silence_ends_with_the_read_deadline() -> None:
    outcome, attempts, took_s = talk_to(hang, read_timeout_s=0.2)
    assert (outcome, attempts) == ("timeout", {"timeout": 2})
    assert 0.4 <= took_s < 4.0


@pytest.mark.parametrize("talk", [hang, drip])
def test_total_deadline_ends_all(talk: Talk) -> None:
    outcome, attempts, took_s = talk_to(talk, total_timeout_s=0.4)
    assert (outcome, attempts) == ("timeout", {"timeout": 1})
    assert 0.4 <= took_s < 2.0


def test_nobody_listening_is_refused() -> None:
    async def main() -> tuple[Any, HttpClient]:
        client = HttpClient("library", f"http://127.0.0.1:{unused_port()}", settings(attempts=2))
        outcome = await asked(client)
        await client.aclose()
        return outcome, client

    outcome, client = asyncio.run(main())
    assert (outcome, client.attempts) == ("refused", {"refused": 2})


# Pauses


def test_retry_after_is_honoured() -> None:
    service = Replies(coded(503, **{"Retry-After": "1"}), good)
    reply, _ = ask(service)
    assert reply == {"answer": 42}
    assert service.times[1] - service.times[0] >= 1.0


def test_pause_that_would_outlast_the_deadline_is_not_begun() -> None:
    start = time.monotonic()
    outcome, client = ask(Replies(coded(429, **{"Retry-After": "60"})))
    assert (outcome, client.attempts) == ("rate_limited", {"rate_limited": 1})
    assert time.monotonic() - start < 4.0


def test_retry_cut_short_by_the_deadline_leaves_the_failure_before_it() -> None:
    class Stalling(Replies):
        async def __call__(self, request: web.Request) -> web.StreamResponse:
            if self.requests:
                await asyncio.sleep(5.0)
            return await super().__call__(request)

    outcome, client = ask(Stalling(coded(500)), total_timeout_s=1.0)
    assert (outcome, client.outcomes) == ("http_5xx", {"http_5xx": 1})
    assert client.attempts == {"http_5xx": 1, "timeout": 1}


def test_retry_after_is_read_as_seconds_or_date() -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert parse_retry_after("7") == 7.0
    assert 28.0 < (parse_retry_after(date) or 0.0) <= 30.0
    assert parse_retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert parse_retry_after("Wed, 21 Oct 2015 07:28:00 -0000") == 0.0
    assert [parse_retry_after(value) for value in (None, "", "soon", "-1", "1e9")] == [None] * 5


# Limits


class Gauge(Replies):
    """Counts the requests being answered at a time."""

    now = most = 0

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02)
        self.now -= 1
        return await super().__call__(request)


def ask_many(service: Replies, count: int, **changes: Any) -> tuple[list[Any], float]:
    async def main() -> tuple[list[Any], float]:
        async with serving(service) as url:
            client = HttpClient("library", url, settings(**changes))
            start = time.monotonic()
            outcomes = await asyncio.gather(*(asked(client) for _ in range(count)))
            await client.aclose()
            return outcomes, time.monotonic() - start

    return asyncio.run(main())


def test_no_more_requests_are_in_flight_than_allowed() -> None:
    gauge = Gauge(good)
    outcomes, _ = ask_many(gauge, 20, max_concurrency=4)
    assert (outcomes, gauge.most) == ([{"answer": 42}] * 20, 4)


def test_requests_are_no_more_frequent_than_allowed() -> None:
    outcomes, took_s = ask_many(Replies(good), 21, rate_per_s=20.0)
    assert outcomes == [{"answer": 42}] * 21
    assert 0.95 <= took_s < 3.0


@pytest.mark.parametrize("limit", [{"max_concurrency": 1}, {"rate_per_s": 5.0}])
def test_waiting_for_a_limit_counts_towards_the_deadline(limit: dict[str, Any]) -> None:
    outcomes, took_s = ask_many(Gauge(good), 200, total_timeout_s=1.0, **limit)
    assert {"answer": 42} in outcomes
    assert "timeout" in outcomes
    assert took_s < 3.0


# The breaker


async def outcome_and_time(client: HttpClient) -> tuple[Any, float]:
    start = time.monotonic()
    return await asked(client), time.monotonic() - start


def test_call_during_an_outage_waits_for_the_service_to_come_back(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> HttpClient:
        port = unused_port()
        client = HttpClient(
            "library", f"http://127.0.0.1:{port}", settings(attempts=2, breaker_failures=2, breaker_reset_s=0.2)
        )
        assert (await asked(client), client.breaker.state) == ("refused", "open")
        waiting = [asyncio.create_task(asked(client)) for _ in range(20)]
        await asyncio.sleep(0.3)
        service = Replies(good)
        async with serving(service, port=port):
            assert await asyncio.gather(*waiting) == [{"answer": 42}] * 20
            assert client.breaker.state == "closed"
        await client.aclose()
        return client

    with caplog.at_level(logging.INFO, logger="agentic_rollout"):
        client = asyncio.run(main())
    assert client.attempts["refused"] <= 2 + 2  # one probe at a time
    opened, closed = caplog.records
    assert (opened.levelname, closed.levelname) == ("WARNING", "INFO")
    assert "library failed 2 times in a row" in opened.getMessage()
    assert "library answers again" in closed.getMessage()


def test_call_that_cannot_wait_for_the_next_probe_fails_at_once() -> None:
    async def main() -> None:
        client = HttpClient(
            "library",
            f"http://127.0.0.1:{unused_port()}",
            settings(attempts=1, breaker_failures=1, breaker_reset_s=30.0),
        )
        assert await asked(client) == "refused"
        outcome, took_s = await outcome_and_time(client)
        assert outcome == "unavailable"
        assert took_s < 2.0
        await client.aclose()

    asyncio.run(main())


def test_outage_beyond_patience_costs_no_waiting_and_probes_go_on() -> None:
    async def main() -> None:
        client = HttpClient(
            "library",
            f"http://127.0.0.1:{unused_port()}",
            settings(attempts=1, breaker_failures=1, breaker_reset_s=1.0, breaker_patience_s=1.5),
        )
        assert await asked(client) == "refused"
        assert (await outcome_and_time(client))[0] == "refused"  # waited, and was the probe
        outcome, took_s = await outcome_and_time(client)
        assert outcome == "unavailable"
        assert took_s < 0.7
        await asyncio.sleep(1.1)
        assert await asked(client) == "refused"
        assert client.outcomes == {"refused": 3, "unavailable": 1}
        await client.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("reply", [coded(500), coded(429), coded(503, **{"Retry-After": "0"}), sent(b"["), coded(404)])
def test_failure_of_a_service_at_work_is_no_outage(reply: Callable[[], web.Response]) -> None:
    _, client = ask(Replies(reply), breaker_failures=1, attempts=3)
    assert client.breaker.state == "closed"


@pytest.mark.parametrize("code", [502, 503, 504])
def test_gateway_without_a_service_behind_it_is_an_outage(code: int) -> None:
    _, client = ask(Replies(coded(code)), breaker_failures=3, attempts=3)
    assert client.breaker.state == "open"


def test_service_that_hangs_until_the_total_deadline_is_an_outage() -> None:
    async def main() -> str:
        async with talking(hang) as url:
            client = HttpClient("library", url, settings(total_timeout_s=0.2, breaker_failures=1))
            assert await asked(client) == "timeout"
            await client.aclose()
            return client.breaker.state

    assert asyncio.run(main()) == "open"


def test_request_that_its_callers_own_deadline_cut_short_is_no_outage() -> None:
    async def main() -> HttpClient:
        async with serving(Gauge(good)) as url:
            client = HttpClient("library", url, settings(total_timeout_s=0.3, max_concurrency=1, breaker_failures=1))
            outcomes = await asyncio.gather(*(asked(client) for _ in range(60)))
            assert "timeout" in outcomes
            await client.aclose()
            return client

    client = asyncio.run(main())
    assert client.attempts["timeout"] > 0
    assert client.breaker.state == "closed"


def test_cancelled_probe_leaves_its_place_to_the_next() -> None:
    async def main() -> None:
        async with talking(hang) as url:
            client = HttpClient("library", url, settings(total_timeout_s=0.2, breaker_failures=1, breaker_reset_s=0.0))
            assert await asked(client) == "timeout"
            probe = asyncio.create_task(asked(client))
            await asyncio.sleep(0.1)
            assert client.breaker.admit() is None  # it is in flight
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)
            assert client.breaker.admit() is not None
            await client.aclose()

    asyncio.run(main())


# The rest


def test_client_serves_one_event_loop_after_another() -> None:
    client = HttpClient("library", f"http://127.0.0.1:{unused_port()}", settings(attempts=1, rate_per_s=1000.0))

    async def main() -> Any:
        outcome = await asked(client)
        await client.aclose()
        return outcome

    assert [asyncio.run(main()) for _ in range(2)] == ["refused", "refused"]


def test_redirect_takes_no_secret_to_another_host() -> None:
    async def main() -> list[web.Request]:
        other = Replies(good)
        async with (
            serving(other) as other_url,
            serving(Replies(coded(307, Location=other_url))) as url,
        ):
            client = HttpClient("library", url, settings(), headers={"X-API-KEY": SECRET})
            assert await asked(client) == "bad_reply"
            await client.aclose()
        return other.requests

    assert asyncio.run(main()) == []


@pytest.mark.parametrize("talk", [hang, hang_up, break_off, babble])
def test_no_failure_holds_a_secret(talk: Talk, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> str:
        async with talking(talk) as url:
            client = HttpClient("library", url, settings(attempts=2, read_timeout_s=0.1), headers={"X-API-KEY": SECRET})
            try:
                await client.request_json("GET", "/search", params={"api_key": SECRET})
            except ToolError as error:
                chain = [error, *filter(None, (error.__cause__, error.__context__))]
                return "".join(text for link in chain for text in traceback.format_exception(link))
            finally:
                await client.aclose()
        raise AssertionError("it must fail")

    with caplog.at_level(logging.DEBUG):
        assert SECRET not in asyncio.run(main())
    assert SECRET not in caplog.text


def test_header_that_cannot_be_sent_is_a_failure_without_it() -> None:
    async def main() -> ToolError:
        async with serving(Replies(good)) as url:
            client = HttpClient("library", url, settings(), headers={"X-API-KEY": f"{SECRET}\n"})
            with pytest.raises(ToolError) as caught:
                await client.request_json("GET", "/")
            await client.aclose()
            return caught.value

    error = asyncio.run(main())
    assert (error.status, SECRET in str(error)) == ("error", False)


@pytest.mark.parametrize(
    "url",
    [
        *("", "host", "host:80", "ftp://host", "http://", "http://:80", "http://h:99999", "http://[::1"),
        *("http://h?k=k3y", "http://user:k3y@host", "http://host#k3y"),
    ],
)
def test_url_that_cannot_be_used_is_refused_without_a_secret(url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        split_url(url, "agent.tools.search.source")
    assert caught.value.key == "agent.tools.search.source"
    assert "k3y" not in str(caught.value)
