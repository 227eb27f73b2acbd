"""The worker's ends of a process's pipes, drained as it writes."""

from __future__ import annotations

import asyncio
import json
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from agentic_rollout.sandbox.results import Output

_CHUNK_BYTES = 1 << 16
_CHUNKS_AT_A_TIME = 16  # then the event loop has its turn


class _Pipe(ABC):
    """A pipe that the event loop reads.

    Attributes:
        theirs: the end for the process; closed with `close_theirs`, once it has been handed over.
    """

    def __init__(self) -> None:
        self._ours, self.theirs = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._ours, False)
        self._open = True
        asyncio.get_running_loop().add_reader(self._ours, self._read)

    def close_theirs(self) -> None:
        os.close(self.theirs)

    def drain(self) -> None:
        """Takes what is still in the pipe."""
        for _ in range(_CHUNKS_AT_A_TIME):  # a pipe holds at most as much
            if not self._open or not self._read_chunk():
                return

    def close(self) -> None:
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._ours)
            os.close(self._ours)

    @abstractmethod
    def take(self, data: bytes) -> None:
        """What is done with the next bytes."""

    def _read(self) -> None:
        self.drain()

    def _read_chunk(self) -> bool:
        """Whether there may be more."""
        try:
            data = os.read(self._ours, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        self.take(data)
        return True


class OutputPipe(_Pipe):
    """Keeps the beginning and the end of what is written.

    Args:
        keep_bytes: how much of the beginning; of the end, half as much.
        on_data: is called with the number of bytes that have come.
    """

    def __init__(self, keep_bytes: int, on_data: Callable[[int], None]) -> None:
        self._keep_bytes = keep_bytes
        self._on_data = on_data
        self.clear()
        super().__init__()

    def clear(self) -> None:
        """Forgets what has come."""
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._total_bytes = 0

    def output(self) -> Output:
        """What has come since it was cleared."""
        tail = b"".join(self._tail)
        return Output(bytes(self._head), tail[max(0, len(tail) - self._keep_bytes // 2) :], self._total_bytes)

    def take(self, data: bytes) -> None:
        self._total_bytes += len(data)
        room = self._keep_bytes - len(self._head)
        self._head += data[:room]
        rest = data[room:]
        if rest:
            self._tail.append(rest)
            self._tail_bytes += len(rest)
            while self._tail and self._tail_bytes - len(self._tail[0]) >= self._keep_bytes // 2:
                self._tail_bytes -= len(self._tail.popleft())
        self._on_data(len(data))


class ReportPipe(_Pipe):
    """Reads lines of JSON. The process may write anything to it, so they are hints, and a bad one is none.

    Args:
        on_report: is called with each.
        max_bytes: of one line.
        on_data: is called with the number of bytes that have come.
    """

    def __init__(
        self, on_report: Callable[[Mapping[str, Any]], None], max_bytes: int, on_data: Callable[[int], None]
    ) -> None:
        self._on_report = on_report
        self._max_bytes = max_bytes
        self._on_data = on_data
        self._buffer = b""
        super().__init__()

    def take(self, data: bytes) -> None:
        self._on_data(len(data))
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        self._buffer = self._buffer[: self._max_bytes]
        for line in lines:
            with suppress(ValueError, RecursionError):
                report = json.loads(line)
                if isinstance(report, dict):
                    self._on_report(report)
