"""`agentic-rollout serve-search`. What it takes seconds to import is imported when the command runs."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentic_rollout.server.settings import ServerSettings

logger = logging.getLogger(__name__)

KEY = "serve-search"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="index folder or corpus (several are fused; with --ray, they are the shards of one corpus); or the "
        "URL of another search server, or serper, serpapi, google",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    parser.add_argument("--port", type=int, default=8000, help="0 chooses a free one, which is printed")
    parser.add_argument("--token-env", metavar="NAME", help="environment variable with the token clients must send")
    parser.add_argument(
        "--pages", action="append", default=[], metavar="PATH|web", help="answer /access from a corpus, or the web"
    )
    parser.add_argument("--rerank", metavar="PATH|lexical", help="rerank what is found, with a cross-encoder's folder")
    parser.add_argument("--topk", type=int, default=3, help="hits per query where a request does not say (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="threads that search (default: 1)")
    parser.add_argument("--max-queue", type=int, default=8192, help="queries waiting before 503 (default: 8192)")
    parser.add_argument("--cache-size", type=int, default=10_000, help="answers kept in memory; 0: none")
    parser.add_argument("--deadline", type=float, default=60.0, metavar="S", help="seconds for one request")
    parser.add_argument("--drain", type=float, default=60.0, metavar="S", help="seconds for what is left at a stop")
    parser.add_argument("--reuse-port", action="store_true", help="let several of these processes share the port")
    parser.add_argument("--ray", action="store_true", help="deploy on Ray Serve instead of in this process")
    parser.add_argument("--replicas", type=int, default=1, help="with --ray: of each shard, at least")
    parser.add_argument("--cpus", type=float, default=1.0, help="with --ray: set aside for each replica (default: 1)")
    parser.add_argument("--max-replicas", type=int, help="with --ray: of each shard, at most, by load")


def run(options: argparse.Namespace) -> int:
    """Serves until it is told to stop; returns the exit status. The address goes to stdout as one line of JSON.

    Raises:
        AgenticRolloutError: an option is wrong, or a source cannot be opened.
    """
    from agentic_rollout.config import build_settings
    from agentic_rollout.retrieval.rerank import build_reranker
    from agentic_rollout.search.build import BackendSettings
    from agentic_rollout.search.web import WebSettings
    from agentic_rollout.server.app import create_app
    from agentic_rollout.server.build import open_backend, open_pages
    from agentic_rollout.server.run import serve
    from agentic_rollout.server.settings import ServerSettings

    settings = build_settings(ServerSettings, _server_settings(options), key=KEY)
    _warn_if_open(options.host, settings)
    if options.ray:
        from agentic_rollout.server.ray_app import serve_on_ray

        serve_on_ray(options.sources, settings, options, announce=_announce)
        return 0
    backend_settings = build_settings(BackendSettings, {"threads": options.threads}, key=KEY)
    reranker = None if options.rerank is None else build_reranker(options.rerank, key=f"{KEY}.rerank")
    backend = open_backend(options.sources, backend_settings, key=KEY)
    pages = open_pages(options.pages, WebSettings())

    async def main() -> None:
        app = create_app(backend, settings, reranker=reranker, pages=pages)
        await serve(app, host=options.host, port=options.port, announce=_announce, reuse_port=options.reuse_port)

    try:
        _run_loop(main())
    except KeyboardInterrupt:  # the second one: the first stops in order
        return 130
    return 0


def _server_settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "topk": options.topk,
        "max_queue": options.max_queue,
        "max_queries": min(options.max_queue, 4096),
        "deadline_s": options.deadline,
        "drain_s": options.drain,
        "token_env": options.token_env,
        "cache": {"cache_size": options.cache_size},
    }


def _run_loop(main: Coroutine[Any, Any, None]) -> None:
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


def _announce(url: str) -> None:
    sys.stdout.write(json.dumps({"listening": url}) + "\n")
    sys.stdout.flush()


def _warn_if_open(host: str, settings: ServerSettings) -> None:
    if settings.token_env is None and not _is_loopback(host):
        logger.warning("listening on %s without a token: whoever reaches this port can search (see --token-env)", host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
