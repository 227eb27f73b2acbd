"""Tools of MCP servers, started as a process of their own (stdio) or asked over HTTP (streamable HTTP)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import difflib
import importlib.util
import json
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal

import orjson
import pydantic_core
from pydantic import Field

from agentic_rollout.config import Settings
from agentic_rollout.errors import SettingsError, ToolError
from agentic_rollout.tools.base import BaseTool, ToolContext
from agentic_rollout.tools.schemas import ToolSchema, json_schema
from agentic_rollout.types import ToolStatus

logger = logging.getLogger(__name__)

_CLOSE_S = 10.0  # a server is asked to end, then killed, which takes a few seconds at most


class McpSettings(Settings):
    """Settings of tools of type `mcp`: one server, started by `command` or reached at `url`. Times are in seconds."""

    type: Literal["mcp"] = "mcp"
    command: str | None = Field(default=None, description="program that serves MCP on its standard input and output")
    args: tuple[str, ...] = Field(default=(), description="the program's arguments; no place for secrets")
    env: tuple[str, ...] = Field(default=(), description="names of environment variables that the program is given")
    cwd: str | None = Field(default=None, description="folder in which the program is started")
    url: str | None = Field(default=None, pattern="^https?://", description="address of a streamable HTTP endpoint")
    token_env: str | None = Field(default=None, description="environment variable that holds the endpoint's token")
    trust_env: bool = Field(default=False, description="use the proxies that HTTP_PROXY and its kin name")
    prefix: str = Field(default="", description="put before the names that the server gives its tools")
    allow: tuple[str, ...] | None = Field(default=None, description="the server's tools to offer; null: all of them")
    timeout_s: float = Field(default=30.0, gt=0, description="one call, waiting for a restart included")
    start_timeout_s: float = Field(default=30.0, gt=0, description="until a server that was started answers")
    restart_wait_s: float = Field(default=10.0, ge=0, description="how long a call waits for a server to come back")
    backoff_s: float = Field(default=0.2, gt=0, description="pause before a dead server is started again; it doubles")
    backoff_max_s: float = Field(default=10.0, gt=0, description="longest pause")
    max_chars: int = Field(default=100_000, ge=1, description="longer results are cut before they are tokenized")


def start_mcp_tools(settings: McpSettings, *, key: str) -> dict[str, McpTool]:
    """Connects to a server and offers its tools, by their names with the prefix.

    Raises:
        SettingsError: the package `mcp` is missing, the server does not start, or it lacks a tool that is allowed.
    """
    _check(settings, key)
    server = McpServer(settings, name=key.rpartition(".")[2])
    try:
        listed = {tool.name: tool for tool in server.start(key=key)}
        for name in settings.allow or ():
            if name not in listed:
                nearest = difflib.get_close_matches(name, listed, n=1)
                remedy = f"Did you mean {nearest[0]!r}?" if nearest else "Remove it."
                raise SettingsError(f"{key}.allow", name, f"tools of the server: {', '.join(listed)}", remedy)
        names = list(listed) if settings.allow is None else settings.allow
        return {settings.prefix + name: McpTool(server, listed[name], settings) for name in names}
    except BaseException:
        server.close()
        raise


class McpTool(BaseTool):
    """One tool of a server; all trajectories of the worker share the server."""

    def __init__(self, server: McpServer, listed: Any, settings: McpSettings) -> None:
        self.server = server
        self.timeout_s = settings.timeout_s
        self.schema = _schema(listed)
        self._name: str = listed.name
        self._max_chars = settings.max_chars

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        _check_sendable(arguments)
        result = await self.server.call(self._name, arguments)
        text = _result_text(result)
        if len(text) > self._max_chars:
            text = f"{text[: self._max_chars]}\n(cut after {self._max_chars} of {len(text)} characters)"
        if result.is_error:
            raise ToolError(text or "the tool failed and did not say why")
        return text

    async def aclose(self) -> None:
        await asyncio.to_thread(self.server.close)


class McpServer:
    """The connection to one server, in a thread with an event loop of its own.

    A session lives in one task from its beginning to its end, and rollouts may come from several event loops. The task
    here holds the session; when the server dies, it starts or reaches it again, after a pause that doubles. Calls in
    flight then fail as `disconnected`; they are not repeated, as nobody knows what they have done. Calls that come in
    meanwhile wait `restart_wait_s`, then fail as `unavailable`.
    """

    def __init__(self, settings: McpSettings, *, name: str) -> None:
        self._settings = settings
        self._name = name
        self._listed: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name=f"mcp-{name}", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None  # None again when the thread ends
        self._task: asyncio.Task[None] | None = None
        self._up: asyncio.Event  # a session stands
        self._ended: asyncio.Event  # the server has closed its side of it
        self._client: Any = None

    def start(self, *, key: str) -> list[Any]:
        """Starts the thread and waits for the server's list of tools.

        Raises:
            SettingsError: the server does not start, or does not answer in time.
        """
        self._thread.start()
        try:
            return self._listed.result()
        except Exception as error:
            expected = "an MCP server that starts and lists its tools"
            remedy = f"It failed with {_reason(error)}."
            if self._settings.command is None:  # the address may hold a secret
                raise SettingsError(f"{key}.url", None, expected, remedy) from None
            remedy += " What the program wrote to its standard error is in the log."
            raise SettingsError(f"{key}.command", self._settings.command, expected, remedy) from None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """The result of one call, from whichever event loop.

        Raises:
            ToolError: the server is down, broke down, or refused the call.
        """
        if self._loop is None:
            raise self._failure("is closed", ToolStatus.UNAVAILABLE)
        future = asyncio.run_coroutine_threadsafe(self._call(name, dict(arguments)), self._loop)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Ends the session, the server that was started for it, and the thread."""
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            loop.call_soon_threadsafe(task.cancel)
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            pass
        except Exception as error:
            if not self._listed.done():
                self._listed.set_exception(error)
        finally:
            self._loop = None

    async def _serve(self) -> None:
        self._up, self._ended = asyncio.Event(), asyncio.Event()
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        pause_s = self._settings.backoff_s
        while True:
            began_s = self._loop.time()
            try:
                await self._hold_session()
                reason = "it ended"
            except Exception as error:
                if not self._listed.done():
                    raise
                reason = _reason(error)
            if self._loop.time() - began_s > self._settings.backoff_max_s:
                pause_s = self._settings.backoff_s
            logger.warning("MCP server %s is gone (%s); trying again in %.2g s", self._name, reason, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._settings.backoff_max_s)

    async def _hold_session(self) -> None:
        """Connects, and returns or raises when the connection has ended."""
        from mcp import Client

        self._ended.clear()
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(self._settings.start_timeout_s):
                self._client = await stack.enter_async_context(Client(_transport(self._settings, self._ended)))
                if not self._listed.done():
                    self._listed.set_result(await _list_tools(self._client))
            self._up.set()
            try:
                await self._ended.wait()
            finally:
                self._up.clear()  # before the session is wound up, which may take seconds

    async def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        from mcp import MCPError

        try:
            async with asyncio.timeout(self._settings.restart_wait_s):
                await self._up.wait()
        except TimeoutError:
            raise self._failure("is not running", ToolStatus.UNAVAILABLE) from None
        try:
            return await self._client.call_tool(name, arguments)
        except MCPError as error:
            raise self._call_failure(error) from error

    def _call_failure(self, error: Any) -> ToolError:
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS

        if (
            error.code == CONNECTION_CLOSED or error.message == "Session terminated"
        ):  # an HTTP server that was restarted
            self._ended.set()
            return self._failure("broke down during the call", ToolStatus.DISCONNECTED)
        if error.code == INVALID_PARAMS:
            return ToolError(error.message, ToolStatus.BAD_ARGUMENTS)
        return self._failure(f"failed: {error.message}", ToolStatus.ERROR)

    def _failure(self, what: str, status: ToolStatus) -> ToolError:
        return ToolError(f"the MCP server {self._name} {what}", status)


class _WatchedStream:
    """What a server writes, which tells when it ends."""

    def __init__(self, stream: Any, ended: asyncio.Event) -> None:
        self._stream = stream
        self._ended = ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self) -> _WatchedStream:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except StopAsyncIteration:
            self._ended.set()
            raise

    async def __aenter__(self) -> _WatchedStream:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *exception: Any) -> Any:
        return await self._stream.__aexit__(*exception)


@asynccontextmanager
async def _transport(settings: McpSettings, ended: asyncio.Event) -> AsyncIterator[tuple[Any, Any]]:
    """The two streams of a connection; `ended` is set when the server has closed its side."""
    async with AsyncExitStack() as stack:
        if settings.command is not None:
            from mcp.client.stdio import StdioServerParameters, stdio_client

            program = StdioServerParameters(
                command=settings.command,
                args=list(settings.args),
                env={name: os.environ[name] for name in settings.env},
                cwd=settings.cwd,
            )
            streams = stdio_client(program, errlog=sys.__stderr__ or sys.stderr)
        else:
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            token = "" if settings.token_env is None else os.environ[settings.token_env].strip()
            headers = {"Authorization": f"Bearer {token}"} if token else None
            timeout = httpx2.Timeout(settings.start_timeout_s, read=None)  # a call has a deadline of its own
            http = httpx2.AsyncClient(headers=headers, timeout=timeout, trust_env=settings.trust_env)
            await stack.enter_async_context(http)
            streams = streamable_http_client(settings.url or "", http_client=http)
        read, write = await stack.enter_async_context(streams)
        yield _WatchedStream(read, ended), write


async def _list_tools(client: Any) -> list[Any]:
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def _check(settings: McpSettings, key: str) -> None:
    if importlib.util.find_spec("mcp") is None:
        remedy = 'Install it: pip install "agentic-rollout[mcp]".'
        raise SettingsError(f"{key}.type", "mcp", "an installed package mcp", remedy)
    if (settings.command is None) == (settings.url is None):
        remedy = "Say how to start the server, or where it is."
        raise SettingsError(f"{key}.command", settings.command, "either `command` or `url`", remedy)
    for name in settings.env:
        if name not in os.environ:
            raise _not_set(f"{key}.env", name)
    if settings.token_env is not None and not os.environ.get(settings.token_env, "").strip():
        raise _not_set(f"{key}.token_env", settings.token_env)


def _not_set(key: str, name: str) -> SettingsError:
    return SettingsError(key, name, "the name of an environment variable that is set", "Export it in every worker.")


def _schema(listed: Any) -> ToolSchema:
    description = listed.description or ""
    try:
        return json_schema(description, listed.input_schema)
    except SettingsError:
        logger.warning("the arguments of %s are not checked: its JSON schema is not valid", listed.name)
        return ToolSchema(description, listed.input_schema, check=lambda arguments: arguments)


def _check_sendable(arguments: Mapping[str, Any]) -> None:
    """A message that cannot be written ends the session, with everybody's calls; one that cannot be read hangs."""
    try:
        pydantic_core.from_json(orjson.dumps([[[[[[[[dict(arguments)]]]]]]]]))  # nested deeper than in the message
    except (TypeError, ValueError) as error:
        raise ToolError(f"the arguments cannot be sent as JSON: {error}", ToolStatus.BAD_ARGUMENTS) from None


def _result_text(result: Any) -> str:
    texts = [_block_text(block) for block in result.content]
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)


def _block_text(block: Any) -> str:
    """Text as it is; of anything else, what kind it is."""
    if block.type == "resource":
        block = block.resource
    text = getattr(block, "text", None)
    return text if isinstance(text, str) else f"[{getattr(block, 'mime_type', None) or block.type}]"


def _reason(error: BaseException) -> str:
    """The first cause in a group of exceptions; without its message where that may name an address."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, FileNotFoundError | PermissionError):
        return f"{error.strerror}: {error.filename}"
    return type(error).__name__
