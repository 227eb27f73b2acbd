"""A real code server on a real socket: in a thread of this process, or in one of its own that can be killed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import requests

from agentic_rollout.config import build_settings
from agentic_rollout.sandbox.sandbox import Sandbox
from agentic_rollout.server.aiohttp_app import build_app
from agentic_rollout.server.code_service import CodeService
from agentic_rollout.server.code_settings import CodeServerSettings
from server.serving import post, running, server_command


@contextmanager
def code_server(**changes: Any) -> Iterator[str]:
    """Serves in a thread; gives the address."""
    changes["sandbox"] = {"preload": (), "max_concurrency": 2, **changes.get("sandbox", {})}
    settings = build_settings(CodeServerSettings, changes, key="serve-code")
    with running(lambda: build_app(CodeService(Sandbox(settings.sandbox_settings()), settings))) as url:
        yield url


def code_command(*arguments: str, **environment: str) -> AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    """The real command in a process of its own; gives it and its address."""
    return server_command("serve-code", "--preload", "", *arguments, **environment)


def run_code(url: str, code: str, **fields: Any) -> requests.Response:
    return post(f"{url}/run_code", {"code": code, "language": "python", **fields})


def ran(url: str, code: str, **fields: Any) -> dict[str, Any]:
    """The reply about a program that ran."""
    response = run_code(url, code, **fields)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply
