"""The worker's side of the zygote: starts it, asks it for processes, and notices its death."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import resource
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from agentic_rollout.errors import SettingsError, ToolError
from agentic_rollout.sandbox.containment import Containment, zygote_command, zygote_environment
from agentic_rollout.sandbox.settings import MEGABYTE, SandboxSettings
from agentic_rollout.sandbox.zygote import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

_CLEAR_UP_S = 2.0
_START_TIMEOUT_S = 60.0  # preloading a large library from a cold disk takes its time


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended.

    Attributes:
        code: its exit code, or minus the number of the signal that ended it.
        cpu_s: processor time it took.
    """

    code: int
    cpu_s: float


class Process:
    """One confined process, held by a descriptor: a number could by now belong to another. `Zygote.spawn` starts it.

    Attributes:
        requested: whether the zygote has been asked for it.
        started: done when it runs; raises ToolError where it could not be started.
        ended: its ending; raises ToolError where the zygote died, and it with it.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[Ending] = loop.create_future()
        self.requested = False
        self._descriptor: int | None = None
        self._doomed = False

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal, unless the process has ended."""
        if self._descriptor is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        """Ends it; one that has not started yet, as soon as it does."""
        self._doomed = True
        self.send_signal(signal.SIGKILL)

    async def wait_until_gone(self, timeout_s: float) -> None:
        """Waits until nothing of it is left, whoever is there to tell, and lets go of its descriptor."""
        if self.requested:
            await asyncio.wait({self.started}, timeout=timeout_s)
        if self._descriptor is None:
            return
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._descriptor, _settle, gone)
        try:
            async with asyncio.timeout(timeout_s):
                await gone
        except TimeoutError:
            logger.error("a sandboxed process has not ended %g s after it was killed", timeout_s)
        finally:
            loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def on_started(self, descriptor: int) -> None:
        self._descriptor = descriptor
        if not self.started.done():
            self.started.set_result(None)
        if self._doomed:
            self.kill()

    def on_ended(self, ending: Ending) -> None:
        if not self.ended.done():
            self.ended.set_result(ending)

    def on_failure(self, error: ToolError) -> None:
        self.kill()
        for future in (self.started, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever waits sees it; that nobody may wait is no mistake


class Zygote:
    """A running zygote. Used inside one event loop.

    Attributes:
        pid: its process id, for logs.
        base_bytes: of address space that it takes, and so every process before it runs anything.
    """

    def __init__(self, popen: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self.pid = popen.pid
        self.base_bytes = 0
        self.dead = False
        self._popen = popen
        self._channel = channel
        self._descriptor: int | None = None
        self._ready: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._processes: dict[int, Process] = {}
        self._next_id = 0
        self._sending = asyncio.Lock()
        self._blocked: asyncio.Future[None] | None = None

    @classmethod
    async def start(cls, settings: SandboxSettings, containment: Containment, *, key: str, scratch: str) -> Zygote:
        """Starts a zygote, which tries its confinement before it serves.

        Raises:
            SettingsError: a module cannot be preloaded, or programs cannot be confined.
            ToolError: it did not come up.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        uid = settings.first_uid if os.geteuid() == 0 else None
        trial = build_order(settings, scratch=scratch, uid=uid, base_bytes=1 << 40)
        with theirs, tempfile.TemporaryFile() as errors:
            command = zygote_command(containment, settings, scratch=scratch, channel=theirs.fileno(), trial=trial)
            try:
                zygote = cls(_launch(command, theirs, errors), ours)
            except OSError as error:
                ours.close()
                raise ToolError(f"the sandbox could not be started ({error})", "unavailable") from error
            theirs.close()
            try:
                problem = await zygote._come_up()
            except BaseException as error:
                await zygote.aclose()
                if isinstance(error, ToolError):
                    errors.seek(0)
                    logger.error("the zygote failed: %s", errors.read(4096).decode(errors="replace").strip())
                raise
        if problem is not None:
            await zygote.aclose()
            if problem.startswith("preload: "):
                remedy = "Install it for the interpreter of the worker, or take it out."
                raise SettingsError(f"{key}.preload", list(settings.preload), problem, remedy)
            remedy = "`sandbox: unsafe` runs programs without containment."
            raise SettingsError(f"{key}.sandbox", settings.sandbox, f"a confinement that works ({problem})", remedy)
        return zygote

    async def spawn(self, process: Process, order: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Asks for a process, which gets copies of `descriptors`; it will have started when `process.started` is done.

        Raises:
            ToolError: the zygote is dead.
        """
        self._next_id += 1
        number = self._next_id
        message = json.dumps({**order, "id": number}).encode()
        async with self._sending:
            while not self._try_send(message, descriptors):
                await self._writable()
        process.requested = True
        self._processes[number] = process

    async def aclose(self) -> None:
        """Ends it, and every process with it."""
        self._die(ToolError("the sandbox was closed", "unavailable"))
        await asyncio.to_thread(self._wait)

    def _wait(self) -> None:
        """Bubblewrap clears up when the zygote in it is gone; what came up in no state to do so is killed."""
        with suppress(subprocess.TimeoutExpired):
            if self._descriptor is not None:
                self._popen.wait(_CLEAR_UP_S)
        self._popen.kill()
        self._popen.wait()

    async def _come_up(self) -> str | None:
        """Waits until it serves; returns why it cannot."""
        asyncio.get_running_loop().add_reader(self._channel, self._receive)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                return await self._ready
        except TimeoutError:
            raise ToolError(f"the sandbox did not start within {_START_TIMEOUT_S:g} s", "unavailable") from None

    def _try_send(self, message: bytes, descriptors: Sequence[int]) -> bool:
        if self.dead:
            raise _lost()
        try:
            socket.send_fds(self._channel, [message], descriptors)
        except BlockingIOError:
            return False
        except OSError as error:
            raise _lost() from error
        return True

    async def _writable(self) -> None:
        """Waits until the zygote may be asked again, or is dead."""
        loop = asyncio.get_running_loop()
        self._blocked = loop.create_future()
        loop.add_writer(self._channel, _settle, self._blocked)
        try:
            await self._blocked
        finally:
            if not self.dead:
                loop.remove_writer(self._channel)

    def _receive(self) -> None:
        while not self.dead:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._channel, MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", []
            if not data:
                if self._ready.done() and self._ready.result() is None:
                    logger.warning("the sandbox's zygote (process %d) died", self.pid)
                self._die(_lost())
                return
            self._on_message(json.loads(data), descriptors)

    def _on_message(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        event = message["event"]
        if event == "ready":
            self._descriptor = descriptors[0]
            self.pid = _process_id(self._descriptor)
            self.base_bytes = _address_space_bytes(self.pid)
            self._set_ready(None)
        elif event == "unfit":
            self._set_ready(message["reason"])
        elif event == "started":
            self._processes[message["id"]].on_started(descriptors[0])
        elif event == "refused":
            error = ToolError(f"no process could be started ({message['reason']})", "unavailable")
            self._processes.pop(message["id"]).on_failure(error)
        elif event == "ended":
            code = os.waitstatus_to_exitcode(message["status"])
            self._processes.pop(message["id"]).on_ended(Ending(code, message["cpu_s"]))

    def _set_ready(self, problem: str | None) -> None:
        if not self._ready.done():
            self._ready.set_result(problem)

    def _die(self, error: ToolError) -> None:
        if self.dead:
            return
        self.dead = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._channel)
        loop.remove_writer(self._channel)
        if self._blocked is not None:
            _settle(self._blocked)
        self._channel.close()
        if self._descriptor is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            os.close(self._descriptor)
        if not self._ready.done():
            self._ready.set_exception(ToolError("the sandbox did not start", "unavailable"))
            self._ready.exception()
        processes, self._processes = self._processes, {}
        for process in processes.values():
            process.on_failure(error)


def _launch(command: Sequence[str], channel: socket.socket, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=zygote_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=[channel.fileno()],
        cwd="/",
        start_new_session=True,  # an interrupt from the terminal is for the worker
    )


def build_order(
    settings: SandboxSettings,
    *,
    scratch: str,
    uid: int | None,
    base_bytes: int,
    stateful: bool = False,
    memory_limit_mb: int | None = None,
) -> dict[str, Any]:
    """What the zygote is asked for: one process and its limits.

    Args:
        settings: validated.
        scratch: the process's folder, which exists and belongs to `uid`.
        uid: the user that it becomes; None where it stays the worker's.
        base_bytes: address space that it has before it runs anything.
        stateful: whether it is a session's.
        memory_limit_mb: replaces the setting.
    """
    memory_mb = memory_limit_mb or settings.memory_limit_mb
    return {
        "stateful": stateful,
        "scratch": scratch,
        "uid": uid,
        "limits": {
            "address_bytes": base_bytes + memory_mb * MEGABYTE,
            "cpu_s": settings.session_cpu_time_s if stateful else settings.cpu_time_s,
            "file_bytes": settings.max_file_bytes,
            # The kernel counts the threads of a user, not of a process.
            "tasks": 1 + settings.max_threads + (_threads_of_this_user() if uid is None else 0),
            "open_files": settings.max_open_files,
        },
    }


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _lost() -> ToolError:
    return ToolError("the sandbox's own process died; it is restarted for the next program", "disconnected")


def _process_id(descriptor: int) -> int:
    """The process id behind a pidfd, as this process sees it."""
    with open(f"/proc/self/fdinfo/{descriptor}") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))


def _address_space_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


_counted: tuple[float, int] = (-math.inf, 0)
_COUNT_IS_FRESH_S = 1.0


def _threads_of_this_user() -> int:
    """Threads of all processes of this user, counted at most once a second."""
    global _counted
    now_s = time.monotonic()
    if now_s - _counted[0] > _COUNT_IS_FRESH_S:
        threads, uid = 0, os.geteuid()
        for name in os.listdir("/proc"):
            with suppress(OSError):
                if name.isdecimal() and os.stat(f"/proc/{name}").st_uid == uid:
                    threads += os.stat(f"/proc/{name}/task").st_nlink - 2
        _counted = (now_s, threads)
    return _counted[1]
