"""Replies and refusals, before any web framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from agentic_rollout.errors import ToolError
from agentic_rollout.types import ToolStatus

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Reply:
    """What is sent back."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


class RefusedError(Exception):
    """A request that is not answered with what it asked for.

    Args:
        status: HTTP status.
        error: one word for programs.
        detail: one sentence for people; holds nothing of the request but numbers and names of fields.
        headers: sent along.
    """

    def __init__(self, status: int, error: str, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.error = error
        self.headers = headers or {}

    def reply(self) -> Reply:
        body = orjson.dumps({"error": self.error, "detail": str(self)})
        return Reply(self.status, body, headers=self.headers)


def bad_body(detail: str) -> RefusedError:
    """The request's body is not what the route takes."""
    return RefusedError(422, "bad_request", detail)


def busy(error: str, detail: str, retry_after_s: int) -> RefusedError:
    """The request may be sent again, to this server or to another."""
    return RefusedError(503, error, detail, {"Retry-After": str(retry_after_s)})


_HTTP_STATUS = {
    ToolStatus.BAD_ARGUMENTS: 422,
    ToolStatus.FORBIDDEN: 403,
    ToolStatus.TIMEOUT: 504,
    ToolStatus.REFUSED: 502,
    ToolStatus.DISCONNECTED: 502,
    ToolStatus.HTTP_4XX: 502,
    ToolStatus.HTTP_5XX: 502,
    ToolStatus.BAD_REPLY: 502,
    ToolStatus.RATE_LIMITED: 503,
    ToolStatus.UNAVAILABLE: 503,
}


def backend_failure(error: ToolError, retry_after_s: int) -> RefusedError:
    """How the failure of what stands behind the server is told: `error` is its `ToolStatus`."""
    failure = tool_failure(error)
    code = _HTTP_STATUS.get(failure, 500)
    if code == 503:
        return busy(failure, str(error), retry_after_s)
    return RefusedError(code, failure, str(error))


def tool_failure(error: ToolError) -> ToolStatus:
    """The status of a failure; `error` for one that is not known."""
    return ToolStatus(error.status) if error.status in set(ToolStatus) - {ToolStatus.OK} else ToolStatus.ERROR
