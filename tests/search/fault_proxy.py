"""A proxy between a client and a search server that does to replies what networks and servers under load do."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from urllib.parse import urlsplit

import orjson

from search.services import talking


class Fault(Enum):
    NONE = auto()
    SLOW = auto()  # the reply comes late, within the deadlines
    HUNG = auto()  # no reply ever comes
    RESET = auto()  # the connection breaks before the reply
    DROPPED = auto()  # the connection breaks in the middle of the reply
    ERROR_500 = auto()
    BUSY_503 = auto()  # with Retry-After
    MALFORMED = auto()  # HTML in place of JSON
    TRUNCATED = auto()  # half of the JSON, as a whole HTTP reply
    WRONG_COUNT = auto()  # one result too few


@dataclass
class FaultProxy:
    """Forwards requests to `upstream`, and replies as `choose` says for each.

    Attributes:
        url: where clients reach it.
        met: number of requests by fault.
    """

    upstream: str
    choose: Callable[[], Fault] = lambda: Fault.NONE
    slow_s: float = 0.2
    retry_after_s: int = 0
    url: str = ""
    met: Counter[Fault] = field(default_factory=Counter)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FaultProxy]:
        async with talking(self._converse) as self.url:
            yield self

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await _read_message(reader)
            fault = self.choose()
            self.met[fault] += 1
            if fault is Fault.HUNG:
                await reader.read()
                return
            if fault is Fault.RESET:
                writer.transport.abort()
                return
            reply = await self._reply(request, fault)
            if fault is Fault.DROPPED:
                writer.write(reply[: len(reply) // 2])
                await writer.drain()
                writer.transport.abort()
                return
            writer.write(reply)
            await writer.drain()

    async def _reply(self, request: bytes, fault: Fault) -> bytes:
        if fault is Fault.ERROR_500:
            return _message("500 Internal Server Error", b"Traceback (most recent call last):")
        if fault is Fault.BUSY_503:
            return _message("503 Service Unavailable", b"{}", f"Retry-After: {self.retry_after_s}")
        if fault is Fault.MALFORMED:
            return _message("200 OK", b"<html>It works!</html>")
        reply = await self._forward(request)
        body = reply.partition(b"\r\n\r\n")[2]
        if fault is Fault.SLOW:
            await asyncio.sleep(self.slow_s)
        if fault is Fault.TRUNCATED:
            return _message("200 OK", body[: len(body) // 2])
        if fault is Fault.WRONG_COUNT:
            return _message("200 OK", orjson.dumps({"result": orjson.loads(body)["result"][:-1]}))
        return reply

    async def _forward(self, request: bytes) -> bytes:
        """The server's reply; where there is no server, what a gateway says."""
        address = urlsplit(self.upstream)
        try:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
        except OSError:
            return _message("502 Bad Gateway", b"no server")
        try:
            writer.write(request)
            return await _read_message(reader)
        except (OSError, asyncio.IncompleteReadError):
            return _message("502 Bad Gateway", b"the server broke the connection")
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _read_message(reader: asyncio.StreamReader) -> bytes:
    """A request or a reply whose length is given, as both sides of these tests write them."""
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [line.partition(b":")[2] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    return head + await reader.readexactly(int(lengths[0]) if lengths else 0)


def _message(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Content-Type: application/json", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
