"""What runs programs is killed in mid-rollout: every trajectory goes on, and every failure has a type."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any

from agentic_rollout.config import LoopSettings, build_settings
from agentic_rollout.engines.scripted import ScriptedEngine
from agentic_rollout.formats import CodeFormat
from agentic_rollout.loop import AgentLoop, Prompt
from agentic_rollout.tools.base import Toolbox
from agentic_rollout.tools.python import EmbeddedInterpreter, PythonSettings, PythonTool
from agentic_rollout.types import StopReason, ToolStatus, Trajectory
from rollouts import CODEC, EOS, play, spoken
from server.code_serving import code_command
from tools.processes import processes_below

ROWS = 64
TURNS = 6
COUNTING = "<code>import time; time.sleep(0.01)\nx = globals().get('x', 0) + 1\nprint(x)</code>"
PATIENT = {"breaker_reset_s": 0.2, "backoff_s": 0.1, "attempts": 8}

Kill = Callable[[], Coroutine[Any, Any, None]]


async def roll_out(tool: PythonTool, kill: Kill) -> list[Trajectory]:
    """64 trajectories of six programs each; `kill` strikes when a third of the turns have begun."""
    turns = [*[spoken(COUNTING)] * TURNS, spoken("<answer>done</answer>")]
    policy = play(dict.fromkeys(range(ROWS), turns))
    under_way = asyncio.Event()

    def counted(context: tuple[int, ...], seed: int | None) -> Sequence[int]:
        if len(engine.prompts) >= ROWS * TURNS / 3:
            under_way.set()
        return policy(context, seed)

    engine = ScriptedEngine(counted, CODEC, eos_token_id=EOS)
    toolbox = Toolbox({"python": tool})
    settings = LoopSettings(max_turns=TURNS, max_observation_tokens=300)
    loop = AgentLoop(engine, toolbox, CodeFormat(), CODEC, settings, prompt_length=8, response_length=10_000)
    prompts = [Prompt((row, 1), trajectory_id=f"row {row}") for row in range(ROWS)]

    async def strike() -> None:
        await under_way.wait()
        await kill()

    try:
        trajectories, _ = await asyncio.gather(loop.run_batch(prompts), strike())
    finally:
        await toolbox.aclose()
    return trajectories


def build(**settings: Any) -> PythonTool:
    return PythonTool.from_settings(build_settings(PythonSettings, settings, key="python"), key="python")


def embedded(**settings: Any) -> tuple[PythonTool, EmbeddedInterpreter]:
    tool = build(sandbox={"preload": (), "max_concurrency": 4}, **settings)
    assert isinstance(tool._interpreter, EmbeddedInterpreter)
    return tool, tool._interpreter


def check_complete(trajectories: list[Trajectory]) -> None:
    assert [trajectory.stop_reason for trajectory in trajectories] == [StopReason.ANSWERED] * ROWS
    assert [len(trajectory.tool_calls) for trajectory in trajectories] == [TURNS] * ROWS


def check_counts(trajectories: list[Trajectory]) -> Counter[str]:
    """Every program saw what those before it had left, or its variables were lost with a failure that says so."""
    check_complete(trajectories)
    for trajectory in trajectories:
        since_failure = 0
        for call in trajectory.tool_calls:
            since_failure = since_failure + 1 if call.status is ToolStatus.OK else 0
            assert call.status is not ToolStatus.OK or call.text == str(since_failure)
    statuses = Counter(call.status for trajectory in trajectories for call in trajectory.tool_calls)
    assert statuses[ToolStatus.OK] > ROWS * TURNS / 2
    return statuses


def test_killed_server_costs_sessions_and_no_trajectory() -> None:
    statuses = check_counts(outlive_a_killed_server(stateful=True))
    assert ROWS / 2 < statuses[ToolStatus.DISCONNECTED] <= ROWS
    assert set(statuses) == {ToolStatus.OK, ToolStatus.DISCONNECTED}


def test_killed_server_costs_stateless_programs_nothing_but_time() -> None:
    trajectories = outlive_a_killed_server(stateful=False)
    check_complete(trajectories)
    calls = [call for trajectory in trajectories for call in trajectory.tool_calls]
    assert {(call.status, call.text) for call in calls} == {(ToolStatus.OK, "1")}


def outlive_a_killed_server(*, stateful: bool) -> list[Trajectory]:
    """A rollout whose server is killed, and started again on the same port."""

    async def main() -> list[Trajectory]:
        with ExitStack() as servers:
            process, url = servers.enter_context(code_command("--port", "0"))

            async def restart() -> None:
                process.kill()
                await asyncio.to_thread(process.wait)
                again = code_command("--port", url.rpartition(":")[2])
                await asyncio.to_thread(servers.enter_context, again)

            return await roll_out(build(source=url, stateful=stateful, http=PATIENT), restart)

    return asyncio.run(main())


def test_server_that_does_not_come_back_is_a_typed_failure_of_each_call() -> None:
    async def main() -> list[Trajectory]:
        with code_command("--port", "0") as (process, url):

            async def kill() -> None:
                process.kill()

            http = {**PATIENT, "attempts": 2, "breaker_patience_s": 0.5}
            return await roll_out(build(source=url, stateful=True, http=http), kill)

    trajectories = asyncio.run(main())
    check_complete(trajectories)
    last = Counter(trajectory.tool_calls[-1].status for trajectory in trajectories)
    assert set(last) <= {ToolStatus.UNAVAILABLE, ToolStatus.REFUSED, ToolStatus.DISCONNECTED}


def test_killed_zygote_costs_sessions_and_no_trajectory() -> None:
    async def main() -> list[Trajectory]:
        tool, interpreter = embedded(stateful=True)

        async def kill() -> None:
            assert interpreter.sandbox.zygote_pid is not None
            os.kill(interpreter.sandbox.zygote_pid, signal.SIGKILL)

        return await roll_out(tool, kill)

    statuses = check_counts(asyncio.run(main()))
    assert ROWS / 2 < statuses[ToolStatus.DISCONNECTED] <= ROWS
    assert set(statuses) == {ToolStatus.OK, ToolStatus.DISCONNECTED}


def test_killed_sessions_cost_no_other_ones() -> None:
    async def main() -> tuple[list[Trajectory], int]:
        tool, interpreter = embedded(stateful=True)
        victims: list[int] = []

        async def kill() -> None:
            victims.extend(processes_below(interpreter.sandbox.zygote_pid)[:5])
            for victim in victims:
                os.kill(victim, signal.SIGKILL)

        return await roll_out(tool, kill), len(victims)

    trajectories, killed = asyncio.run(main())
    check_complete(trajectories)
    hurt = [
        trajectory
        for trajectory in trajectories
        if [call.text for call in trajectory.tool_calls] != [str(turn + 1) for turn in range(TURNS)]
    ]
    told = [
        call
        for trajectory in hurt
        for call in trajectory.tool_calls
        if call.status is ToolStatus.DISCONNECTED or "variables and files are lost" in call.text
    ]
    assert (killed, len(hurt), len(told)) == (5, 5, 5)
