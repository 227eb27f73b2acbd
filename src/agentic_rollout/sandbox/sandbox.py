"""The sandbox as the rest of the package sees it: run a program, or hold a session that programs share."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Coroutine
from types import TracebackType

from agentic_rollout.errors import SettingsError, ToolError
from agentic_rollout.sandbox.containment import Containment, find_containment
from agentic_rollout.sandbox.execution import Execution, Program
from agentic_rollout.sandbox.processes import Zygote
from agentic_rollout.sandbox.results import RunResult
from agentic_rollout.sandbox.scratch import ScratchRoot
from agentic_rollout.sandbox.settings import SandboxSettings

logger = logging.getLogger(__name__)

SANDBOX_KEY = "sandbox"

_UIDS = 2000


class Sandbox:
    """Runs Python programs that nobody has read. Used inside one event loop.

    A zygote, started with the first program, forks one confined process for each program or session. If it dies, what
    ran in it fails with a typed error, and the next program starts it anew.

    Args:
        settings: validated.
        key: the settings' own name, for error messages.
        containment: what contains programs; found out unless given.

    Raises:
        SettingsError: nothing here can contain programs, or `scratch_dir` cannot be used.
    """

    def __init__(
        self,
        settings: SandboxSettings | None = None,
        *,
        key: str = SANDBOX_KEY,
        containment: Containment | None = None,
    ) -> None:
        self.settings = settings or SandboxSettings()
        self.containment = containment or find_containment(self.settings, key=key)
        self._key = key
        try:
            self._root = ScratchRoot(self.settings.scratch_dir)
        except OSError as error:
            remedy = f"It cannot be used: {error.strerror}."
            raise SettingsError(f"{key}.scratch_dir", self.settings.scratch_dir, "a folder", remedy) from None
        self._slots = asyncio.Semaphore(self.settings.max_concurrency)
        self._starting = asyncio.Lock()
        self._zygote: Zygote | None = None
        self._sessions: dict[str, Session] = {}
        self._uids: set[int] = set()
        self._closings: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> Sandbox:
        try:
            await self.start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def zygote_pid(self) -> int | None:
        """Process id of the zygote; None before its first start."""
        return None if self._zygote is None else self._zygote.pid

    @property
    def scratch_root(self) -> str:
        """The folder of the scratch folders; gone when the sandbox is closed."""
        return self._root.path

    async def start(self) -> None:
        """Starts the zygote, which would otherwise start with the first program.

        Raises:
            SettingsError: a module cannot be preloaded, or programs cannot be confined as they must be.
            ToolError: it did not come up.
        """
        await self._living_zygote()

    async def run(self, program: Program, *, memory_limit_mb: int | None = None) -> RunResult:
        """Runs a program in a process and a folder of its own.

        Args:
            program: what to run. Whatever it does ends in a result.
            memory_limit_mb: replaces the setting.

        Raises:
            ToolError: the sandbox failed; the program's outcome is not known. `bad_arguments`: a path leads out of the
                scratch folder.
        """
        async with self._slots:
            execution = await self._open(stateful=False, memory_limit_mb=memory_limit_mb)
            try:
                return await execution.run(program)
            finally:
                await self._close(execution)

    async def session(self, name: str) -> Session:
        """The session of a name, opened where there is none.

        Raises:
            ToolError: `unavailable`, if too many are open.
        """
        session = self._sessions.get(name)
        if session is None:
            if len(self._sessions) >= self.settings.max_sessions:
                raise ToolError(f"{self.settings.max_sessions} sessions are open already", "unavailable")
            session = self._sessions[name] = Session(self, name)
        return session

    async def finish(self, name: str) -> None:
        """Closes the session of a name, if there is one."""
        session = self._sessions.pop(name, None)
        if session is not None:
            await session.aclose()

    async def aclose(self) -> None:
        """Ends everything that runs, and removes every file."""
        self._closed = True
        for name in list(self._sessions):
            await self.finish(name)
        if self._zygote is not None:
            await self._zygote.aclose()
        while self._closings:
            await asyncio.gather(*self._closings, return_exceptions=True)
        await asyncio.to_thread(self._root.close)

    async def _open(self, *, stateful: bool, memory_limit_mb: int | None = None) -> Execution:
        """A confined process in a folder of its own."""
        zygote = await self._living_zygote()
        uid = self._take_uid()
        execution = Execution(self.settings, self._root.create(uid), uid, stateful=stateful)
        try:
            await execution.start(zygote, memory_limit_mb=memory_limit_mb)
        except BaseException:
            await self._close(execution)
            raise
        return execution

    async def _close(self, execution: Execution) -> None:
        """Ends a process and removes what it leaves, even if whoever waits for that is cancelled."""
        await asyncio.shield(self._keep(self._clear_up(execution)))

    async def _clear_up(self, execution: Execution) -> None:
        try:
            await execution.aclose()
        finally:
            if execution.uid is not None:
                self._uids.discard(execution.uid)

    def _keep(self, closing: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Starts a task that `aclose` waits for."""
        task = asyncio.ensure_future(closing)
        self._closings.add(task)
        task.add_done_callback(self._closings.discard)
        return task

    async def _living_zygote(self) -> Zygote:
        async with self._starting:
            if self._closed:
                raise ToolError("the sandbox is closed", "unavailable")
            if self._zygote is None or self._zygote.dead:
                if self._zygote is not None:
                    await self._zygote.aclose()
                self._zygote = await Zygote.start(
                    self.settings, self.containment, key=self._key, scratch=self._root.path
                )
            return self._zygote

    def _take_uid(self) -> int | None:
        """A user that no other process of this sandbox is; None where only root could become another."""
        if os.geteuid() != 0:
            return None
        first = self.settings.first_uid
        free = [uid for uid in range(first, first + _UIDS) if uid not in self._uids]
        if not free:
            raise ToolError(f"all of the sandbox's {_UIDS} users are taken", "unavailable")
        uid = random.choice(free)  # other sandboxes on this machine choose from the same
        self._uids.add(uid)
        return uid


class Session:
    """Programs that share their variables and their folder, one after the other. Made by `Sandbox.session`."""

    def __init__(self, sandbox: Sandbox, name: str) -> None:
        self.name = name
        self._sandbox = sandbox
        self._turn = asyncio.Lock()
        self._execution: Execution | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._lost = False

    async def run(self, program: Program) -> RunResult:
        """Runs a program with the variables that those before it have left.

        A program that takes too long is interrupted, and its session goes on; one that cannot be interrupted ends it
        (`RunResult.session_lost`).

        Raises:
            ToolError: as for `Sandbox.run`. `disconnected`, once, if the session was lost since the last program: the
                next one finds a new session.
        """
        async with self._turn, self._sandbox._slots:
            self._stop_idle_timer()
            if self._lost or (self._execution is not None and not self._execution.alive):
                await self._forget()
                raise ToolError("the session was lost; its variables are gone", "disconnected")
            if self._execution is None:
                self._execution = await self._sandbox._open(stateful=True)
            try:
                result = await self._execution.run(program)
            except ToolError as error:
                if error.status == "bad_arguments":
                    raise
                await self._forget()
                raise ToolError(f"{error}; the session's variables are gone", error.status) from error
            except BaseException:
                self._lost = True  # cancelled: its program may still run
                await self._discard()
                raise
            finally:
                self._start_idle_timer()
            if result.session_lost:
                await self._forget()
            return result

    async def aclose(self) -> None:
        """Ends the session; a program that runs in it fails."""
        self._lost = True
        self._stop_idle_timer()
        await self._discard()

    async def _forget(self) -> None:
        """Makes room for a new session of the same name."""
        self._stop_idle_timer()
        if self._sandbox._sessions.get(self.name) is self:
            del self._sandbox._sessions[self.name]
        self._lost = True
        await self._discard()

    async def _discard(self) -> None:
        execution, self._execution = self._execution, None
        if execution is not None:
            await self._sandbox._close(execution)

    def _start_idle_timer(self) -> None:
        if self._execution is None:
            return
        loop = asyncio.get_running_loop()
        self._idle = loop.call_later(self._sandbox.settings.session_idle_s, self._on_idle)

    def _stop_idle_timer(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _on_idle(self) -> None:
        logger.info("the session %s was idle for too long and is closed", self.name)
        self._sandbox._keep(self.aclose())
