"""The body of `POST /run_code` and of its reply, as SandboxFusion has them.

Fields beyond that contract, which its clients do not send and its servers ignore:

    session_id          the program shares variables and files with those before it of the same id
    continue_session    the session must be there already: a program is not to meet a new one unawares
    run_id              a request sent again with the id of the session's last program is answered, but not run, again
    want_value          the last expression's value is asked for

and in the reply: `session_id` as it was sent, `session_lost`, and in `run_result` `ending` (a `RunStatus`),
`stdout_bytes`, `stderr_bytes` (as many were written) and `value`.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Any

from agentic_rollout.errors import ToolError
from agentic_rollout.sandbox.execution import Program
from agentic_rollout.sandbox.results import RunResult, RunStatus
from agentic_rollout.server.code_settings import CodeServerSettings
from agentic_rollout.server.replies import RefusedError, bad_body
from agentic_rollout.server.routing import parse_flag, parse_object

IDENTIFIER = re.compile(r"[\w.-]{1,128}", re.ASCII)

_KILLED = -9  # the return code, as clients know it, of a program that was ended for a limit other than its time


@dataclass(frozen=True, slots=True)
class RunRequest:
    """`POST /run_code`.

    Attributes:
        memory_limit_mb: None for the server's own.
        session_id: None for a process of its own.
        continue_session: whether the session must be there already.
        run_id: tells a request that is sent again; None for no such check.
    """

    program: Program
    memory_limit_mb: int | None
    session_id: str | None
    continue_session: bool
    run_id: str | None


def parse_run_code(body: bytes, settings: CodeServerSettings) -> RunRequest:
    """Reads a request.

    Raises:
        RefusedError: 422; it names the field.
    """
    fields = parse_object(body)
    code = fields.get("code")
    if not isinstance(code, str):
        raise bad_body("`code` must be a text")
    if fields.get("language") != "python":
        raise bad_body("`language` must be python: this server knows no other")
    _seconds(fields, "compile_timeout", settings)  # Python needs none
    program = Program(
        code=code,
        stdin=(_text(fields, "stdin") or "").encode(),
        files=_files(fields, settings),
        fetch_files=_fetch_files(fields, settings),
        timeout_s=_seconds(fields, "run_timeout", settings) or settings.sandbox.wall_time_s,
        want_value=parse_flag(fields, "want_value"),
    )
    request = RunRequest(
        program=program,
        memory_limit_mb=_memory_limit(fields, settings),
        session_id=_identifier(fields, "session_id"),
        continue_session=parse_flag(fields, "continue_session"),
        run_id=_identifier(fields, "run_id"),
    )
    if request.session_id is not None and request.memory_limit_mb is not None:
        raise bad_body("`memory_limit_MB` must be -1 in a session, whose limit is the server's own")
    return request


def run_json(result: RunResult, session_id: str | None) -> dict[str, Any]:
    """The reply about a program that ran, however it ended."""
    in_time = result.status is not RunStatus.TIMEOUT
    return_code = _KILLED if result.return_code is None else result.return_code
    succeeded = result.status is RunStatus.FINISHED and return_code == 0
    run_result = {
        "status": "Finished" if in_time else "TimeLimitExceeded",
        "execution_time": result.execution_time_s,
        "return_code": return_code if in_time else None,
        "stdout": result.stdout.text(),
        "stderr": result.stderr.text(),
        "ending": result.status,
        "stdout_bytes": result.stdout.total_bytes,
        "stderr_bytes": result.stderr.total_bytes,
        "value": None if result.value is None else _encodable(result.value),
    }
    files = {path: base64.b64encode(data).decode() for path, data in result.files.items()}
    return {
        **_reply("Success" if succeeded else "Failed", run_result=run_result, files=files),
        "session_id": session_id,
        "session_lost": result.session_lost,
    }


def failure_json(error: ToolError) -> dict[str, Any]:
    """The reply where the sandbox failed, and what the program did is not known."""
    return _reply("SandboxError", message=str(error))


def _reply(
    status: str, *, message: str = "", run_result: dict[str, Any] | None = None, files: dict[str, str] | None = None
) -> dict[str, Any]:
    return {
        "status": status,
        "message": message,
        "compile_result": None,
        "run_result": run_result,
        "executor_pod_name": None,
        "files": files or {},
    }


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()


def _text(fields: dict[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise bad_body(f"`{name}` must be null or a text")
    return value


def _identifier(fields: dict[str, Any], name: str) -> str | None:
    value = _text(fields, name)
    if value is not None and not IDENTIFIER.fullmatch(value):
        raise bad_body(f"`{name}` must be 1 to 128 letters, digits, dots, dashes and underscores")
    return value


def _seconds(fields: dict[str, Any], name: str, settings: CodeServerSettings) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= settings.max_run_timeout_s:
        raise bad_body(f"`{name}` must be a number above 0, of at most {settings.max_run_timeout_s:g} seconds")
    return float(value)


def _memory_limit(fields: dict[str, Any], settings: CodeServerSettings) -> int | None:
    value = fields.get("memory_limit_MB")
    if value is None or (value == -1 and type(value) is int):
        return None
    if type(value) is not int or not 0 < value <= settings.max_memory_mb:
        raise bad_body(f"`memory_limit_MB` must be -1 or a whole number from 1 to {settings.max_memory_mb}")
    return value


def _files(fields: dict[str, Any], settings: CodeServerSettings) -> dict[str, bytes]:
    given = fields.get("files")
    if given is None:
        return {}
    if not isinstance(given, dict) or len(given) > settings.sandbox.max_files:
        raise bad_body(f"`files` must be an object with at most {settings.sandbox.max_files} paths")
    # SandboxFusion's client may send null for a file, which then is none.
    return {path: _decoded(content) for path, content in given.items() if content is not None}


def _decoded(content: object) -> bytes:
    refusal: RefusedError = bad_body("`files` must hold contents in base64")
    if not isinstance(content, str):
        raise refusal
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        raise refusal from None


def _fetch_files(fields: dict[str, Any], settings: CodeServerSettings) -> list[str]:
    paths = fields.get("fetch_files")
    if paths is None:
        return []
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise bad_body("`fetch_files` must be a list of paths")
    if len(paths) > settings.sandbox.max_files:
        raise bad_body(f"`fetch_files` may hold at most {settings.sandbox.max_files} paths")
    return paths
