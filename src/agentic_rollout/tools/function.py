"""A typed function as a tool."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from agentic_rollout.tools.base import BaseTool, ToolContext
from agentic_rollout.tools.schemas import signature_schema

_CONTEXT = "context"


class FunctionTool(BaseTool):
    """Calls a function whose signature and docstring are the tool's schema.

    Args:
        function: returns the text of an observation, and takes a call's arguments as keywords; one named `context`
            gets the `ToolContext` instead. A coroutine runs on the event loop, any other function in a thread.
        timeout_s: deadline of one call, in seconds.

    Raises:
        SettingsError: the signature cannot be described in JSON.
    """

    def __init__(self, function: Callable[..., Any], *, timeout_s: float = 30.0) -> None:
        self.timeout_s = timeout_s
        self.schema = signature_schema(function, without=(_CONTEXT,))
        self._function = function
        self._takes_context = _CONTEXT in inspect.signature(function).parameters

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        keywords = {**arguments, _CONTEXT: context} if self._takes_context else dict(arguments)
        text: str
        if inspect.iscoroutinefunction(self._function):
            text = await self._function(**keywords)
        else:
            text = await asyncio.to_thread(self._function, **keywords)
        return text
