"""Processes, as the kernel lists them."""

from __future__ import annotations

from pathlib import Path


def processes_below(pid: int | None) -> list[int]:
    """The children of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
