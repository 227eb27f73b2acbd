"""An MCP server with a few tools: `python mcp_server.py`, or with a port for HTTP and, perhaps, a token."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import uvicorn
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

server = MCPServer("sums", log_level="ERROR")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def process_id() -> int:
    """Tells which process serves."""
    return os.getpid()


@server.tool()
def variable(name: str) -> str:
    """Tells the value of an environment variable."""
    return os.environ.get(name, "not set")


@server.tool()
def several() -> list[str | Image]:
    """Returns two texts and a picture."""
    return ["one", Image(data=b"\x89PNG", format="png"), "two"]


@server.tool()
def refuse(reason: str) -> str:
    """Fails."""
    raise ToolError(reason)


@server.tool()
def write(characters: int) -> str:
    """Returns a long text."""
    return "x" * characters


@server.tool()
def take(value: Any) -> str:
    """Takes anything."""
    return type(value).__name__


@server.tool()
async def wait(seconds: float) -> str:
    """Takes its time."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
async def die() -> str:
    """Kills its own process."""
    await asyncio.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


class TokenWanted:
    """Answers 401 to requests without the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self.expected = (b"authorization", f"Bearer {token}".encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.expected not in scope["headers"]:
            await PlainTextResponse("who are you?", status_code=401)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        server.run("stdio")
    else:
        app: ASGIApp = server.streamable_http_app()
        if len(sys.argv) == 3:
            app = TokenWanted(app, sys.argv[2])
        uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
