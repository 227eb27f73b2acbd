"""The tool protocol, and the toolbox that turns every outcome of a call into a typed record."""

from __future__ import annotations

import asyncio
import difflib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentic_rollout.errors import ToolError
from agentic_rollout.tools.schemas import ToolSchema, tool_schema
from agentic_rollout.types import ToolCall, ToolRequest, ToolStatus

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToolContext:
    """Which trajectory is calling.

    Attributes:
        trajectory_id: unique among the trajectories in flight; the key for a tool that keeps state.
        row: the columns of the data set's row, e.g. verl's `tools_kwargs`.
    """

    trajectory_id: str
    row: Mapping[str, Any] = field(default_factory=dict)


class Tool(Protocol):
    """A tool: the text of an observation for the arguments of a call.

    `call` may raise anything: the toolbox makes a typed failure of it (`ToolError` chooses the status). It runs on the
    worker's event loop, so long computations belong in a thread (`asyncio.to_thread`, or a `batching.Batcher`).

    A tool may have an attribute `schema`, a mapping with `description` and `parameters` (a JSON schema): the toolbox
    then checks arguments before it calls the tool.
    """

    timeout_s: float

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str: ...

    async def finish(self, trajectory_id: str) -> None:
        """The trajectory has ended: drop what was kept for it."""
        ...

    async def aclose(self) -> None:
        """The worker ends: release connections and processes."""
        ...


class BaseTool:
    """Defaults for the parts of the protocol that a stateless tool does not need."""

    timeout_s: float = 30.0

    async def finish(self, trajectory_id: str) -> None:
        return None

    async def aclose(self) -> None:
        return None


class Toolbox:
    """Named tools. A call always ends in a `ToolCall`, whatever the tool does."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = dict(tools)
        self._schemas: dict[str, ToolSchema] = {name: tool_schema(tool) for name, tool in tools.items()}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    def schemas(self) -> list[dict[str, Any]]:
        """Every tool as OpenAI's API describes functions, which is what chat templates take as `tools`."""
        return [schema.as_function(name) for name, schema in self._schemas.items()]

    async def call(self, request: ToolRequest, context: ToolContext) -> ToolCall:
        """Runs one call within its tool's deadline."""
        start = time.perf_counter()
        status, text, error = await self._outcome(request, context)
        latency_s = time.perf_counter() - start
        return ToolCall(request.name, dict(request.arguments), status, text, latency_s, error)

    async def finish(self, trajectory_id: str) -> None:
        """Tells every tool that a trajectory has ended; a tool that fails at it, or hangs, is logged, not fatal."""
        for name, tool in self._tools.items():
            try:
                async with asyncio.timeout(tool.timeout_s):
                    await tool.finish(trajectory_id)
            except Exception:
                logger.exception("tool %r failed to finish trajectory %s", name, trajectory_id)

    async def aclose(self) -> None:
        """Closes every tool; one that fails at it, or hangs, is logged and keeps no other from closing."""
        for name, tool in self._tools.items():
            try:
                async with asyncio.timeout(tool.timeout_s):
                    await tool.aclose()
            except Exception:
                logger.exception("tool %r failed to close", name)

    async def _outcome(self, request: ToolRequest, context: ToolContext) -> tuple[ToolStatus, str, str | None]:
        if request.problem is not None:
            return ToolStatus.MALFORMED, request.problem, None
        tool = self._tools.get(request.name)
        if tool is None:
            return ToolStatus.UNKNOWN_TOOL, self._unknown(request.name), None
        try:
            arguments = self._schemas[request.name].check(request.arguments)
            async with asyncio.timeout(tool.timeout_s):
                text = await tool.call(arguments, context)
            return ToolStatus.OK, _encodable(text), None
        except TimeoutError as error:
            text = f"no answer from {request.name} within {tool.timeout_s:g} s"
            return ToolStatus.TIMEOUT, text, type(error).__name__
        except ToolError as error:
            return _failure_status(error), _encodable(str(error)), type(error).__name__
        except Exception as error:  # a tool's failure is data, never the end of a batch
            return _unforeseen(request.name, error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the trajectory is cancelled; otherwise something inside the tool was
            return _unforeseen(request.name, error)

    def _unknown(self, name: str) -> str:
        lower_case = {known.lower(): known for known in self._tools}
        nearest = difflib.get_close_matches(name.lower(), lower_case, n=1)
        hint = f"; did you mean {lower_case[nearest[0]]!r}?" if nearest else ""
        return f"there is no tool {name!r}{hint} (available: {', '.join(self._tools) or 'none'})"


def _unforeseen(name: str, error: BaseException) -> tuple[ToolStatus, str, str]:
    kind = type(error).__name__
    logger.warning("tool %r failed: %s: %s", name, kind, error)
    return ToolStatus.ERROR, f"{name} failed ({kind})", kind


def _encodable(text: str) -> str:
    """`text` without lone surrogates, which no tokenizer takes; raises TypeError for what is no text."""
    if not isinstance(text, str):
        raise TypeError(f"a tool's result must be text, not {type(text).__name__}")
    return text.encode(errors="replace").decode()


def _failure_status(error: ToolError) -> ToolStatus:
    """The status that a tool chose for its failure, if it is one."""
    failures = set(ToolStatus) - {ToolStatus.OK}
    return ToolStatus(error.status) if error.status in failures else ToolStatus.ERROR
