"""What every server has in common, without a web framework: from a request's parts to a reply."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import orjson

from agentic_rollout.errors import ToolError
from agentic_rollout.server.metrics import ServiceMetrics
from agentic_rollout.server.replies import RefusedError, Reply, backend_failure, bad_body, busy, tool_failure
from agentic_rollout.server.settings import ServiceSettings

logger = logging.getLogger(__name__)

ReadBody = Callable[[], Awaitable[bytes]]
Handler = Callable[[bytes], Awaitable[Reply]]
"""From a body, empty unless the method is POST, to a reply; may raise `RefusedError` and `ToolError`."""


@dataclass(frozen=True, slots=True)
class Route:
    """What answers a path.

    Attributes:
        path: as it is written in messages and counted in metrics.
        method: the only one it takes.
        handle: answers.
        open: whether it is answered without the token.
    """

    path: str
    method: str
    handle: Handler
    open: bool = False


class RoutedService(ABC):
    """Answers requests; any number at a time, on one event loop. `/health` and `/metrics` come with it.

    Args:
        settings: limits, and where the token is.
        metrics: what is counted.
        routes: all other paths.

    Attributes:
        draining: set when the server is to stop: `/health` then says so, and everything else is still answered.
        idle: set while no request is being answered.
        waiting: what was accepted and is not yet answered, in the unit of `settings.max_queue`.

    Raises:
        SettingsError: the token's variable is not set.
    """

    def __init__(self, settings: ServiceSettings, metrics: ServiceMetrics, routes: Iterable[Route]) -> None:
        self.settings = settings
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self.waiting = 0
        self._metrics = metrics
        self._token = settings.read_token()
        self._in_flight = 0  # requests
        own = (Route("/health", "GET", self._health, open=True), Route("/metrics", "GET", self._expose_metrics))
        self._routes = {route.path: route for route in (*routes, *own)}

    async def answer(self, method: str, path: str, authorization: str | None, read: ReadBody) -> Reply:
        """The reply to one request; never raises.

        Args:
            authorization: the header of this name.
            read: reads the body, which is not asked for before method, path and token are right.
        """
        started = time.perf_counter()
        self._in_flight += 1
        self.idle.clear()
        route = self.find_route(path)
        name = "unknown" if route is None else route.path
        try:
            reply = await self._guarded(method, route, name, authorization, read)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self.idle.set()
        self._metrics.observe(name, reply.status, time.perf_counter() - started)
        return reply

    def find_route(self, path: str) -> Route | None:
        """What answers a path; None if nothing does."""
        return self._routes.get(path)

    async def start(self) -> None:
        """Called once, before the first request; a server that cannot serve says so here."""
        return

    @abstractmethod
    def about(self) -> Mapping[str, Any]:
        """What `/health` says of the server's parts."""

    @abstractmethod
    async def aclose(self) -> None:
        """Closes what is served."""

    @contextmanager
    def admitted(self, number: int) -> Iterator[None]:
        """Counts work in, or refuses it, and out again.

        Raises:
            RefusedError: 503; too much is waiting.
        """
        if self.waiting + number > self.settings.max_queue:
            raise busy(
                "overloaded", f"{self.waiting} {self._metrics.work} are waiting already", self.settings.retry_after_s
            )
        self.waiting += number
        self._metrics.accepted.inc(number)
        try:
            yield
        finally:
            self.waiting -= number

    async def _guarded(
        self, method: str, route: Route | None, name: str, authorization: str | None, read: ReadBody
    ) -> Reply:
        try:
            async with asyncio.timeout(self.settings.deadline_s):
                return await self._dispatch(method, route, authorization, read)
        except RefusedError as refusal:
            return refusal.reply()
        except ToolError as error:
            self._metrics.count_failure(tool_failure(error))
            return backend_failure(error, self.settings.retry_after_s).reply()
        except TimeoutError:
            self._metrics.count_failure("timeout")
            return RefusedError(504, "timeout", f"no answer within {self.settings.deadline_s:g} s").reply()
        except Exception:
            logger.exception("%s %s failed", method, name)
            self._metrics.count_failure("error")
            return RefusedError(500, "error", "the server failed at this request; its log says why").reply()

    async def _dispatch(self, method: str, route: Route | None, authorization: str | None, read: ReadBody) -> Reply:
        if route is None:
            raise RefusedError(404, "not_found", f"nothing is here; there is {', '.join(self._routes)}")
        if method != route.method:
            detail = f"{route.path} takes {route.method}"
            raise RefusedError(405, "method_not_allowed", detail, {"Allow": route.method})
        if not route.open:
            self._authorize(authorization)
        body = await read() if method == "POST" else b""
        if len(body) > self.settings.max_body_bytes:
            raise RefusedError(413, "too_large", f"a body may have at most {self.settings.max_body_bytes} bytes")
        return await route.handle(body)

    def _authorize(self, authorization: str | None) -> None:
        if self._token is None:
            return
        scheme, _, token = (authorization or "").partition(" ")
        given = token.strip().encode(errors="surrogateescape")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given, self._token):
            raise RefusedError(401, "unauthorized", "a valid bearer token is needed", {"WWW-Authenticate": "Bearer"})

    async def _health(self, body: bytes) -> Reply:
        state = "draining" if self.draining else "ready"
        about = {"status": state, "waiting": self.waiting, **self.about(), "version": version("agentic-rollout")}
        return json_reply(about, 503 if self.draining else 200)

    async def _expose_metrics(self, body: bytes) -> Reply:
        text, content_type = self._metrics.exposition()
        return Reply(200, text, content_type)


def json_reply(content: Any, status: int = 200) -> Reply:
    """A reply whose body is JSON."""
    return Reply(status, orjson.dumps(content))


def parse_object(body: bytes) -> dict[str, Any]:
    """The fields of a body that is a JSON object.

    Raises:
        RefusedError: 422; it is none.
    """
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise bad_body("the body is no JSON") from None
    if not isinstance(fields, dict):
        raise bad_body("the body must be a JSON object")
    return fields


def parse_flag(fields: Mapping[str, Any], name: str) -> bool:
    """A field that is true or false; false where it is null or missing.

    Raises:
        RefusedError: 422; it names the field.
    """
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad_body(f"`{name}` must be true or false")
    return bool(value)
