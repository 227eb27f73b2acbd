"""`agentic-rollout serve-search`. What it takes seconds to import is imported when the command runs."""

from __future__ import annotations

import argparse
from typing import Any

from agentic_rollout.server.command import add_service_arguments, announce, run_loop, service_settings, warn_if_open

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
    add_service_arguments(parser, port=8000, work="queries", max_queue=8192)
    parser.add_argument(
        "--pages", action="append", default=[], metavar="PATH|web", help="answer /access from a corpus, or the web"
    )
    parser.add_argument("--rerank", metavar="PATH|lexical", help="rerank what is found, with a cross-encoder's folder")
    parser.add_argument("--topk", type=int, default=3, help="hits per query where a request does not say (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="threads that search (default: 1)")
    parser.add_argument("--cache-size", type=int, default=10_000, help="answers kept in memory; 0: none")
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
    warn_if_open(options.host, settings)
    if options.ray:
        from agentic_rollout.server.ray_app import serve_on_ray

        serve_on_ray(options.sources, settings, options, announce=announce)
        return 0
    backend_settings = build_settings(BackendSettings, {"threads": options.threads}, key=KEY)
    reranker = None if options.rerank is None else build_reranker(options.rerank, key=f"{KEY}.rerank")
    backend = open_backend(options.sources, backend_settings, key=KEY)
    pages = open_pages(options.pages, WebSettings())

    async def main() -> None:
        app = create_app(backend, settings, reranker=reranker, pages=pages)
        await serve(app, host=options.host, port=options.port, announce=announce, reuse_port=options.reuse_port)

    try:
        run_loop(main())
    except KeyboardInterrupt:  # the second one: the first stops in order
        return 130
    return 0


def _server_settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "topk": options.topk,
        **service_settings(options),
        "max_queries": min(options.max_queue, 4096),
        "cache": {"cache_size": options.cache_size},
    }
