"""Programs run by a server: `POST /run_code`, as this package and SandboxFusion serve it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentic_rollout.errors import ToolError
from agentic_rollout.sandbox.results import RunStatus
from agentic_rollout.search.http import HttpClient, HttpError, HttpSettings, split_url
from agentic_rollout.tools.python_output import Outcome, Printed
from agentic_rollout.types import ToolStatus

logger = logging.getLogger(__name__)

_ROUTE = "/run_code"
_GONE = 410
_FINISH_TIMEOUT_S = 5.0


@dataclass(slots=True)
class _Session:
    """One trajectory's session on the server.

    Attributes:
        id: unlike any other's, as several workers, and several runs, may share the server.
        started: whether a program has run in it.
        turn: programs of one turn run in their order.
    """

    id: str = field(default_factory=lambda: secrets.token_hex(16))
    started: bool = False
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, slots=True)
class _Reply:
    outcome: Outcome
    session_id: object  # as the server repeats it
    has_value: bool  # whether the server knows of values


class CodeServer:
    """Asks a code server.

    A request is sent again where the client's settings say so. In a session, the server answers one that it has
    already carried out without running the program twice.

    Args:
        url: of the server, or of its `/run_code` route.
        http: how it is asked; its times must leave room for `wall_time_s`.
        wall_time_s: of one program.
        memory_limit_mb: of one program; None for the server's own.
        stateful: whether a trajectory's programs share a session, which takes a server of this package.
        want_value: whether the last expression's value is asked for, which takes the same.
        token: sent as a bearer token.
        key: the setting that `url` came from, for error messages.

    Raises:
        SettingsError: `url` is none, or holds a user name, a password or a query string.
    """

    def __init__(
        self,
        url: str,
        http: HttpSettings,
        *,
        wall_time_s: float,
        memory_limit_mb: int | None = None,
        stateful: bool = False,
        want_value: bool = False,
        token: str | None = None,
        key: str = "url",
    ) -> None:
        parts = split_url(url, key)
        base_url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix(_ROUTE)}"
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.client = HttpClient(f"code server {parts.netloc}", base_url, http, headers=headers)
        self._common: dict[str, Any] = {
            "language": "python",
            "run_timeout": wall_time_s,
            "memory_limit_MB": memory_limit_mb or -1,
            **({"want_value": True} if want_value else {}),
        }
        self._stateful = stateful
        self._want_value = want_value
        self._sessions: dict[str, _Session] = {}

    async def run(self, code: str, trajectory_id: str) -> Outcome:
        if not self._stateful:
            return (await self._ask(code, {})).outcome
        session = self._sessions.setdefault(trajectory_id, _Session())
        async with session.turn:
            return await self._run_in_session(code, trajectory_id, session)

    async def finish(self, trajectory_id: str) -> None:
        session = self._sessions.pop(trajectory_id, None)
        if session is None or self.client.breaker.is_down:
            return  # the server closes it when it is idle, if it is there at all
        deadline = asyncio.get_running_loop().time() + _FINISH_TIMEOUT_S
        try:
            await self.client.request_json("DELETE", f"/sessions/{session.id}", deadline=deadline, attempts=1)
        except ToolError as error:
            logger.info("a session is left to %s: %s", self.client.name, error)

    async def aclose(self) -> None:
        await asyncio.gather(*map(self.finish, list(self._sessions)))
        await self.client.aclose()

    async def _run_in_session(self, code: str, trajectory_id: str, session: _Session) -> Outcome:
        fields = {"session_id": session.id, "continue_session": session.started, "run_id": secrets.token_hex(16)}
        try:
            reply = await self._ask(code, fields)
        except HttpError as error:
            if error.code != _GONE:
                raise
            self._sessions.pop(trajectory_id, None)
            message = "the session was lost, its variables and files with it; the next program starts anew"
            raise ToolError(message, ToolStatus.DISCONNECTED) from None
        if reply.session_id != session.id:
            self._sessions.pop(trajectory_id, None)
            message = (
                f"{self.client.name} keeps no sessions: set `stateful: false`, or use `agentic-rollout serve-code`"
            )
            raise ToolError(message, ToolStatus.BAD_REPLY)
        session.started = True
        if reply.outcome.session_lost:
            self._sessions.pop(trajectory_id, None)
        return reply.outcome

    async def _ask(self, code: str, fields: Mapping[str, Any]) -> _Reply:
        reply = await self.client.request_json(
            "POST", _ROUTE, json={"code": code, **self._common, **fields}, parse=_parse_reply
        )
        if self._want_value and not reply.has_value:
            message = (
                f"{self.client.name} knows no values: set `show_value: false`, or use `agentic-rollout serve-code`"
            )
            raise ToolError(message, ToolStatus.BAD_REPLY)
        return reply


def _parse_reply(reply: Any) -> _Reply:
    """Reads a reply of SandboxFusion's, or of this package's, which says more.

    Raises:
        ToolError: `http_5xx`, if the sandbox failed; `bad_reply`.
    """
    if not isinstance(reply, Mapping):
        raise ToolError("the reply is no object", ToolStatus.BAD_REPLY)
    result = reply.get("run_result")
    if reply.get("status") == "SandboxError" or (isinstance(result, Mapping) and result.get("status") == "Error"):
        raise ToolError("the sandbox failed", ToolStatus.HTTP_5XX)
    if not isinstance(result, Mapping):
        raise ToolError("the reply has no `run_result`", ToolStatus.BAD_REPLY)
    return_code = result.get("return_code")
    value = result.get("value")
    outcome = Outcome(
        stdout=_printed(result, "stdout"),
        stderr=_printed(result, "stderr"),
        ending=_ending(result),
        return_code=return_code if isinstance(return_code, int) else None,
        value=value if isinstance(value, str) else None,
        session_lost=reply.get("session_lost") is True,
    )
    return _Reply(outcome, reply.get("session_id"), has_value="value" in result)


def _printed(result: Mapping[str, Any], stream: str) -> Printed:
    text = result.get(stream) or ""
    if not isinstance(text, str):
        raise ToolError(f"`{stream}` is no text", ToolStatus.BAD_REPLY)
    total_bytes = result.get(f"{stream}_bytes")
    return Printed(text, total_bytes if isinstance(total_bytes, int) else 0)


def _ending(result: Mapping[str, Any]) -> RunStatus:
    """How the program ended: in this package's words where the server gives them."""
    ending = result.get("ending")
    if isinstance(ending, str) and ending in set(RunStatus):
        return RunStatus(ending)
    match result.get("status"):
        case "TimeLimitExceeded":
            return RunStatus.TIMEOUT
        case "Finished":
            return_code = result.get("return_code")
            return RunStatus.KILLED if isinstance(return_code, int) and return_code < 0 else RunStatus.FINISHED
    raise ToolError("`run_result` has no known `status`", ToolStatus.BAD_REPLY)
