"""What the commands that serve have in common."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from agentic_rollout.server.settings import ServiceSettings

logger = logging.getLogger(__name__)


def add_service_arguments(parser: argparse.ArgumentParser, *, port: int, work: str, max_queue: int) -> None:
    """Declares what every server takes.

    Args:
        port: by default.
        work: what is queued, as a plural.
        max_queue: by default.
    """
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    parser.add_argument("--port", type=int, default=port, help=f"0 chooses a free one, which is printed ({port})")
    parser.add_argument("--token-env", metavar="NAME", help="environment variable with the token clients must send")
    parser.add_argument("--max-queue", type=int, default=max_queue, help=f"{work} waiting before 503 ({max_queue})")
    parser.add_argument("--deadline", type=float, metavar="S", help="seconds for one request")
    parser.add_argument("--drain", type=float, metavar="S", help="seconds for what is left at a stop")


def service_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that these arguments give; those that were not given are left to their defaults."""
    given = {
        "max_queue": options.max_queue,
        "deadline_s": options.deadline,
        "drain_s": options.drain,
        "token_env": options.token_env,
    }
    return {name: value for name, value in given.items() if value is not None}


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """On uvloop where it is installed: about a third less work for each request."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    try:
        import uvloop
    except ImportError:
        logger.info("uvloop is not installed; asyncio's own event loop serves")
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


def announce(url: str) -> None:
    """Writes the address to stdout as one line of JSON."""
    sys.stdout.write(orjson.dumps({"listening": url}).decode() + "\n")
    sys.stdout.flush()


def warn_if_open(host: str, settings: ServiceSettings) -> None:
    """Warns of an address that others can reach, if there is no token."""
    if settings.token_env is None and not _is_loopback(host):
        logger.warning("listening on %s without a token: whoever reaches this port can use it (see --token-env)", host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
