"""`agentic-rollout serve-code`. What it takes long to import is imported when the command runs."""

from __future__ import annotations

import argparse
from typing import Any

from agentic_rollout.server.command import add_service_arguments, announce, run_loop, service_settings, warn_if_open

KEY = "serve-code"


def add_code_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add_service_arguments(parser, port=8080, work="programs", max_queue=1024)
    parser.add_argument("--concurrency", type=int, metavar="N", help="programs at a time (default: one for each core)")
    parser.add_argument("--memory", type=int, metavar="MB", help="of a program, where a request does not say (1024)")
    parser.add_argument("--max-sessions", type=int, metavar="N", help="sessions open at a time (512)")
    parser.add_argument("--session-idle", type=float, metavar="S", help="until an unused session is closed (1800)")
    parser.add_argument("--preload", metavar="NAMES", help="modules, with commas, that programs find imported (numpy)")
    parser.add_argument(
        "--sandbox",
        choices=["auto", "landlock", "bubblewrap", "unsafe"],
        help="what contains programs; unsafe: nothing need (auto)",
    )


def run_code_server(options: argparse.Namespace) -> int:
    """Serves until it is told to stop; returns the exit status. The address goes to stdout as one line of JSON.

    Raises:
        AgenticRolloutError: an option is wrong, or programs cannot be contained here.
    """
    from agentic_rollout.config import build_settings
    from agentic_rollout.sandbox.sandbox import Sandbox
    from agentic_rollout.server.aiohttp_app import build_app
    from agentic_rollout.server.code_service import CodeService
    from agentic_rollout.server.code_settings import CodeServerSettings, usable_cores
    from agentic_rollout.server.run import serve

    sandbox_settings = {"max_concurrency": usable_cores(), **_sandbox_settings(options)}
    values = {**service_settings(options), "sandbox": sandbox_settings}
    settings = build_settings(CodeServerSettings, values, key=KEY)
    warn_if_open(options.host, settings)

    async def main() -> None:
        sandbox = Sandbox(settings.sandbox_settings(), key=f"{KEY}.sandbox")
        app = build_app(CodeService(sandbox, settings))
        await serve(app, host=options.host, port=options.port, announce=announce)

    run_loop(main())
    return 0


def _sandbox_settings(options: argparse.Namespace) -> dict[str, Any]:
    given = {
        "max_concurrency": options.concurrency,
        "memory_limit_mb": options.memory,
        "max_sessions": options.max_sessions,
        "session_idle_s": options.session_idle,
        "preload": None if options.preload is None else tuple(filter(None, options.preload.split(","))),
        "sandbox": options.sandbox,
    }
    return {name: value for name, value in given.items() if value is not None}
