"""The zygote: a warm interpreter that forks one confined process per program or session. Standard library only.

It is started with an empty environment and one descriptor, a socket to the worker that started it. It imports the
preloaded libraries once, tries the whole confinement on a child of its own, then forks on request. It never runs a
program itself, and holds nothing that one could want. When the worker is gone, it goes, and its children with it.

Messages are JSON, one per datagram:

    worker -> zygote   {"id", "stateful", "limits", "scratch", "uid"}   with the child's six descriptors
    zygote -> worker   {"event": "ready"}                               with a descriptor of the zygote itself
                       {"event": "unfit", "reason"}
                       {"event": "started", "id"}                       with a descriptor of the child (pidfd)
                       {"event": "refused", "id", "reason"}
                       {"event": "ended", "id", "status", "cpu_s"}      as from wait4(2)
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import site
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from agentic_rollout.sandbox.confine import Confinement, Limits, confine
from agentic_rollout.sandbox.program import Programs, send
from agentic_rollout.sandbox.seccomp import build_filter
from agentic_rollout.sandbox.syscalls import call

MAX_MESSAGE_BYTES = 1 << 16
DESCRIPTORS = 6

_PR_SET_PDEATHSIG = 1
_CONFINEMENT_FAILED = 125  # the exit code of a child that could not be confined


def main(configuration: str, descriptor: int) -> None:
    """Serves one worker until it closes the socket.

    Args:
        configuration: JSON of `path` (where to import from), `preload`, `confinement`, and `trial` (an order, without
            descriptors, that the confinement is tried with).
        descriptor: of the socket.
    """
    settings = json.loads(configuration)
    call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)  # a fork of the worker may keep the socket open
    channel = socket.socket(fileno=descriptor)
    problem = _prepare(settings)
    build_filter(os.getpid())  # its larger part is the same for the children, and is built once
    confinement = Confinement(**settings["confinement"])
    zygote = _Zygote(channel, confinement)
    problem = problem or zygote.try_out(settings["trial"])
    if problem:
        channel.send(json.dumps({"event": "unfit", "reason": problem}).encode())
        return
    zygote.serve()


def _prepare(settings: Mapping[str, Any]) -> str | None:
    """Sets up the interpreter that all children inherit; returns what is wrong."""
    sys.path[:] = settings["path"]
    sys.dont_write_bytecode = True
    site.setquit()
    site.sethelper()
    for name in settings["preload"]:
        try:
            importlib.import_module(name)
        except Exception as error:
            return f"preload: {name!r} cannot be imported: {type(error).__name__}: {error}"
    for name in [name for name in sys.modules if name.partition(".")[0] == __name__.partition(".")[0]]:
        del sys.modules[name]  # not the program's business
    gc.collect()
    gc.freeze()  # a collection in a child then leaves the shared pages alone
    return None


class _Zygote:
    def __init__(self, channel: socket.socket, confinement: Confinement) -> None:
        self._channel = channel
        self._confinement = confinement
        self._pid = os.getpid()
        self._ids: dict[int, int] = {}  # process id -> the worker's id

    def try_out(self, order: Mapping[str, Any]) -> str | None:
        """Confines a child that then ends; returns what failed."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self._confine(order)
            except Exception as error:
                os.write(writing, f"{type(error).__name__}: {error}".encode())
                os._exit(_CONFINEMENT_FAILED)
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as pipe:
            reason = pipe.read().decode()
        status = os.waitpid(pid, 0)[1]
        return reason or (f"the trial of the confinement ended with status {status}" if status else None)

    def serve(self) -> None:
        waking, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(woken)
        self._tell({"event": "ready"}, os.pidfd_open(self._pid))
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(waking, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if waking in ready:
                os.read(waking, 4096)
                self._reap()
            if self._channel.fileno() in ready and not self._receive():
                return

    def _receive(self) -> bool:
        message, descriptors, _, _ = socket.recv_fds(
            self._channel, MAX_MESSAGE_BYTES, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        if not message:
            return False
        try:
            self._start(json.loads(message), descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _start(self, order: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self._tell({"event": "refused", "id": order["id"], "reason": str(error)})
            return
        if pid == 0:
            self._become_child(order, descriptors)
        self._ids[pid] = order["id"]
        self._tell({"event": "started", "id": order["id"]}, os.pidfd_open(pid))

    def _become_child(self, order: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _take_over(descriptors)
            self._confine(order)
        except BaseException as error:
            send({"ending": "unconfined", "reason": f"{type(error).__name__}: {error}"})
            os._exit(_CONFINEMENT_FAILED)
        try:
            send({"ending": "confined"})  # from here on, no report is to be believed further than its program
            Programs(stateful=order["stateful"]).serve()
        finally:
            os._exit(_CONFINEMENT_FAILED)

    def _confine(self, order: Mapping[str, Any]) -> None:
        os.setsid()
        confine(self._confinement, Limits(**order["limits"]), scratch=order["scratch"], uid=order["uid"])
        if os.getppid() != self._pid:
            os._exit(_CONFINEMENT_FAILED)  # the zygote died before this process had asked to die with it

    def _reap(self) -> None:
        while self._ids:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            cpu_s = usage.ru_utime + usage.ru_stime
            self._tell({"event": "ended", "id": self._ids.pop(pid), "status": status, "cpu_s": cpu_s})

    def _tell(self, message: Mapping[str, Any], descriptor: int | None = None) -> None:
        descriptors = [] if descriptor is None else [descriptor]
        try:
            socket.send_fds(self._channel, [json.dumps(message).encode()], descriptors)
        finally:
            for sent in descriptors:
                os.close(sent)


def _take_over(descriptors: Sequence[int]) -> None:
    """Makes `descriptors` 0, 1, 2, … of this process, and closes all others."""
    above = [os.dup(descriptor) for descriptor in descriptors]  # all are above the places they go to
    for place, descriptor in enumerate(above):
        os.dup2(descriptor, place)
    os.closerange(len(above), os.sysconf("SC_OPEN_MAX"))
