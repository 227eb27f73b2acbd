"""Runs programs inside a confined process, as Python would. Standard library only: the zygote imports it.

The process reads one byte from its control pipe for each program, the program itself from a file that the worker has
written, and answers with one line of JSON. A stateless process ends after its first program, a session goes on with the
same variables.
"""

from __future__ import annotations

import ast
import atexit
import json
import linecache
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

STDIN, STDOUT, STDERR, JOB, CONTROL, REPORT = range(6)
"""The descriptors of a confined process; it has no others."""


class _Deadline(BaseException):
    """The worker has asked a session to end its program."""


class Programs:
    """The programs of one process.

    Args:
        stateful: more than one will come, and they share their variables.
    """

    def __init__(self, *, stateful: bool) -> None:
        self._stateful = stateful
        self._running = False
        self._module = types.ModuleType("__main__")
        self._module.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = self._module
        sys.argv = [""]
        sys.path.insert(0, os.getcwd())
        os.environ.update(HOME=os.getcwd(), TMPDIR=os.getcwd())
        if "numpy.random" in sys.modules:  # Python's own generator seeds itself anew after a fork, this one does not
            sys.modules["numpy.random"].seed()
        threading.excepthook = _show_thread_exception
        signal.signal(signal.SIGTERM, self._on_deadline)
        signal.signal(signal.SIGXCPU, self._on_deadline)

    def serve(self) -> NoReturn:
        """Runs programs until the worker closes the control pipe, or a stateless process has run its only one."""
        while os.read(CONTROL, 1):
            report = self._run(json.loads(_read_all(JOB)))
            if not self._stateful:
                report["return_code"] = _finish(report["return_code"])
            _flush()
            send(report)
            if not self._stateful:
                os._exit(report["return_code"])
        os._exit(0)

    def _run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        name = job["name"]
        _open_streams()
        linecache.cache[name] = (len(job["code"]), None, job["code"].splitlines(keepends=True), name)
        report: dict[str, Any] = {"return_code": 0, "value": None, "ending": "finished"}
        try:
            self._running = True
            value = _execute(job["code"], name, self._module.__dict__, want_value=job["want_value"])
            report["value"] = None if value is None else value[: job["max_value_chars"]]
        except SystemExit as error:
            report["return_code"] = _exit_code(error)
        except _Deadline:
            report["ending"] = "timeout"
            report["return_code"] = None
        except BaseException as error:
            report["return_code"] = 1
            if isinstance(error, MemoryError):
                report["ending"] = "memory"
            _show_exception(error)
        finally:
            self._running = False
        return report

    def _on_deadline(self, number: int, frame: types.FrameType | None) -> None:
        """Saves what was printed; a session lives on, its program does not."""
        _flush()
        if not self._stateful:
            os._exit(128 + number)
        if self._running:
            self._running = False
            raise _Deadline


def send(report: Mapping[str, Any]) -> None:
    """Writes one line to the report pipe, unless the program has closed it."""
    line = json.dumps(report).encode() + b"\n"
    with suppress(OSError):
        while line:
            line = line[os.write(REPORT, line) :]


def _execute(code: str, name: str, variables: dict[str, Any], *, want_value: bool) -> str | None:
    """Runs a program; with `want_value`, gives how its last expression's value is written, None where it has none."""
    tree = ast.parse(code, name)
    last: ast.expr | None = None
    if want_value and tree.body and isinstance(tree.body[-1], ast.Expr):
        last = tree.body[-1].value
        del tree.body[-1]
    exec(compile(tree, name, "exec", dont_inherit=True), variables)
    if last is None:
        return None
    value = eval(compile(ast.Expression(last), name, "eval", dont_inherit=True), variables)
    return None if value is None else repr(value)


def _open_streams() -> None:
    """Streams as Python opens them on pipes; a program may have closed or replaced those of the one before."""
    os.lseek(STDIN, 0, os.SEEK_SET)
    for name, number, mode, errors, buffering in _STREAMS:
        stream = open(number, mode, buffering, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


_STREAMS = (
    ("stdin", STDIN, "r", "surrogateescape", -1),
    ("stdout", STDOUT, "w", "surrogateescape", -1),
    ("stderr", STDERR, "w", "backslashreplace", 1),
)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # the program has put something of its own there, or the signal came amid a write
            continue


def _finish(code: int | None) -> int:
    """What Python does between a program's last line and its end."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException as error:
        _show_exception(error)
    return code or 0


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)  # noqa: T201
    return 1


def _show_exception(error: BaseException) -> None:
    """Prints a traceback without the frames of this module."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _OWN:
        frames = frames.tb_next
    try:
        traceback.print_exception(type(error), error, frames)
    except BaseException:  # no memory is left, or the exception cannot be shown
        os.write(STDERR, f"{type(error).__name__}\n".encode())


_OWN = (__file__, ast.__file__)


def _show_thread_exception(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_type is SystemExit:
        return
    name = arguments.thread.name if arguments.thread is not None else "unknown"
    print(f"Exception in thread {name}:", file=sys.stderr)  # noqa: T201
    traceback.print_exception(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)


def _read_all(descriptor: int) -> bytes:
    parts = []
    position = 0
    while part := os.pread(descriptor, 1 << 20, position):
        parts.append(part)
        position += len(part)
    return b"".join(parts)
