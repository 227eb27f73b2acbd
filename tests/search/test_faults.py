"""256 trajectories search over HTTP while the network and the server fail in every way there is a name for."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentic_rollout.config import LoopSettings
from agentic_rollout.engines.scripted import ScriptedEngine
from agentic_rollout.formats import SearchR1Format
from agentic_rollout.loop import AgentLoop, Prompt
from agentic_rollout.search.http import HttpClient, HttpSettings
from agentic_rollout.search.remote import RemoteBackend
from agentic_rollout.server.app import create_app
from agentic_rollout.server.settings import ServerSettings
from agentic_rollout.tools.base import Toolbox
from agentic_rollout.tools.search import SearchSettings, SearchTool
from agentic_rollout.types import StopReason, ToolCall, ToolStatus, Trajectory
from rollouts import CODEC, EOS, play, spoken
from search.backends import Library
from search.fault_proxy import Fault, FaultProxy
from search.services import serving, unused_port

ROWS = 256
TOTAL_S = 1.0
SLACK_S = 3.0  # for everything that is no waiting, on a slow machine
NEVER = 1_000_000  # failures that open the breaker, where it is not what a test is about


def http(**changes: Any) -> HttpSettings:
    quick: dict[str, Any] = {
        "read_timeout_s": 0.3,
        "total_timeout_s": TOTAL_S,
        "backoff_s": 0.02,
        "breaker_failures": NEVER,
        "breaker_reset_s": 0.2,
    }
    return HttpSettings(**{**quick, **changes})


def build_tool(url: str, settings: HttpSettings) -> SearchTool:
    return SearchTool.from_settings(
        SearchSettings(source=url, topk=1, max_batch=8, max_in_flight=64, timeout_s=10.0, http=settings)
    )


def client_of(tool: SearchTool) -> HttpClient:
    backend: Any = tool.backend
    while not isinstance(backend, RemoteBackend):
        backend = backend.backend
    return backend.client


def query(row: int, turn: int) -> str:
    return f"what is {row} in turn {turn}"


@dataclass(frozen=True)
class Rollout:
    trajectories: list[Trajectory]
    took_s: float

    @property
    def calls(self) -> list[ToolCall]:
        return [call for trajectory in self.trajectories for call in trajectory.tool_calls]

    @property
    def statuses(self) -> Counter[str]:
        return Counter(str(call.status) for call in self.calls)


async def roll_out(tool: SearchTool, *, turns: int = 1) -> Rollout:
    """Every row searches in every turn, then answers with its number."""
    rows = {}
    for row in range(ROWS):
        searches = [spoken(f"<search>{query(row, turn)}</search>") for turn in range(turns)]
        rows[row] = [*searches, spoken(f"<answer>{row}</answer>")]
    loop = AgentLoop(
        ScriptedEngine(play(rows), CODEC, eos_token_id=EOS),
        Toolbox({"search": tool}),
        SearchR1Format(),
        CODEC,
        LoopSettings(max_turns=turns),
        prompt_length=4,
        response_length=4000,
    )
    start = time.monotonic()
    trajectories = await loop.run_batch([Prompt((row,), f"row {row}") for row in range(ROWS)])
    return Rollout(trajectories, time.monotonic() - start)


def check(rollout: Rollout, *, turns: int = 1) -> None:
    """All rows are back, in order, and no call is lost, mistaken for a success, or given another row's passages."""
    assert [trajectory.answer for trajectory in rollout.trajectories] == [str(row) for row in range(ROWS)]
    assert {trajectory.stop_reason for trajectory in rollout.trajectories} == {StopReason.ANSWERED}
    for row, trajectory in enumerate(rollout.trajectories):
        assert len(trajectory.tool_calls) == turns
        for turn, call in enumerate(trajectory.tool_calls):
            is_found = call.text.startswith(f"Doc 1(Title: {query(row, turn)})")
            assert is_found is (call.status is ToolStatus.OK), call
            assert is_found or call.status.is_tool_failure


def search_through(
    choose: Callable[[], Fault], *, turns: int = 1, settings: HttpSettings, **proxy: Any
) -> tuple[Rollout, HttpClient, FaultProxy]:
    """A rollout with a real server behind a proxy."""

    async def main() -> tuple[Rollout, HttpClient, FaultProxy]:
        async with (
            serving(create_app(Library(), ServerSettings())) as upstream,
            FaultProxy(upstream, choose, **proxy).running() as faulty,
        ):
            tool = build_tool(faulty.url, settings)
            rollout = await roll_out(tool, turns=turns)
            await tool.aclose()
            return rollout, client_of(tool), faulty

    rollout, client, proxy_ = asyncio.run(main())
    check(rollout, turns=turns)
    return rollout, client, proxy_


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (Fault.NONE, "ok"),
        (Fault.SLOW, "ok"),
        (Fault.HUNG, "timeout"),
        (Fault.RESET, "disconnected"),
        (Fault.DROPPED, "disconnected"),
        (Fault.ERROR_500, "http_5xx"),
        (Fault.BUSY_503, "http_5xx"),
        (Fault.MALFORMED, "bad_reply"),
        (Fault.TRUNCATED, "bad_reply"),
        (Fault.WRONG_COUNT, "bad_reply"),
    ],
)
def test_every_fault_has_its_status_and_ends_in_time(fault: Fault, status: str) -> None:
    # What answers at all answers thousands of requests here, retries and halves included: time for a slow machine.
    settings = http() if fault is Fault.HUNG else http(read_timeout_s=10.0, total_timeout_s=20.0)
    rollout, client, proxy = search_through(lambda: fault, settings=settings)
    assert rollout.statuses == {status: ROWS}
    assert set(proxy.met) == {fault}
    assert client.attempts.most_common(1)[0][0] == status
    assert rollout.took_s < settings.total_timeout_s + SLACK_S


def test_server_that_asks_for_too_much_patience_is_not_waited_for() -> None:
    settings = http(read_timeout_s=10.0, total_timeout_s=10.0)
    rollout, _, _ = search_through(lambda: Fault.BUSY_503, settings=settings, retry_after_s=30)
    assert rollout.statuses == {"http_5xx": ROWS}
    assert rollout.took_s < SLACK_S


@pytest.mark.parametrize("fault", [Fault.HUNG, Fault.DROPPED, Fault.RESET])
def test_outage_that_does_not_end_is_asked_about_by_probes_alone(fault: Fault) -> None:
    rollout, client, proxy = search_through(lambda: fault, turns=2, settings=http(breaker_failures=8))
    assert set(rollout.statuses) <= {"timeout", "disconnected", "unavailable"}
    assert rollout.statuses["unavailable"] > 0
    assert client.breaker.is_down
    # Each of the 32 batches of the first turn may have been on its way when the breaker opened; then come probes.
    assert proxy.met[fault] <= 32 + rollout.took_s / 0.2 + 1
    assert rollout.took_s < 2 * TOTAL_S + SLACK_S


@pytest.mark.parametrize("seed", range(3))
def test_faults_at_random_are_mostly_made_up_for_and_always_typed(seed: int) -> None:
    rng = random.Random(seed)
    faults = [Fault.NONE] * 10 + [fault for fault in Fault if fault is not Fault.NONE]

    rollout, client, proxy = search_through(
        lambda: rng.choice(faults), turns=3, settings=http(total_timeout_s=3.0, breaker_failures=8)
    )
    assert set(proxy.met) == set(Fault)
    assert rollout.statuses["ok"] > 0.9 * 3 * ROWS
    assert {status for status in rollout.statuses if not ToolStatus(status).is_tool_failure} == {"ok"}
    assert {"timeout", "disconnected", "http_5xx", "bad_reply"} < set(client.attempts)
    assert rollout.took_s < 3 * 3.0 + SLACK_S


class Process:
    """The server as a process on a port of its own."""

    def __init__(self) -> None:
        self.port = unused_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        script = Path(__file__).with_name("upstream.py")
        self._process = subprocess.Popen([sys.executable, str(script), str(self.port)])

    def kill(self) -> None:
        """SIGKILL: its connections are reset by the kernel."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def is_up(self) -> None:
        """Returns when the server answers."""
        async with aiohttp.ClientSession() as session, asyncio.timeout(30.0):
            while True:
                try:
                    async with session.get(f"{self.url}/health"):
                        return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.05)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    process.launch()
    yield process
    process.kill()


def test_restart_in_mid_rollout_costs_nothing_but_time(process: Process) -> None:
    async def main() -> tuple[Rollout, HttpClient]:
        await process.is_up()
        tool = build_tool(process.url, http(total_timeout_s=20.0, breaker_failures=8, attempts=8))
        client = client_of(tool)
        rollout = asyncio.create_task(roll_out(tool, turns=16))
        await until(lambda: client.attempts["ok"] >= 100)
        process.kill()
        await until(lambda: client.breaker.is_down)
        assert not rollout.done()
        process.launch()
        finished = await rollout
        await tool.aclose()
        return finished, client

    rollout, client = asyncio.run(main())
    check(rollout, turns=16)
    assert rollout.statuses == {"ok": 16 * ROWS}
    assert client.attempts["disconnected"] + client.attempts["refused"] >= 8
    assert client.breaker.state == "closed"


def test_outage_longer_than_the_deadlines_is_typed_and_over_by_itself(process: Process) -> None:
    async def main() -> tuple[Rollout, Rollout, HttpClient]:
        await process.is_up()
        # Refusals need no waiting: the deadlines are for the answers of the new server, on a slow machine.
        tool = build_tool(process.url, http(breaker_failures=8, read_timeout_s=3.0, total_timeout_s=3.0))
        client = client_of(tool)
        rollout = asyncio.create_task(roll_out(tool, turns=3))
        await until(lambda: client.attempts["ok"] >= 5)
        process.kill()
        interrupted = await rollout
        process.launch()
        await process.is_up()
        after = await roll_out(tool, turns=4)  # one turn that is in no cache
        await tool.aclose()
        return interrupted, after, client

    interrupted, after, client = asyncio.run(main())
    check(interrupted, turns=3)
    failures = set(interrupted.statuses) - {"ok"}
    assert "unavailable" in failures
    assert failures <= {"disconnected", "refused", "unavailable"}
    assert interrupted.took_s < 3 * 3.0 + SLACK_S
    check(after, turns=4)
    assert after.statuses == {"ok": 4 * ROWS}
    assert client.breaker.state == "closed"
