"""Serving an application until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from aiohttp import web

from agentic_rollout.errors import SettingsError
from agentic_rollout.server.aiohttp_app import SERVICE
from agentic_rollout.server.routing import RoutedService

logger = logging.getLogger(__name__)

_BACKLOG = 1024  # connections that the kernel keeps until they are accepted
_SETTLE_S = 0.05  # for what has reached this machine, but not yet this process
_CLOSE_S = 1.0  # for replies that are being written
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def serve(
    app: web.Application, *, host: str, port: int, announce: Callable[[str], None], reuse_port: bool = False
) -> None:
    """Serves until SIGTERM or SIGINT, then stops: no new connection, but an answer to everything accepted.

    Meanwhile `/health` says `draining` on the connections that are left, and each reply closes its connection. A
    second signal ends the process at once.

    Args:
        port: 0 lets the system choose.
        announce: is told the address, once connections are accepted.
        reuse_port: several processes may share the port: one for each core.

    Raises:
        SettingsError: the address cannot be bound.
    """
    service = app[SERVICE]
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=_CLOSE_S)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    try:
        await runner.setup()
        site = web.TCPSite(runner, host, port, backlog=_BACKLOG, reuse_port=reuse_port)
        await _bind(site, host, port)
        for number in _SIGNALS:
            loop.add_signal_handler(number, stop.set)
        announce(_url(host, int(runner.addresses[0][1])))
        await stop.wait()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        await site.stop()
        service.draining = True  # not before: a client whose connection is closed must not find the door half shut
        await _drain(service)
    finally:
        await runner.cleanup()


async def _bind(site: web.TCPSite, host: str, port: int) -> None:
    if not 0 <= port <= 65535:  # uvloop would take it modulo 65536
        raise SettingsError("--port", port, "a number from 0 to 65535", "Choose another.")
    try:
        if not 0 <= port < 1 << 16:
            raise OverflowError("a port is a number from 0 to 65535")  # uvloop would take the remainder
        await site.start()
    except OSError as error:
        expected = "an address of this machine and a free port"
        remedy = f"The system said: {error.strerror or error}. Choose another --host or --port."
        raise SettingsError("--host, --port", f"{host}:{port}", expected, remedy) from None


async def _drain(service: RoutedService) -> None:
    """Waits until nothing is being answered, and nothing has just arrived either."""
    try:
        async with asyncio.timeout(service.settings.drain_s):
            await service.idle.wait()
            await asyncio.sleep(_SETTLE_S)
            while not service.idle.is_set():
                await service.idle.wait()
                await asyncio.sleep(_SETTLE_S)
    except TimeoutError:
        logger.warning("stopped with requests unanswered: they took more than %g s", service.settings.drain_s)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
