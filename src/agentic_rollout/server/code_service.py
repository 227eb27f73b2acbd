"""The code server without a web framework: `/run_code` as SandboxFusion serves it, and sessions."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentic_rollout.errors import ToolError
from agentic_rollout.sandbox.sandbox import Sandbox
from agentic_rollout.server.code_bodies import IDENTIFIER, RunRequest, failure_json, parse_run_code, run_json
from agentic_rollout.server.code_metrics import CodeMetrics
from agentic_rollout.server.code_settings import CodeServerSettings
from agentic_rollout.server.replies import RefusedError, Reply, bad_body, busy, tool_failure
from agentic_rollout.server.routing import Route, RoutedService, json_reply
from agentic_rollout.types import ToolStatus

_SESSIONS = "/sessions/"
_MAX_KEPT_BYTES = 1 << 20  # of a reply, in case that it is asked for again


@dataclass
class _Session:
    """What the server knows of a session.

    Attributes:
        used_s: when it was last used, in the event loop's time.
        run_id: of its last program.
        reply: to it; None if it was too large to keep.
        turn: held by the request whose program runs.
    """

    used_s: float
    run_id: str | None = None
    reply: Reply | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class CodeService(RoutedService):
    """Answers `/run_code`, `/v1/ping` and `DELETE /sessions/{id}`.

    Programs run side by side up to the sandbox's `max_concurrency`; others wait.

    Args:
        sandbox: runs programs; started by `start`, closed by `aclose`.
        settings: limits.

    Raises:
        SettingsError: the token's variable is not set, or prometheus-client is not installed.
    """

    settings: CodeServerSettings

    def __init__(self, sandbox: Sandbox, settings: CodeServerSettings) -> None:
        self._sessions: dict[str, _Session] = {}
        self._code_metrics = CodeMetrics(lambda: self.waiting, lambda: len(self._sessions))
        routes = [Route("/run_code", "POST", self._run_code), Route("/v1/ping", "GET", self._ping, open=True)]
        super().__init__(settings, self._code_metrics, routes)
        self._sandbox = sandbox

    async def start(self) -> None:
        """Starts the sandbox, so that what it cannot do is told before a client waits for it.

        Raises:
            SettingsError: programs cannot be contained, or a module cannot be preloaded.
            ToolError: it did not come up.
        """
        await self._sandbox.start()

    def find_route(self, path: str) -> Route | None:
        name = path.removeprefix(_SESSIONS)
        if name != path and IDENTIFIER.fullmatch(name):
            return Route(f"{_SESSIONS}{{id}}", "DELETE", functools.partial(self._close_session, name))
        return super().find_route(path)

    def about(self) -> Mapping[str, Any]:
        return {"containment": self._sandbox.containment.mode, "sessions": len(self._sessions)}

    async def aclose(self) -> None:
        await self._sandbox.aclose()

    async def _ping(self, body: bytes) -> Reply:
        return json_reply("pong")

    async def _run_code(self, body: bytes) -> Reply:
        request = parse_run_code(body, self.settings)
        with self.admitted(1):
            try:
                if request.session_id is not None:
                    return await self._run_in_session(request, request.session_id)
                result = await self._sandbox.run(request.program, memory_limit_mb=request.memory_limit_mb)
            except ToolError as error:
                failure = tool_failure(error)
                if failure is ToolStatus.BAD_ARGUMENTS:
                    raise bad_body(str(error)) from None
                self._metrics.count_failure(failure)
                return json_reply(failure_json(error))
        self._code_metrics.observe_program(result)
        return json_reply(run_json(result, None))

    async def _run_in_session(self, request: RunRequest, name: str) -> Reply:
        session = await self._find_session(name, must_exist=request.continue_session)
        async with session.turn:
            if self._sessions.get(name) is not session:
                raise _lost("it was closed")
            session.used_s = asyncio.get_running_loop().time()
            if request.run_id is not None and request.run_id == session.run_id:
                return _kept(session)
            reply = await self._run_next(request, name)
            session.run_id = request.run_id
            session.reply = reply if len(reply.body) <= _MAX_KEPT_BYTES else None
            return reply

    async def _run_next(self, request: RunRequest, name: str) -> Reply:
        """Runs a session's next program.

        Raises:
            RefusedError: 410; the session is gone.
            ToolError: `bad_arguments`; the session stays.
        """
        try:
            result = await (await self._sandbox.session(name)).run(request.program)
        except ToolError as error:
            if error.status == ToolStatus.BAD_ARGUMENTS:
                raise
            self._metrics.count_failure(tool_failure(error))
            await self._drop_session(name)
            raise _lost(str(error)) from error
        except BaseException:  # the request's deadline: the sandbox has ended the program
            await self._drop_session(name)
            raise
        self._code_metrics.observe_program(result)
        if result.session_lost:
            await self._drop_session(name)
        return json_reply(run_json(result, name))

    async def _find_session(self, name: str, *, must_exist: bool) -> _Session:
        session = self._sessions.get(name)
        if session is not None:
            return session
        if must_exist:
            raise _lost("it is not open; perhaps it was idle for too long, or the server was restarted")
        await self._drop_idle_sessions()
        if len(self._sessions) >= self._sandbox.settings.max_sessions:
            raise busy("overloaded", f"{len(self._sessions)} sessions are open already", self.settings.retry_after_s)
        return self._sessions.setdefault(name, _Session(used_s=asyncio.get_running_loop().time()))

    async def _drop_idle_sessions(self) -> None:
        """The sandbox has closed them by itself."""
        oldest_s = asyncio.get_running_loop().time() - self._sandbox.settings.session_idle_s
        for name, session in list(self._sessions.items()):
            if session.used_s < oldest_s and not session.turn.locked():
                await self._drop_session(name)

    async def _drop_session(self, name: str) -> bool:
        known = self._sessions.pop(name, None) is not None
        await self._sandbox.finish(name)
        return known

    async def _close_session(self, name: str, body: bytes) -> Reply:
        return json_reply({"closed": await self._drop_session(name)})


def _lost(reason: str) -> RefusedError:
    return RefusedError(410, "session_lost", f"the session is lost: {reason}")


def _kept(session: _Session) -> Reply:
    if session.reply is None:
        raise RefusedError(409, "already_run", "this program has run; its reply was too large to be kept")
    return session.reply
