"""What a program left behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

Cut = Literal["middle", "end"]


class RunStatus(StrEnum):
    """How a program ended. None of these is a failure of the sandbox."""

    FINISHED = "finished"  # by itself; its return code tells how
    TIMEOUT = "timeout"  # its wall time or processor time was up
    MEMORY = "memory"  # it could not have the memory that it asked for, and did not catch the error
    DISK = "disk"  # its scratch folder grew too large
    OUTPUT = "output"  # it wrote far more than anyone would read
    KILLED = "killed"  # a signal ended it: a crash, or its own doing


@dataclass(frozen=True, slots=True)
class Output:
    """What was written to one stream, or what was kept of it.

    Attributes:
        head: the first bytes, as many as the settings keep.
        tail: the last bytes, half as many; none of them is in `head`.
        total_bytes: how many were written.
    """

    head: bytes = b""
    tail: bytes = b""
    total_bytes: int = 0

    @property
    def truncated(self) -> bool:
        return len(self.head) + len(self.tail) < self.total_bytes

    def text(self, cut: Cut = "middle") -> str:
        """The output as text; where it was cut, a mark says how many bytes are missing there.

        Args:
            cut: whether its middle is left out, or all after its beginning.
        """
        if not self.truncated:
            return (self.head + self.tail).decode(errors="replace")
        if cut == "end":
            return f"{_text(self.head)}\n{_mark(self.total_bytes - len(self.head))}"
        head = self.head[: len(self.head) - len(self.tail)]
        missing = self.total_bytes - len(head) - len(self.tail)
        return f"{_text(head)}\n{_mark(missing)}\n{_text(self.tail)}"


def _mark(missing: int) -> str:
    return f"[... {missing} bytes left out ...]"


def _text(data: bytes) -> str:
    """Text of bytes that were cut somewhere: a character that was cut in two is no error worth showing."""
    return data.decode(errors="ignore")


@dataclass(frozen=True, slots=True)
class RunResult:
    """What came of one program.

    Attributes:
        status: how it ended.
        return_code: as a shell's user knows it, minus the signal's number after a crash; None where it was ended from
            outside.
        stdout: what it printed.
        stderr: what it printed there, tracebacks included.
        execution_time_s: wall time from its start to its end.
        value: the last expression's value as `repr` writes it; None unless asked for, and where there is none.
        files: contents of the files asked for that were there.
        session_lost: the session that it belonged to is gone with it, and its variables are.
    """

    status: RunStatus
    return_code: int | None
    stdout: Output
    stderr: Output
    execution_time_s: float
    value: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    session_lost: bool = False
