"""Programs in one confined process: handing them over, watching their limits, and clearing up after them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentic_rollout.errors import ToolError
from agentic_rollout.sandbox.pipes import OutputPipe, ReportPipe
from agentic_rollout.sandbox.processes import Ending, Process, Zygote, build_order
from agentic_rollout.sandbox.results import RunResult, RunStatus
from agentic_rollout.sandbox.scratch import Scratch, check_paths
from agentic_rollout.sandbox.settings import SandboxSettings

_START_TIMEOUT_S = 20.0
_GRACE_S = 0.5  # for a program whose time is up to hand over what it has printed
_GONE_TIMEOUT_S = 10.0
_CPU_SHARE = 0.5  # of the limit: the kernel counts in whole ticks for the limit, and exactly for the bill
_DISK_PERIOD_S = 0.1
_REPORT_OVERHEAD_BYTES = 1 << 12


@dataclass(frozen=True, slots=True)
class Program:
    """What is to be run.

    Attributes:
        code: Python.
        stdin: all of its standard input.
        files: written into the current folder before; paths are relative.
        fetch_files: paths of files to be read after.
        timeout_s: wall time; None for the setting's.
        want_value: whether the last expression's value is asked for.
    """

    code: str
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch_files: Sequence[str] = ()
    timeout_s: float | None = None
    want_value: bool = False


class Execution:
    """A confined process and all that belongs to it.

    Args:
        settings: validated.
        scratch: its folder, which goes with it.
        uid: the user that the folder belongs to; None for the worker's own.
        stateful: whether it runs any number of programs, one after the other, or a single one.
    """

    def __init__(self, settings: SandboxSettings, scratch: Scratch, uid: int | None, *, stateful: bool) -> None:
        self.uid = uid
        self._settings = settings
        self._scratch = scratch
        self._stateful = stateful
        self._process = Process()
        self._confined = False
        self._unconfined: str | None = None
        self._written_bytes = 0
        self._programs = 0
        loop = asyncio.get_running_loop()
        self._report: asyncio.Future[Mapping[str, Any]] = loop.create_future()
        self._overflow: asyncio.Future[None] = loop.create_future()
        keep = settings.max_output_bytes
        self._stdout = OutputPipe(keep, self._on_data)
        self._stderr = OutputPipe(keep, self._on_data)
        # A character of a value takes up to 12 bytes of JSON.
        self._reports = ReportPipe(self._on_report, 12 * keep + _REPORT_OVERHEAD_BYTES, self._on_data)
        self._job = os.memfd_create("job", os.MFD_CLOEXEC)
        self._stdin = os.memfd_create("stdin", os.MFD_CLOEXEC)
        self._control_theirs, self._control = os.pipe2(os.O_CLOEXEC)

    @property
    def alive(self) -> bool:
        """Whether it can run another program."""
        return not self._process.ended.done()

    async def start(self, zygote: Zygote, *, memory_limit_mb: int | None = None) -> None:
        """Has the process forked.

        Raises:
            ToolError: that failed.
        """
        order = build_order(
            self._settings,
            scratch=self._scratch.path,
            uid=self.uid,
            base_bytes=zygote.base_bytes,
            stateful=self._stateful,
            memory_limit_mb=memory_limit_mb,
        )
        stdin, job = _reopened(self._stdin), _reopened(self._job)
        try:
            ends = [self._stdout.theirs, self._stderr.theirs, job, self._control_theirs, self._reports.theirs]
            await zygote.spawn(self._process, order, [stdin, *ends])
        finally:
            os.close(stdin)
            os.close(job)
            os.close(self._control_theirs)
            for pipe in (self._stdout, self._stderr, self._reports):
                pipe.close_theirs()
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await asyncio.shield(self._process.started)
        except TimeoutError:
            raise ToolError(f"no process could be started within {_START_TIMEOUT_S:g} s", "unavailable") from None

    async def run(self, program: Program) -> RunResult:
        """Runs a program.

        Raises:
            ToolError: the process could not be confined, or was lost before its program began or with the zygote; never
                for what a program does.
        """
        check_paths(program.fetch_files)
        self._scratch.write(program.files)
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        self._begin(program)
        stopped = await self._watch(start_s + (program.timeout_s or self._settings.wall_time_s))
        if stopped is not None:
            await self._stop(stopped)
        execution_time_s = loop.time() - start_s
        for pipe in (self._reports, self._stdout, self._stderr):
            pipe.drain()
        ending = self._process.ended.result() if self._process.ended.done() else None
        if self._stateful and ending is None:
            self._process.send_signal(signal.SIGSTOP)  # threads that are left take no processor time between programs
        elif not self._confined:
            raise ToolError(f"a program could not be confined ({self._unconfined or 'its process ended'})")
        status, return_code = self._verdict(stopped, ending)
        return RunResult(
            status=status,
            return_code=return_code,
            stdout=self._stdout.output(),
            stderr=self._stderr.output(),
            execution_time_s=execution_time_s,
            value=self._value(),
            files=self._scratch.read(program.fetch_files, max_bytes=self._settings.max_disk_bytes),
            session_lost=self._stateful and ending is not None,
        )

    async def aclose(self) -> None:
        """Ends the process and removes what it leaves."""
        self._process.kill()
        await self._process.wait_until_gone(_GONE_TIMEOUT_S)
        for pipe in (self._stdout, self._stderr, self._reports):
            pipe.close()
        for descriptor in (self._job, self._stdin, self._control):
            os.close(descriptor)
        if not self._scratch.remove_if_empty():
            await asyncio.to_thread(self._scratch.remove)

    def _begin(self, program: Program) -> None:
        self._programs += 1
        self._written_bytes = 0
        self._report = asyncio.get_running_loop().create_future()
        self._stdout.clear()
        self._stderr.clear()
        job = {
            "code": program.code,
            "name": f"<cell {self._programs}>" if self._stateful else "main.py",
            "want_value": program.want_value,
            "max_value_chars": self._settings.max_output_bytes,
        }
        _rewrite(self._job, json.dumps(job).encode())
        _rewrite(self._stdin, program.stdin)
        if self._stateful:
            self._process.send_signal(signal.SIGCONT)
        try:
            os.write(self._control, b"\n")
        except BrokenPipeError:  # its end is not known here yet: the program has not begun
            raise ToolError("the process was lost before its program began", "disconnected") from None

    @property
    def _over(self) -> asyncio.Future[Any]:
        """Done when the program is."""
        return self._process.ended if not self._stateful else self._report

    async def _watch(self, deadline_s: float) -> RunStatus | None:
        """Waits for the program's end; returns why it must be stopped, None if it ended by itself."""
        loop = asyncio.get_running_loop()
        while True:
            left_s = deadline_s - loop.time()
            await asyncio.wait(
                {self._over, self._process.ended, self._overflow},
                timeout=max(0.0, min(left_s, _DISK_PERIOD_S)),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._over.done() or self._process.ended.done():
                return None
            if self._overflow.done():
                return RunStatus.OUTPUT
            if left_s <= _DISK_PERIOD_S and loop.time() >= deadline_s:
                return RunStatus.TIMEOUT
            if self._scratch.exceeds(max_bytes=self._settings.max_disk_bytes, max_files=self._settings.max_files):
                return RunStatus.DISK

    async def _stop(self, why: RunStatus) -> None:
        """Ends the program, or where that is not enough the process."""
        if why is RunStatus.TIMEOUT:
            self._process.send_signal(signal.SIGTERM)
            await asyncio.wait({self._over, self._process.ended}, timeout=_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
            if self._over.done() or self._process.ended.done():
                return
        self._process.kill()
        await asyncio.wait({self._process.ended}, timeout=_GONE_TIMEOUT_S)

    def _verdict(self, stopped: RunStatus | None, ending: Ending | None) -> tuple[RunStatus, int | None]:
        """Status and return code."""
        if stopped is not None:
            return stopped, None
        report = self._report.result() if self._report.done() else {}
        if ending is None:
            return _reported(report)
        limit_s = self._settings.session_cpu_time_s if self._stateful else self._settings.cpu_time_s
        if ending.cpu_s > limit_s * _CPU_SHARE and ending.code in _ENDED_BY_THE_CPU_LIMIT:
            return RunStatus.TIMEOUT, None
        if ending.code < 0:
            return RunStatus.KILLED, ending.code
        return (RunStatus.MEMORY if report.get("ending") == "memory" else RunStatus.FINISHED), ending.code

    def _value(self) -> str | None:
        value = self._report.result().get("value") if self._report.done() else None
        return value if isinstance(value, str) else None

    def _on_data(self, count: int) -> None:
        self._written_bytes += count
        if self._written_bytes > self._settings.max_written_bytes and not self._overflow.done():
            self._overflow.set_result(None)

    def _on_report(self, report: Mapping[str, Any]) -> None:
        if self._confined:
            if not self._report.done():
                self._report.set_result(report)
        elif report.get("ending") == "confined":
            self._confined = True
        else:
            self._unconfined = str(report.get("reason"))


_ENDED_BY_THE_CPU_LIMIT = (-signal.SIGKILL, -signal.SIGXCPU, 128 + signal.SIGXCPU)


def _reported(report: Mapping[str, Any]) -> tuple[RunStatus, int | None]:
    """What a session says of its program, if that is anything."""
    endings = {"memory": RunStatus.MEMORY, "timeout": RunStatus.TIMEOUT}
    status = endings.get(str(report.get("ending")), RunStatus.FINISHED)
    code = report.get("return_code")
    return status, code if isinstance(code, int) else None


def _reopened(descriptor: int) -> int:
    """The same file for reading only, with a position of its own."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def _rewrite(descriptor: int, data: bytes) -> None:
    os.ftruncate(descriptor, 0)
    position = 0
    while position < len(data):
        position += os.pwrite(descriptor, data[position:], position)
