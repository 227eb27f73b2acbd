from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from agentic_rollout.errors import ToolError
from agentic_rollout.tools.base import BaseTool, Tool, Toolbox, ToolContext
from agentic_rollout.types import StopReason, ToolCall, ToolRequest, ToolStatus
from rollouts import ScriptedTool, now_s, roll_out, run, spoken

CONTEXT = ToolContext("row 0")


def call(tool: Tool, *, name: str = "search", **arguments: Any) -> ToolCall:
    return run(Toolbox({"search": tool}).call(ToolRequest(name, arguments or {"query": "q"}), CONTEXT))


def raising(error: BaseException) -> ScriptedTool:
    def fail(query: str) -> str:
        raise error

    return ScriptedTool(fail)


# Toolbox


def test_result_is_recorded_with_what_was_asked() -> None:
    record = call(ScriptedTool(), query="towers")
    assert (record.name, record.arguments, record.status) == ("search", {"query": "towers"}, ToolStatus.OK)
    assert (record.text, record.error) == ("about towers", None)
    assert record.latency_s >= 0.0


def test_latency_is_the_calls_wall_time() -> None:
    async def timed() -> tuple[ToolCall, float]:
        tool = ScriptedTool(latency=lambda query: 0.02)
        start = time.perf_counter()
        record = await Toolbox({"search": tool}).call(ToolRequest("search", {"query": "q"}), CONTEXT)
        return record, time.perf_counter() - start

    record, elapsed_s = asyncio.run(timed())
    assert 0.015 <= record.latency_s <= elapsed_s


@pytest.mark.parametrize(
    "error", [RuntimeError("broken"), KeyError("x"), ValueError(), ExceptionGroup("g", [OSError()])]
)
def test_tool_that_raises_is_a_typed_failure_without_its_internals(error: Exception) -> None:
    record = call(raising(error))
    assert (record.status, record.error) == (ToolStatus.ERROR, type(error).__name__)
    assert record.text == f"search failed ({type(error).__name__})"


def test_tool_error_chooses_status_and_text() -> None:
    record = call(raising(ToolError("give a year", status="bad_arguments")))
    assert (record.status, record.text, record.error) == (ToolStatus.BAD_ARGUMENTS, "give a year", "ToolError")


@pytest.mark.parametrize("status", ["no_such_status", "", "ok"])
def test_status_that_is_no_failure_counts_as_error(status: str) -> None:
    record = call(raising(ToolError("busy", status=status)))
    assert (record.status, record.text) == (ToolStatus.ERROR, "busy")


def test_tool_beyond_its_deadline_is_a_timeout() -> None:
    record = call(ScriptedTool(latency=lambda query: 31.0, timeout_s=30.0))
    assert (record.status, record.error) == (ToolStatus.TIMEOUT, "TimeoutError")
    assert record.text == "no answer from search within 30 s"


def test_tool_just_within_its_deadline_is_answered() -> None:
    assert call(ScriptedTool(latency=lambda query: 29.0, timeout_s=30.0)).status is ToolStatus.OK


def test_unknown_tool_is_answered_with_what_there_is() -> None:
    record = call(ScriptedTool(), name="browse")
    assert (record.status, record.error) == (ToolStatus.UNKNOWN_TOOL, None)
    assert record.text == "there is no tool 'browse' (available: search)"


def test_empty_toolbox_says_so() -> None:
    record = run(Toolbox({}).call(ToolRequest("search", {}), CONTEXT))
    assert record.status is ToolStatus.UNKNOWN_TOOL
    assert "available: none" in record.text


@pytest.mark.parametrize("result", [None, 7, b"bytes", ["text"]])
def test_result_that_is_no_text_is_a_failure(result: object) -> None:
    record = call(ScriptedTool(lambda query: result))  # type: ignore[arg-type,return-value]
    assert (record.status, record.error) == (ToolStatus.ERROR, "TypeError")


@pytest.mark.parametrize("tool", [ScriptedTool(lambda query: "a\ud800b"), raising(ToolError("a\ud800b"))])
def test_lone_surrogates_which_no_tokenizer_takes_are_replaced(tool: ScriptedTool) -> None:
    assert call(tool).text == "a?b"


def test_cancellation_inside_a_tool_is_its_failure_and_nobody_elses() -> None:
    record = call(raising(asyncio.CancelledError()))
    assert (record.status, record.error) == (ToolStatus.ERROR, "CancelledError")


def test_cancelled_trajectory_does_not_go_on() -> None:
    async def cancelled() -> bool:
        toolbox = Toolbox({"search": ScriptedTool(latency=lambda query: 10.0)})
        task = asyncio.create_task(toolbox.call(ToolRequest("search", {"query": "q"}), CONTEXT))
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task.cancelled()

    assert run(cancelled())


def test_no_row_is_lost_among_64_whose_tools_fail_at_random() -> None:
    rng = random.Random(0)
    outcomes: list[Callable[[str], str]] = [
        lambda query: "found",
        lambda query: "",
        raising(RuntimeError("broken")).reply,
        raising(TimeoutError()).reply,
        raising(ToolError("odd", status="odd")).reply,
        raising(ToolError("refused", status="bad_arguments")).reply,
        raising(asyncio.CancelledError()).reply,
        lambda query: None,  # type: ignore[arg-type,return-value]
    ]
    tool = ScriptedTool(lambda query: rng.choice(outcomes)(query), lambda query: rng.expovariate(0.1))
    rows = {row: [*[spoken(f"<search>{row}</search>")] * 3, spoken(f"<answer>{row}</answer>")] for row in range(64)}
    trajectories = roll_out(rows, tool=tool).trajectories
    assert [trajectory.answer for trajectory in trajectories] == [str(row) for row in range(64)]
    assert {trajectory.stop_reason for trajectory in trajectories} == {StopReason.ANSWERED}
    statuses = [record.status for trajectory in trajectories for record in trajectory.tool_calls]
    assert len(statuses) == 3 * 64
    assert set(statuses) == {ToolStatus.OK, ToolStatus.ERROR, ToolStatus.TIMEOUT, ToolStatus.BAD_ARGUMENTS}


class Careless(ScriptedTool):
    """Fails at, or never ends, what the toolbox tells it."""

    def __init__(self, failure: Callable[[], Awaitable[None]]) -> None:
        super().__init__(timeout_s=5.0)
        self.failure = failure

    async def finish(self, trajectory_id: str) -> None:
        await self.failure()

    async def aclose(self) -> None:
        await self.failure()


async def hang() -> None:
    await asyncio.sleep(1e9)


async def fail() -> None:
    raise OSError("gone")


@pytest.mark.parametrize("failure", [hang, fail])
@pytest.mark.parametrize("method", ["finish", "aclose"])
def test_tool_that_fails_to_clean_up_is_logged_and_keeps_no_other_from_it(
    failure: Callable[[], Awaitable[None]], method: str, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []

    class Tidy(BaseTool):
        async def finish(self, trajectory_id: str) -> None:
            told.append("finish")

        async def aclose(self) -> None:
            told.append("aclose")

        async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
            return ""

    toolbox = Toolbox({"careless": Careless(failure), "tidy": Tidy()})

    async def clean_up() -> float:
        await (toolbox.finish("row 0") if method == "finish" else toolbox.aclose())
        return now_s()

    with caplog.at_level(logging.ERROR):
        assert run(clean_up()) <= 5.0
    assert told == [method]
    assert "'careless' failed to" in caplog.text
