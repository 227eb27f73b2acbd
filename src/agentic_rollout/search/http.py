"""The HTTP client of one service: deadlines, retries, limits, a circuit breaker, and typed failures without secrets."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import aiohttp
import orjson
from aiolimiter import AsyncLimiter
from pydantic import Field
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_random_exponential

from agentic_rollout.config import Settings
from agentic_rollout.errors import SettingsError, ToolError
from agentic_rollout.search.breaker import CircuitBreaker, Permit
from agentic_rollout.types import ToolStatus

logger = logging.getLogger(__name__)

ReplyT = TypeVar("ReplyT")

Judge = Callable[[int, Any], ToolStatus | None]
"""A service's own reading of an error reply (HTTP code, JSON body or None); None leaves it to the code."""

_CHUNK_BYTES = 1 << 16


class HttpSettings(Settings):
    """How a service is asked. Times are in seconds."""

    connect_timeout_s: float = Field(default=5.0, gt=0, description="until a connection stands")
    read_timeout_s: float = Field(default=20.0, gt=0, description="longest silence of the service")
    total_timeout_s: float = Field(default=30.0, gt=0, description="one call, its retries and all waiting included")
    attempts: int = Field(default=4, ge=1, description="the most times that one call is tried")
    backoff_s: float = Field(default=0.25, ge=0, description="longest first pause between attempts; it doubles")
    backoff_max_s: float = Field(default=5.0, ge=0, description="longest pause, unless the service asks for more")
    max_concurrency: int = Field(default=64, ge=1, description="requests in flight at a time")
    rate_per_s: float | None = Field(default=None, gt=0, description="the most requests a second")
    breaker_failures: int = Field(default=8, ge=1, description="failures in a row that count as an outage")
    breaker_reset_s: float = Field(default=5.0, ge=0, description="until it is tried again")
    breaker_patience_s: float = Field(
        default=60.0, ge=0, description="so long after a service broke down calls wait for it; later they fail at once"
    )
    max_reply_bytes: int = Field(default=64 << 20, ge=1, description="larger replies are refused")
    trust_env: bool = Field(default=False, description="use the proxies that HTTP_PROXY and its kin name")


class HttpError(ToolError):
    """A failed request.

    Args:
        message: what happened, without any part of the URL's query, of headers or of the reply.
        status: a `ToolStatus` value.
        code: the HTTP code, where there was one.
        transient: whether asking again may help.
        alive: whether the failure shows a service at work; the circuit breaker counts only those that do not.
        retry_after_s: how long the service asks to be left alone.
    """

    def __init__(
        self,
        message: str,
        status: ToolStatus,
        *,
        code: int | None = None,
        transient: bool = False,
        alive: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, status)
        self.code = code
        self.transient = transient
        self.alive = alive
        self.retry_after_s = retry_after_s


@dataclass
class _Connections:
    """What belongs to one event loop."""

    loop: asyncio.AbstractEventLoop
    session: aiohttp.ClientSession
    slots: asyncio.Semaphore
    limiter: AsyncLimiter | None
    breaker_moved: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class _Request:
    method: str
    path: str
    body: bytes | None
    params: Mapping[str, str] | None = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    deadline: float  # the event loop's time


@dataclass(frozen=True)
class _Reply:
    code: int
    body: bytes
    retry_after_s: float | None


class HttpClient:
    """Asks one service. The session is made by the first request and kept.

    What is retried, with exponential backoff and full jitter: no connection, a broken one, no answer in time, 429,
    500, 502, 503, 504, and a reply that is not what was agreed on. A `Retry-After` is honoured; where it, or the
    backoff, would outlast the call's deadline, the call fails at once, with the status of its last whole attempt.

    The circuit breaker counts what shows no service at work: no connection, a broken one, no answer in time, 502, 504,
    and 503 without `Retry-After`. While it is open, nothing is sent but one probe every `breaker_reset_s`. Calls
    meanwhile wait, as a restart takes seconds and a failed call is lost to training: up to their deadline, and until
    `breaker_patience_s` after the service broke down. Whoever cannot wait long enough for the next probe fails at once
    as `unavailable`. So an outage costs a rollout its patience once, not a deadline for each call.

    Redirects are not followed: a key must not travel to a host that nobody named.

    Args:
        name: for messages; holds no secret.
        base_url: scheme, host, port and leading path.
        headers: sent with every request; may hold secrets.
        judge: reads error replies; by default the HTTP code alone counts.

    Attributes:
        outcomes: number of calls by how they ended, a `ToolStatus` value.
        attempts: number of requests by how they ended.
    """

    def __init__(
        self,
        name: str,
        base_url: str,
        settings: HttpSettings,
        *,
        headers: Mapping[str, str] | None = None,
        judge: Judge | None = None,
    ) -> None:
        self.name = name
        self.settings = settings
        self.outcomes: Counter[str] = Counter()
        self.attempts: Counter[str] = Counter()
        self.breaker = CircuitBreaker(settings.breaker_failures, settings.breaker_reset_s)
        self._base_url = base_url.rstrip("/")
        self._headers = dict(headers or {})
        self._judge = judge
        self._connections: _Connections | None = None
        self._backoff = wait_random_exponential(multiplier=settings.backoff_s, max=settings.backoff_max_s)

    async def request_json(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        parse: Callable[[Any], ReplyT] = lambda reply: reply,
        deadline: float | None = None,
        attempts: int | None = None,
    ) -> ReplyT:
        """The reply's JSON.

        Args:
            parse: turns it into what the caller wants; a `ToolError` from it counts as the outcome of the attempt.
            deadline: the event loop's time by which the call has ended, if sooner than `total_timeout_s` from now.
            attempts: instead of the setting.

        Raises:
            ToolError: the call failed; its status says how.
        """
        now = asyncio.get_running_loop().time
        latest = now() + self.settings.total_timeout_s
        latest = latest if deadline is None else min(latest, deadline)
        body = None if json is None else orjson.dumps(json)
        content = {} if body is None else {"Content-Type": "application/json"}
        request = _Request(method, path, body, params, {**self._headers, **(headers or {}), **content}, latest)
        failures: list[HttpError] = []

        async def attempt() -> ReplyT:
            try:
                return await self._attempt(request, parse)
            except HttpError as error:
                failures.append(error)
                raise

        try:
            reply: ReplyT = await self._retrying(latest, attempts or self.settings.attempts)(attempt)
        except HttpError:
            # Of a retry that the deadline cut short, what came before it says more.
            failure = failures[-2] if len(failures) > 1 and now() >= latest else failures[-1]
            self.outcomes[failure.status] += 1
            raise failure from None
        self.outcomes[ToolStatus.OK] += 1
        return reply

    async def aclose(self) -> None:
        """Closes all connections; a later request would open new ones."""
        connections, self._connections = self._connections, None
        if connections is not None and not connections.loop.is_closed():
            await connections.session.close()

    def _retrying(self, deadline: float, attempts: int) -> AsyncRetrying:
        now = asyncio.get_running_loop().time

        def wait(state: RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome is not None else None
            asked_s = error.retry_after_s if isinstance(error, HttpError) else None
            return (asked_s or 0.0) + self._backoff(state)

        def stop(state: RetryCallState) -> bool:
            return state.attempt_number >= attempts or now() + state.upcoming_sleep >= deadline

        return AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, HttpError) and error.transient),
            wait=wait,
            stop=stop,
            sleep=asyncio.sleep,
            reraise=True,
        )

    async def _attempt(self, request: _Request, parse: Callable[[Any], ReplyT]) -> ReplyT:
        """Sends the request once, when the breaker and the limits allow it."""
        connections = self._connected()
        while True:
            await self._until_admissible(connections, request.deadline)
            try:
                async with asyncio.timeout_at(request.deadline):
                    await connections.slots.acquire()
            except TimeoutError:
                raise HttpError(f"{self.name} was too busy with other requests", ToolStatus.TIMEOUT) from None
            try:
                permit = self.breaker.admit()
                if permit is not None:  # else the breaker opened, or another call became the probe, meanwhile
                    return await self._send(connections, permit, request, parse)
            finally:
                connections.slots.release()

    async def _until_admissible(self, connections: _Connections, deadline: float) -> None:
        """Waits while the breaker is open.

        Raises:
            HttpError: `unavailable`, as soon as it is clear that the wait would be too long.
        """
        now = connections.loop.time
        while (pause_s := self.breaker.retry_in_s) != 0.0:
            latest = min(deadline, now() + self.settings.breaker_patience_s - self.breaker.down_s)
            wake_at = latest if pause_s is None else now() + pause_s
            if wake_at > latest or now() >= latest:
                raise HttpError(f"{self.name} is down and was not asked", ToolStatus.UNAVAILABLE)
            try:
                async with asyncio.timeout_at(wake_at):
                    await connections.breaker_moved.wait()
            except TimeoutError:
                continue

    async def _send(
        self, connections: _Connections, permit: Permit, request: _Request, parse: Callable[[Any], ReplyT]
    ) -> ReplyT:
        """One attempt; its outcome is counted, and the breaker learns of it."""
        now = connections.loop.time
        alive: bool | None = None
        try:
            if connections.limiter is not None:
                await self._until_rate_allows(connections.limiter, request.deadline)
            left_s = request.deadline - now()
            reply = await self._exchange(connections.session, request)
            outcome = self._read(reply, parse) if isinstance(reply, _Reply) else reply
            # A request sent late, after other attempts or a wait, that the call's own deadline then cut short says
            # nothing about the service.
            if now() < request.deadline or left_s > self.settings.total_timeout_s / 2:
                alive = not isinstance(outcome, HttpError) or outcome.alive
        finally:
            self._settle(connections, permit, alive)
        self.attempts[outcome.status if isinstance(outcome, HttpError) else ToolStatus.OK] += 1
        if isinstance(outcome, HttpError):
            raise outcome  # outside of any `except`: the context of an error could hold a URL with a key
        return outcome

    async def _until_rate_allows(self, limiter: AsyncLimiter, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await limiter.acquire()
        except TimeoutError:
            raise HttpError(f"{self.name} may not be asked that often", ToolStatus.TIMEOUT) from None

    async def _exchange(self, session: aiohttp.ClientSession, request: _Request) -> _Reply | HttpError:
        try:
            async with (
                asyncio.timeout_at(request.deadline),
                session.request(
                    request.method,
                    self._base_url + request.path,
                    data=request.body,
                    params=request.params,
                    headers=request.headers,
                    allow_redirects=False,
                ) as response,
            ):
                body = bytearray()
                async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                    body += chunk
                    if len(body) > self.settings.max_reply_bytes:
                        return HttpError(f"{self.name} sent too large a reply", ToolStatus.BAD_REPLY, alive=True)
                return _Reply(response.status, bytes(body), parse_retry_after(response.headers.get("Retry-After")))
        except Exception as error:  # what aiohttp raises has many bases
            return _failure_of(self.name, error)

    def _read(self, reply: _Reply, parse: Callable[[Any], ReplyT]) -> ReplyT | HttpError:
        """What a whole reply says."""
        try:
            content = orjson.loads(reply.body)
        except orjson.JSONDecodeError:
            content = None
            if reply.code < 300:
                return HttpError(f"{self.name} sent no JSON", ToolStatus.BAD_REPLY, transient=True, alive=True)
        if reply.code >= 300:
            return self._rejection(reply, content)
        try:
            return parse(content)
        except ToolError as error:
            status = ToolStatus(error.status)
            transient = status in (ToolStatus.BAD_REPLY, ToolStatus.HTTP_5XX)
            return HttpError(f"{self.name}: {error}", status, code=reply.code, transient=transient, alive=True)

    def _rejection(self, reply: _Reply, content: Any) -> HttpError:
        """The failure that an HTTP code other than 2xx stands for."""
        code = reply.code
        judged = None if self._judge is None else self._judge(code, content)
        if judged is not None:
            return HttpError(f"{self.name} answered HTTP {code}", judged, code=code, alive=True)
        if code < 400:
            message = f"{self.name} answered HTTP {code}, a redirect, which is not followed"
            return HttpError(message, ToolStatus.BAD_REPLY, code=code, alive=True)
        status = ToolStatus.HTTP_5XX if code >= 500 else ToolStatus.HTTP_4XX
        return HttpError(
            f"{self.name} answered HTTP {code}",
            ToolStatus.RATE_LIMITED if code == 429 else status,
            code=code,
            transient=code in (429, 500, 502, 503, 504),
            alive=code not in (502, 503, 504) or reply.retry_after_s is not None,
            retry_after_s=reply.retry_after_s,
        )

    def _settle(self, connections: _Connections, permit: Permit, alive: bool | None) -> None:
        down_s = self.breaker.down_s
        was_down = self.breaker.is_down
        self.breaker.settle(permit, alive)
        is_down = self.breaker.is_down
        if is_down and not was_down:
            logger.warning(
                "%s failed %d times in a row: left alone but for a probe every %g s",
                self.name,
                self.settings.breaker_failures,
                self.settings.breaker_reset_s,
            )
        elif was_down and not is_down:
            logger.info("%s answers again, after %.1f s", self.name, down_s)
        if was_down or is_down:
            connections.breaker_moved.set()
            connections.breaker_moved = asyncio.Event()

    def _connected(self) -> _Connections:
        """Session and limits of the running event loop; those of a loop that ended are dropped with it."""
        loop = asyncio.get_running_loop()
        if self._connections is None or self._connections.loop is not loop:
            settings = self.settings
            timeout = aiohttp.ClientTimeout(
                total=None, connect=settings.connect_timeout_s, sock_read=settings.read_timeout_s
            )
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=settings.max_concurrency),
                timeout=timeout,
                trust_env=settings.trust_env,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
            limiter = _limiter(settings.rate_per_s)
            self._connections = _Connections(loop, session, asyncio.Semaphore(settings.max_concurrency), limiter)
        return self._connections


def split_url(url: str, key: str) -> SplitResult:
    """The parts of a service's URL.

    Args:
        key: the setting that it came from.

    Raises:
        SettingsError: it is none, or holds a user name, a password or a query string; those are not repeated.
    """
    expected = "a URL: http://host:port"
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise SettingsError(key, "…", expected, "Check the host and the port.") from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        remedy = "Take user name, password and query string out: secrets belong into environment variables."
        raise SettingsError(key, f"{parts.scheme}://…", expected, remedy)
    if parts.scheme not in ("http", "https") or not has_host:
        raise SettingsError(key, url, expected, "Give the whole URL.")
    return parts


def _limiter(rate_per_s: float | None) -> AsyncLimiter | None:
    """At most one request at a time, evenly: a burst of a whole second's requests is what services reject."""
    return None if rate_per_s is None else AsyncLimiter(1, 1 / rate_per_s)


def parse_retry_after(value: str | None) -> float | None:
    """The seconds that `Retry-After` asks for, given as seconds or as an HTTP date; None if it says neither."""
    if value is None:
        return None
    try:
        if value.strip().isdecimal():
            return float(value)
        moment = parsedate_to_datetime(value)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())


def _failure_of(name: str, error: Exception) -> HttpError:
    """What a request that got no whole reply failed of. The error's own text is left out: it can hold the URL."""
    match error:
        case TimeoutError():
            return HttpError(f"{name} gave no answer in time", ToolStatus.TIMEOUT, transient=True)
        case aiohttp.ClientConnectorError():
            return HttpError(f"{name} could not be connected to", ToolStatus.REFUSED, transient=True)
        case aiohttp.ClientResponseError() | aiohttp.InvalidURL():
            return HttpError(f"{name} sent no HTTP reply", ToolStatus.BAD_REPLY, transient=True, alive=True)
        case aiohttp.ClientError() | OSError():
            return HttpError(f"{name} broke the connection", ToolStatus.DISCONNECTED, transient=True)
        case _:
            return HttpError(f"{name} could not be asked ({type(error).__name__})", ToolStatus.ERROR, alive=True)
