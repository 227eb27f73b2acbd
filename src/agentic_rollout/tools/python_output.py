"""What a model is shown of a program that ran."""

from __future__ import annotations

import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

from agentic_rollout.sandbox.results import RunStatus

Cut = Literal["middle", "end"]


@dataclass(frozen=True, slots=True)
class Printed:
    """What a program wrote to one stream.

    Attributes:
        text: as much of it as was kept.
        total_bytes: how many were written.
    """

    text: str
    total_bytes: int

    def cut(self, max_chars: int, cut: Cut) -> str:
        """At most `max_chars` characters of it, and where there were more, a mark that counts what is left out."""
        if len(self.text) <= max_chars:
            return self.text.rstrip("\n")
        tail_chars = max_chars // 2 if cut == "middle" else 0
        head = self.text[: max_chars - tail_chars]
        tail = self.text[len(self.text) - tail_chars :]
        total = max(self.total_bytes, _size(self.text))  # bytes that were no text may have grown
        mark = f"[... {total - _size(head) - _size(tail)} bytes left out ...]"
        return "\n".join(filter(None, (head.rstrip("\n"), mark, tail.strip("\n"))))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a program.

    Attributes:
        ending: how it ended.
        return_code: None where it was ended from outside.
        value: how its last expression's value is written; None if there is none, or it was not asked for.
        session_lost: whether its session ended with it.
    """

    stdout: Printed
    stderr: Printed
    ending: RunStatus
    return_code: int | None
    value: str | None = None
    session_lost: bool = False

    def render(self, *, max_chars: int, cut: Cut, wall_time_s: float) -> str:
        """The text of an observation; never empty.

        Args:
            max_chars: of stdout, of stderr and of the value, each.
            cut: where they are cut.
            wall_time_s: the time that it had.
        """
        stdout, stderr = (stream.cut(max_chars, cut) for stream in (self.stdout, self.stderr))
        value = "" if self.value is None else Printed(self.value, _size(self.value)).cut(max_chars, cut)
        note = self._ending_note(wall_time_s, explained=bool(stderr))
        lost = "[Its variables and files are lost: the next program starts anew.]" if self.session_lost else ""
        shown = "\n".join(part for part in (stdout, value, stderr, note, lost) if part)
        return shown if shown.strip() else "[The program ended without output.]"

    def _ending_note(self, wall_time_s: float, *, explained: bool) -> str:
        match self.ending:
            case RunStatus.TIMEOUT:
                return f"[The program was stopped: it had {wall_time_s:g} s.]"
            case RunStatus.MEMORY:
                return "[The program ran out of the memory that it may have.]"
            case RunStatus.DISK:
                return "[The program was stopped: it wrote too many or too large files.]"
            case RunStatus.OUTPUT:
                return "[The program was stopped: it printed too much.]"
            case RunStatus.KILLED:
                return f"[The program was ended by {_signal_name(self.return_code)}.]"
        return f"[The program ended with exit code {self.return_code}.]" if self.return_code and not explained else ""


class Interpreter(Protocol):
    """Where programs run."""

    async def run(self, code: str, trajectory_id: str) -> Outcome:
        """Runs a program; if sessions are kept, in that of the trajectory.

        Raises:
            ToolError: what came of the program is not known; its status says why.
        """
        ...

    async def finish(self, trajectory_id: str) -> None:
        """Ends the trajectory's session."""
        ...

    async def aclose(self) -> None:
        """Ends everything."""
        ...


def _size(text: str) -> int:
    return len(text.encode(errors="replace"))


def _signal_name(return_code: int | None) -> str:
    number = -(return_code or 0)
    with suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return "a signal"
