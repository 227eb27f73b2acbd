from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web

from agentic_rollout.config import build_settings
from agentic_rollout.errors import SettingsError
from agentic_rollout.sandbox.results import RunStatus
from agentic_rollout.tools.base import Toolbox, ToolContext
from agentic_rollout.tools.python import EmbeddedInterpreter, PythonSettings, PythonTool
from agentic_rollout.tools.python_output import Outcome, Printed
from agentic_rollout.types import ToolCall, ToolRequest, ToolStatus
from server.code_serving import code_server
from server.serving import get, running
from tools.processes import processes_below

NOTHING = Printed("", 0)
ENDLESS = "print('before')\nwhile True: pass"

Ask = Callable[..., Awaitable[ToolCall]]


def build(**settings: Any) -> PythonTool:
    if settings.get("source") is None:
        settings["sandbox"] = {"preload": (), "max_concurrency": 2, **settings.get("sandbox", {})}
    return PythonTool.from_settings(build_settings(PythonSettings, settings, key="tools.python"), key="tools.python")


def using(script: Callable[[Ask, PythonTool], Awaitable[Any]], **settings: Any) -> Any:
    """Runs a script that asks a tool as the agent loop does."""

    async def main() -> Any:
        tool = build(**settings)
        toolbox = Toolbox({"python": tool})

        async def ask(code: object, trajectory_id: str = "row") -> ToolCall:
            return await toolbox.call(ToolRequest("python", {"code": code}), ToolContext(trajectory_id))

        try:
            return await script(ask, tool)
        finally:
            await toolbox.aclose()

    return asyncio.run(main())


def texts(*programs: str, **settings: Any) -> list[str]:
    """What is shown of programs of one trajectory, all of which are good calls."""

    async def script(ask: Ask, tool: PythonTool) -> list[ToolCall]:
        return [await ask(code) for code in programs]

    calls: list[ToolCall] = using(script, **settings)
    assert [call.status for call in calls] == [ToolStatus.OK] * len(programs), calls
    return [call.text for call in calls]


@contextmanager
def source_of(kind: str) -> Iterator[str | None]:
    """Where programs run: in this process, or on a server."""
    if kind == "embedded":
        yield None
    else:
        with code_server(sandbox={"wall_time_s": 20.0}) as url:
            yield f"{url}/run_code"


@pytest.fixture(scope="module", params=["embedded", "server"])
def source(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Settings of either; what is shown must be the same."""
    with source_of(request.param) as url:
        yield {} if url is None else {"source": url}


# What is shown


def test_output_comes_before_the_error_which_is_as_python_shows_it(source: dict[str, Any]) -> None:
    (text,) = texts("print('one')\nprint(1 / 0)\n", **source)
    assert text.startswith('one\nTraceback (most recent call last):\n  File "main.py", line 2, in <module>\n')
    assert text.endswith("ZeroDivisionError: division by zero")


def test_program_without_output_is_told_apart_from_nothing(source: dict[str, Any]) -> None:
    shown = texts("x = 1", "print()", "import sys; sys.exit(3)", "import sys; sys.exit('why')", **source)
    assert shown == [
        "[The program ended without output.]",
        "[The program ended without output.]",
        "[The program ended with exit code 3.]",
        "why",
    ]


def test_limits_are_explained_and_what_was_printed_is_kept(source: dict[str, Any]) -> None:
    slow, large, crash = texts(
        ENDLESS,
        "print('before'); a = 'x' * 10**11",
        "import os; print('before', flush=True); os.kill(os.getpid(), 11)",
        **{**source, "sandbox": {"wall_time_s": 0.5}},
    )
    assert slow == "before\n[The program was stopped: it had 0.5 s.]"
    assert large.startswith("before\nTraceback")
    assert large.endswith("MemoryError\n[The program ran out of the memory that it may have.]")
    assert crash == "before\n[The program was ended by signal 11 (SIGSEGV).]"


def test_long_output_is_cut_where_the_settings_say(source: dict[str, Any]) -> None:
    program = "print('a' * 500_000 + 'b' * 499_999)"
    (middle,) = texts(program, max_output_chars=10, **source)
    (end,) = texts(program, max_output_chars=10, cut="end", **source)
    assert middle == "aaaaa\n[... 999990 bytes left out ...]\nbbbb"
    assert end == "aaaaaaaaaa\n[... 999990 bytes left out ...]"


def test_value_is_shown_if_asked_for(source: dict[str, Any]) -> None:
    programs = ("print('one')\n6 * 7", "x = 1", "None", "'a' * 100", "print('one')")
    shown = texts(*programs, show_value=True, max_output_chars=20, **source)
    assert shown[:3] == ["one\n42", "[The program ended without output.]", "[The program ended without output.]"]
    assert shown[3] == f"'{'a' * 9}\n[... 82 bytes left out ...]\n{'a' * 9}'"
    assert shown[4] == "one"
    assert texts("6 * 7", **source) == ["[The program ended without output.]"]


@pytest.mark.parametrize("text", ["", "é" * 50, "a\n" * 30, "😀" * 11, "0123456789"])
@pytest.mark.parametrize("max_chars", [2, 3, 10])
@pytest.mark.parametrize("unkept", [0, 5])
def test_cut_text_and_its_mark_account_for_every_byte(text: str, max_chars: int, unkept: int) -> None:
    size = len(text.encode()) + unkept
    for cut in ("middle", "end"):
        shown = Printed(text, size).cut(max_chars, cut)
        if len(text) <= max_chars:
            assert shown == text.rstrip("\n")
            continue
        head, _, rest = shown.partition("[... ")
        missing, _, tail = rest.partition(" bytes left out ...]")
        kept = text[: max_chars - max_chars // 2] + text[-(max_chars // 2) :] if cut == "middle" else text[:max_chars]
        assert int(missing) == size - len(kept.encode())
        assert (head + tail).replace("\n", "") == kept.replace("\n", "")


@pytest.mark.parametrize("ending", RunStatus)
def test_no_ending_is_shown_as_nothing(ending: RunStatus) -> None:
    for code in (None, 0, -11, -99):
        outcome = Outcome(NOTHING, NOTHING, ending, code, session_lost=True)
        assert outcome.render(max_chars=10, cut="end", wall_time_s=1.0).strip()


# State


def test_stateless_programs_share_nothing(source: dict[str, Any]) -> None:
    assert "NameError" in texts("x = 1", "print(x)", **source)[1]


def test_variables_last_between_turns_and_belong_to_their_trajectory(source: dict[str, Any]) -> None:
    async def script(ask: Ask, tool: PythonTool) -> list[str]:
        await asyncio.gather(ask("x = 'one'", "1"), ask("x = 'two'", "2"))
        shown = await asyncio.gather(*(ask("print(x)", row) for row in ("1", "2", "3")))
        await tool.finish("1")
        return [call.text for call in (*shown, await ask("print(x)", "1"), await ask("print(x)", "2"))]

    one, two, three, finished, unfinished = using(script, stateful=True, **source)
    assert (one, two, unfinished) == ("one", "two", "two")
    assert "NameError" in three
    assert "NameError" in finished


def test_calls_of_one_turn_run_in_their_order(source: dict[str, Any]) -> None:
    async def script(ask: Ask, tool: PythonTool) -> list[ToolCall]:
        return await asyncio.gather(ask("x = [0]"), *(ask("x.append(x[-1] + 1); print(x[-1])") for _ in range(5)))

    calls = using(script, stateful=True, **source)
    assert [call.text for call in calls[1:]] == ["1", "2", "3", "4", "5"]


def test_session_outlives_an_error_and_a_timeout(source: dict[str, Any]) -> None:
    shown = texts("x = 5", "1 / 0", ENDLESS, "print(x)", stateful=True, **{**source, "sandbox": {"wall_time_s": 0.5}})
    assert shown[2] == "before\n[The program was stopped: it had 0.5 s.]"
    assert shown[3] == "5"


def test_program_that_ends_its_session_is_told_that_its_variables_are_lost(source: dict[str, Any]) -> None:
    shown = texts("x = 5", "import os; os._exit(0)", "print(x)", stateful=True, **source)
    assert shown[1] == "[Its variables and files are lost: the next program starts anew.]"
    assert "NameError" in shown[2]


def test_killed_session_is_a_typed_failure_and_the_next_turn_has_a_new_one() -> None:
    async def script(ask: Ask, tool: PythonTool) -> list[ToolCall]:
        first = await ask("x = 5")
        interpreter = tool._interpreter
        assert isinstance(interpreter, EmbeddedInterpreter)
        (session,) = processes_below(interpreter.sandbox.zygote_pid)
        os.kill(session, signal.SIGKILL)
        await asyncio.sleep(0.1)
        return [first, await ask("print(x)"), await ask("print('x' in globals())"), await ask("print(1)", "other")]

    first, lost, fresh, other = using(script, stateful=True)
    assert (first.status, lost.status) == (ToolStatus.OK, ToolStatus.DISCONNECTED)
    assert "variables are gone" in lost.text
    assert [(call.status, call.text) for call in (fresh, other)] == [(ToolStatus.OK, "False"), (ToolStatus.OK, "1")]


def test_killed_zygote_is_a_typed_failure_and_the_next_program_starts_another() -> None:
    async def script(ask: Ask, tool: PythonTool) -> list[ToolCall]:
        await ask("print(1)")
        interpreter = tool._interpreter
        assert isinstance(interpreter, EmbeddedInterpreter)
        zygote = interpreter.sandbox.zygote_pid
        assert zygote is not None
        running = [asyncio.create_task(ask("import time; time.sleep(30)", str(row))) for row in range(2)]
        await asyncio.sleep(0.3)
        os.kill(zygote, signal.SIGKILL)
        return [*await asyncio.gather(*running), await ask("print(2)")]

    *lost, after = using(script)
    assert {call.status for call in lost} == {ToolStatus.DISCONNECTED}
    assert (after.status, after.text) == (ToolStatus.OK, "2")


# Servers


def test_finished_trajectories_leave_no_session_on_the_server() -> None:
    async def script(ask: Ask, tool: PythonTool) -> list[int]:
        await asyncio.gather(*(ask("x = 1", str(row)) for row in range(3)))
        counts = [(await asyncio.to_thread(get, f"{url}/health")).json()["sessions"]]
        await tool.finish("0")
        counts.append((await asyncio.to_thread(get, f"{url}/health")).json()["sessions"])
        return counts

    with code_server() as url:
        counts = using(script, source=url, stateful=True)
        assert get(f"{url}/health").json()["sessions"] == 0
    assert counts == [3, 2]


def test_workers_with_the_same_names_do_not_share_sessions() -> None:
    async def script(ask: Ask, tool: PythonTool) -> str:
        await ask("x = 1")
        other = build(source=url, stateful=True)
        try:
            return await other.call({"code": "print(x)"}, ToolContext("row"))
        finally:
            await other.aclose()

    with code_server() as url:
        assert "NameError" in using(script, source=url, stateful=True)


def test_calls_of_one_turn_run_in_their_order_on_a_server_that_is_busy() -> None:
    async def script(ask: Ask, tool: PythonTool) -> list[ToolCall]:
        return await asyncio.gather(ask("x = [0]"), *(ask("x.append(x[-1] + 1); print(x[-1])") for _ in range(5)))

    with code_server(max_queue=1, retry_after_s=0) as url:
        calls = using(script, source=url, stateful=True, http={"attempts": 50, "backoff_s": 0.05})
    assert [call.text for call in calls[1:]] == ["1", "2", "3", "4", "5"]


def test_token_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(ask: Ask, tool: PythonTool) -> ToolCall:
        return await ask("print(1)")

    monkeypatch.setenv("CODE_TOKEN", "s3cret")
    with code_server(token_env="CODE_TOKEN") as url:
        with_token = using(script, source=url, token_env="CODE_TOKEN")
        without = using(script, source=url)
    assert (with_token.status, with_token.text) == (ToolStatus.OK, "1")
    assert without.status is ToolStatus.HTTP_4XX


RESULT = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "1\n", "stderr": ""}
EXITED = "[The program ended with exit code 2.]"
KILLED = "[The program was ended by signal 9 (SIGKILL).]"
LATE = {"status": "TimeLimitExceeded", "execution_time": 10.0, "return_code": None, "stdout": "1\n", "stderr": ""}


@pytest.mark.parametrize(
    ("reply", "status", "text"),
    [
        ({"status": "Success", "run_result": RESULT}, "ok", "1"),
        ({"status": "Failed", "run_result": {**RESULT, "return_code": 2}}, "ok", f"1\n{EXITED}"),
        ({"status": "Failed", "run_result": {**RESULT, "return_code": -9}}, "ok", f"1\n{KILLED}"),
        ({"status": "Failed", "run_result": LATE}, "ok", "1\n[The program was stopped: it had 10 s.]"),
        ({"status": "Success", "run_result": {**RESULT, "stdout": None}}, "ok", "[The program ended without output.]"),
        ({"status": "SandboxError", "message": "x", "run_result": None}, "http_5xx", "the sandbox failed"),
        ({"status": "SandboxError", "run_result": {**RESULT, "status": "Error"}}, "http_5xx", "the sandbox failed"),
        ({"status": "Success", "run_result": None}, "bad_reply", "no `run_result`"),
        ({"status": "Success", "run_result": {**RESULT, "status": "Odd"}}, "bad_reply", "status"),
        ({"status": "Success", "run_result": {**RESULT, "stdout": 7}}, "bad_reply", "`stdout`"),
        ({"status": "Success", "run_result": {**RESULT, "ending": ["a"], "stdout_bytes": "x"}}, "ok", "1"),
        ([], "bad_reply", "no object"),
    ],
)
def test_replies_of_sandboxfusion_are_understood(reply: Any, status: str, text: str) -> None:
    async def script(ask: Ask, tool: PythonTool) -> ToolCall:
        return await ask("print(1)")

    with fusion(reply) as (url, _):
        call = using(script, source=url, http={"attempts": 1})
    assert call.status == status
    assert (call.text == text) if status == "ok" else (text in call.text)


def test_sandboxfusion_is_sent_what_it_knows() -> None:
    with fusion({"status": "Success", "run_result": RESULT}) as (url, asked):
        texts("print(1)", source=url, sandbox={"wall_time_s": 7.0, "memory_limit_mb": 300})
    assert asked == [{"code": "print(1)", "language": "python", "run_timeout": 7.0, "memory_limit_MB": 300}]


@pytest.mark.parametrize("settings", [{"stateful": True}, {"show_value": True}])
def test_server_that_cannot_do_what_is_set_is_not_taken_for_one_that_can(settings: dict[str, Any]) -> None:
    async def script(ask: Ask, tool: PythonTool) -> ToolCall:
        return await ask("print(1)")

    with fusion({"status": "Success", "run_result": RESULT}) as (url, asked):
        call = using(script, source=url, **settings)
    assert call.status is ToolStatus.BAD_REPLY
    assert f"`{next(iter(settings))}: false`" in call.text
    assert len(asked) == 1


@contextmanager
def fusion(reply: Any) -> Iterator[tuple[str, list[Any]]]:
    """A server that always answers like this, and what it was asked."""
    asked: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response(reply)

    def make_app() -> web.Application:
        app = web.Application()
        app.router.add_post("/run_code", handle)
        return app

    with running(make_app) as url:
        yield url, asked


# Settings and arguments


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"source": "docker"}, "tools.python.source"),
        ({"source": "http://"}, "tools.python.source"),
        ({"source": "http://user:hunter2@host:1"}, "tools.python.source"),
        ({"timeout_s": 5.0}, "tools.python.timeout_s"),
        ({"source": "http://h:1", "http": {"read_timeout_s": 5.0}}, "tools.python.http.read_timeout_s"),
        ({"source": "http://h:1", "http": {"total_timeout_s": 5.0}}, "tools.python.http.total_timeout_s"),
        ({"source": "http://h:1", "sandbox": {"max_files": 5}}, "tools.python.sandbox"),
        ({"source": "http://h:1", "stateful": True, "sandbox": {"memory_limit_mb": 99}}, "tools.python.sandbox.memory"),
        ({"source": "http://h:1", "token_env": "NOT_SET_ANYWHERE"}, "tools.python.token_env"),
        ({"sandbox": {"scratch_dir": "/no/such/folder"}}, "tools.python.sandbox.scratch_dir"),
        ({"cut": "start"}, "tools.python.cut"),
        ({"timeout": 5}, "tools.python.timeout"),
    ],
)
def test_settings_that_cannot_be_used_are_told_by_their_key(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(SettingsError, match=f"^{key}") as caught:
        build(**settings)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("code", [None, 7, "", " \n", ["print(1)"]])
def test_call_without_a_program_is_the_models_mistake(code: object) -> None:
    async def script(ask: Ask, tool: PythonTool) -> ToolCall:
        return await ask(code)

    assert using(script).status is ToolStatus.BAD_ARGUMENTS


def test_lone_surrogate_reaches_the_sandbox_as_a_question_mark(source: dict[str, Any]) -> None:
    assert texts("print('\ud800')", **source) == ["?"]


def test_schema_says_whether_variables_last() -> None:
    async def script(ask: Ask, tool: PythonTool) -> str:
        (described,) = Toolbox({"python": tool}).schemas()
        assert described["function"]["parameters"]["required"] == ["code"]
        return str(described["function"]["description"])

    assert "anew" in using(script)
    assert "Variables last" in using(script, stateful=True)
