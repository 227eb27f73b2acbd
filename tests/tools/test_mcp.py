"""Tools of MCP servers: real ones, of the official package, over stdio and over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

pytest.importorskip("mcp")

from agentic_rollout.errors import SettingsError
from agentic_rollout.tools.base import Toolbox, ToolContext
from agentic_rollout.tools.build import build_toolbox
from agentic_rollout.types import StopReason, ToolCall, ToolRequest, ToolStatus
from chat import chat_loop, prompts, tool_call

SERVER = str(Path(__file__).with_name("mcp_server.py"))
STDIO: dict[str, Any] = {
    "type": "mcp",
    "command": sys.executable,
    "args": [SERVER],
    "env": ["PYTHONPATH"] if os.environ.get("PYTHONPATH") else [],
    "backoff_s": 0.05,
}
CONTEXT = ToolContext("row")

ResultT = TypeVar("ResultT")


def use(settings: dict[str, Any], work: Callable[[Toolbox], Coroutine[Any, Any, ResultT]]) -> ResultT:
    """Does something with the tools of a server, which ends afterwards."""
    toolbox = build_toolbox({"sums": settings})

    async def main() -> ResultT:
        try:
            return await work(toolbox)
        finally:
            await toolbox.aclose()

    return asyncio.run(main())


async def call(toolbox: Toolbox, name: str, /, **arguments: Any) -> ToolCall:
    return await toolbox.call(ToolRequest(name, arguments), CONTEXT)


def calls(settings: dict[str, Any], *requests: tuple[str, dict[str, Any]]) -> list[ToolCall]:
    async def work(toolbox: Toolbox) -> list[ToolCall]:
        return [await call(toolbox, name, **arguments) for name, arguments in requests]

    return use(settings, work)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def http_server(port: int, *token: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, SERVER, str(port), *token]) as process:
        try:
            while True:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert process.poll() is None
                time.sleep(0.02)
            yield process
        finally:
            process.kill()


def threads_of_servers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("mcp-")}


def runs(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def sums() -> Iterator[Toolbox]:
    """One server for the tests that leave it as it is; they use it from an event loop each."""
    toolbox = build_toolbox({"sums": {**STDIO, "timeout_s": 2.0}})
    yield toolbox
    asyncio.run(toolbox.aclose())


def test_tools_of_a_server_have_its_schemas_and_answer(sums: Toolbox) -> None:
    schemas = {schema["function"]["name"]: schema["function"] for schema in sums.schemas()}
    assert schemas["add"]["description"] == "Adds two numbers."
    assert schemas["add"]["parameters"]["properties"] == {"a": {"type": "integer"}, "b": {"type": "integer"}}
    added = asyncio.run(call(sums, "add", a=2, b=3))
    assert (added.status, added.text) == (ToolStatus.OK, "5")
    several = asyncio.run(call(sums, "several"))
    assert (several.status, several.text) == (ToolStatus.OK, "one\n[image/png]\ntwo")


@pytest.mark.parametrize(
    ("name", "arguments", "status", "text"),
    [
        ("refuse", {"reason": "not on Sundays"}, ToolStatus.ERROR, "Error executing tool refuse: not on Sundays"),
        ("add", {"a": "two", "b": 3}, ToolStatus.BAD_ARGUMENTS, "'a' must be integer"),
        ("Add", {"a": 2, "b": 3}, ToolStatus.UNKNOWN_TOOL, "did you mean 'add'?"),
        ("wait", {"seconds": 30}, ToolStatus.TIMEOUT, "no answer from wait within 2 s"),
    ],
)
def test_failures_are_typed(sums: Toolbox, name: str, arguments: dict[str, Any], status: ToolStatus, text: str) -> None:
    record = asyncio.run(call(sums, name, **arguments))
    assert record.status is status
    assert text in record.text


@pytest.mark.parametrize("depth", [180, 190, 230, 900])
def test_arguments_that_cannot_be_sent_harm_nobody_elses_call(sums: Toolbox, depth: int) -> None:
    deep: Any = "x"
    for _ in range(depth):
        deep = [deep]

    async def main() -> tuple[ToolCall, ToolCall, ToolCall]:
        waiting = asyncio.create_task(call(sums, "wait", seconds=0.3))
        await asyncio.sleep(0.05)
        odd = await call(sums, "take", value="a\ud800b")
        return odd, await call(sums, "take", value=deep), await waiting

    odd, nested, waited = asyncio.run(main())
    assert odd.status is ToolStatus.BAD_ARGUMENTS
    assert nested.status in (ToolStatus.OK, ToolStatus.BAD_ARGUMENTS)
    assert waited.status is ToolStatus.OK


def test_names_get_the_prefix_and_only_allowed_tools_are_offered() -> None:
    settings = {**STDIO, "prefix": "sums_", "allow": ["add", "write"]}

    async def work(toolbox: Toolbox) -> tuple[tuple[str, ...], ToolCall]:
        return toolbox.names, await call(toolbox, "sums_add", a=1, b=1)

    names, record = use(settings, work)
    assert names == ("sums_add", "sums_write")
    assert record.text == "2"


def test_long_result_is_cut() -> None:
    (record,) = calls({**STDIO, "max_chars": 50}, ("write", {"characters": 200_000}))
    assert record.text == "x" * 50 + "\n(cut after 50 of 200000 characters)"


def test_program_gets_the_variables_named_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUMS_KEY", "k3y")
    monkeypatch.setenv("OTHER_KEY", "0ther")
    given, kept = calls(
        {**STDIO, "env": [*STDIO["env"], "SUMS_KEY"]},
        ("variable", {"name": "SUMS_KEY"}),
        ("variable", {"name": "OTHER_KEY"}),
    )
    assert (given.text, kept.text) == ("k3y", "not set")


def test_server_ends_with_its_toolbox() -> None:
    before = threads_of_servers()
    (record,) = calls(STDIO, ("process_id", {}))
    assert not runs(int(record.text))
    assert not threads_of_servers() - before


def test_call_after_the_end_is_unavailable() -> None:
    toolbox = build_toolbox({"sums": STDIO})

    async def main() -> ToolCall:
        await toolbox.aclose()
        return await call(toolbox, "add", a=1, b=1)

    assert asyncio.run(main()).status is ToolStatus.UNAVAILABLE


def test_killed_server_is_started_again() -> None:
    async def work(toolbox: Toolbox) -> tuple[str, ToolCall, ToolCall, ToolCall]:
        first = (await call(toolbox, "process_id")).text
        waiting = asyncio.create_task(call(toolbox, "wait", seconds=30))
        await asyncio.sleep(0.1)
        os.kill(int(first), signal.SIGKILL)
        broken = await waiting
        return first, broken, await call(toolbox, "add", a=1, b=2), await call(toolbox, "process_id")

    first, broken, added, second = use(STDIO, work)
    assert broken.status is ToolStatus.DISCONNECTED
    assert broken.latency_s < 5.0
    assert (added.status, added.text) == (ToolStatus.OK, "3")
    assert second.text != first


def test_server_killed_in_mid_rollout_loses_no_trajectory() -> None:
    rows = 8

    def turns(row: int, turn: int) -> str:
        if turn == 0:
            return tool_call("die") if row == 0 else tool_call("wait", seconds=30) + tool_call("add", a=row, b=0)
        return tool_call("add", a=row, b=100) if turn == 1 else f"The sum of row {row} is known."

    async def work(toolbox: Toolbox) -> list[Any]:
        return await chat_loop(turns, toolbox).run_batch(prompts(rows))

    trajectories = use(STDIO, work)
    assert {trajectory.stop_reason for trajectory in trajectories} == {StopReason.ANSWERED}
    assert [trajectory.answer for trajectory in trajectories] == [
        f"The sum of row {row} is known." for row in range(rows)
    ]
    for row, trajectory in enumerate(trajectories):
        broken, *_, last = trajectory.tool_calls
        assert broken.status is ToolStatus.DISCONNECTED
        assert (last.status, last.text) == (ToolStatus.OK, str(row + 100))


def test_server_that_does_not_come_back_is_unavailable(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(f"import runpy\nrunpy.run_path({SERVER!r}, run_name='__main__')\n")
    settings = {**STDIO, "args": [str(script)], "restart_wait_s": 0.3}

    async def work(toolbox: Toolbox) -> tuple[ToolCall, ToolCall]:
        script.unlink()
        return await call(toolbox, "die"), await call(toolbox, "add", a=1, b=1)

    broken, later = use(settings, work)
    assert broken.status is ToolStatus.DISCONNECTED
    assert (later.status, later.text) == (ToolStatus.UNAVAILABLE, "the MCP server sums is not running")


# Over HTTP


def test_server_over_http_answers() -> None:
    port = free_port()
    with http_server(port):
        added, refused = calls(
            {"type": "mcp", "url": f"http://127.0.0.1:{port}/mcp"},
            ("add", {"a": 2, "b": 3}),
            ("refuse", {"reason": "no"}),
        )
    assert (added.status, added.text) == (ToolStatus.OK, "5")
    assert refused.status is ToolStatus.ERROR


def test_killed_http_server_is_reached_again() -> None:
    port = free_port()
    settings = {"type": "mcp", "url": f"http://127.0.0.1:{port}/mcp", "backoff_s": 0.05, "restart_wait_s": 0.3}

    async def work(toolbox: Toolbox) -> list[ToolCall]:
        waiting = asyncio.create_task(call(toolbox, "wait", seconds=30))
        await asyncio.sleep(0.2)
        server.kill()
        server.wait()
        records = [await waiting, await call(toolbox, "add", a=1, b=1)]
        with http_server(port):
            deadline = time.monotonic() + 10.0
            while records[-1].status is not ToolStatus.OK and time.monotonic() < deadline:
                records.append(await call(toolbox, "add", a=1, b=2))
        return records

    with http_server(port) as server:
        records = use(settings, work)
    assert [record.status for record in records[:2]] == [ToolStatus.DISCONNECTED, ToolStatus.UNAVAILABLE]
    assert records[-1].text == "3"


def test_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUMS_TOKEN", "s3cret\n")
    port = free_port()
    settings = {"type": "mcp", "url": f"http://127.0.0.1:{port}/mcp"}
    with http_server(port, "s3cret"):
        (record,) = calls({**settings, "token_env": "SUMS_TOKEN"}, ("add", {"a": 1, "b": 1}))
        with pytest.raises(SettingsError, match="an MCP server that starts"):
            build_toolbox({"sums": settings})
    assert record.text == "2"


# Settings


@pytest.mark.parametrize(
    ("settings", "key", "hint"),
    [
        ({"command": None}, "command", "either `command` or `url`"),
        ({"url": "http://127.0.0.1:1/mcp"}, "command", "either `command` or `url`"),
        ({"command": "no-such-program"}, "command", "No such file or directory: no-such-program"),
        ({"command": "true", "args": []}, "command", "an MCP server that starts"),
        ({"command": None, "url": "ftp://h"}, "url", "match"),
        ({"command": None, "url": "http://127.0.0.1:1/mcp?key=k3y"}, "url", "an MCP server that starts"),
        ({"env": ["NO_SUCH_VARIABLE"]}, "env", "Export it"),
        ({"allow": ["ad"]}, "allow", "Did you mean 'add'?"),
        ({"timeout": 3}, "timeout", "Did you mean 'timeout_s'?"),
    ],
)
def test_setting_that_cannot_be_used_is_named(settings: dict[str, Any], key: str, hint: str) -> None:
    before = threads_of_servers()
    with pytest.raises(SettingsError) as caught:
        build_toolbox({"sums": {**STDIO, **settings}}, key="agent.tools")
    assert caught.value.key == f"agent.tools.sums.{key}"
    assert hint in str(caught.value)
    assert "k3y" not in str(caught.value)
    assert not threads_of_servers() - before


def test_server_that_says_nothing_is_given_up() -> None:
    settings = {**STDIO, "command": "sleep", "args": ["60"], "start_timeout_s": 0.3}
    with pytest.raises(SettingsError, match="TimeoutError"):
        build_toolbox({"sums": settings})


def test_two_tools_of_one_name_are_refused_and_the_server_ends() -> None:
    before = threads_of_servers()
    with pytest.raises(SettingsError, match="Give the MCP server a `prefix`"):
        build_toolbox({"sums": STDIO, "again": STDIO})
    assert not threads_of_servers() - before
