"""Settings of the sandbox."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentic_rollout.config import Settings

MEGABYTE = 1 << 20


class SandboxSettings(Settings):
    """Limits hold for each program alone; there is no network in any mode, and no second process."""

    sandbox: Literal["auto", "landlock", "bubblewrap", "unsafe"] = Field(
        default="auto",
        description="what contains programs: bubblewrap where it works, else landlock; `unsafe` runs without either",
    )
    preload: tuple[str, ...] = Field(default=("numpy",), description="modules that are already imported in programs")
    readable: tuple[str, ...] = Field(default=(), description="files and folders, besides libraries, to be read")
    scratch_dir: str | None = Field(default=None, description="where scratch folders are made; null: the system's own")
    first_uid: int = Field(
        default=62_000,
        ge=1,
        le=1 << 31,
        description="run by root, each program is one of 2000 users: the first",
    )

    wall_time_s: float = Field(default=10.0, gt=0, description="time a program may take")
    cpu_time_s: int = Field(default=10, ge=1, description="processor time a program may take, all threads together")
    session_cpu_time_s: int = Field(default=300, ge=1, description="the same of all programs of one session together")
    memory_limit_mb: int = Field(
        default=1024, ge=16, le=1 << 24, description="address space beyond preloaded libraries"
    )
    max_threads: int = Field(default=32, ge=0, description="threads that a program may start")
    max_open_files: int = Field(default=64, ge=16, description="descriptors that a program may have open")
    max_file_bytes: int = Field(default=16 * MEGABYTE, ge=0, description="size of each file that a program writes")
    max_disk_bytes: int = Field(default=64 * MEGABYTE, ge=0, description="size of a scratch folder")
    max_files: int = Field(default=1000, ge=1, description="files and folders in a scratch folder")
    max_output_bytes: int = Field(default=65_536, ge=0, description="kept of stdout and of stderr, and of a value")
    max_written_bytes: int = Field(
        default=64 * MEGABYTE, ge=1, description="written to stdout and stderr before a program is ended for it"
    )

    max_concurrency: int = Field(default=8, ge=1, description="programs that run at a time; others wait")
    max_sessions: int = Field(default=512, ge=1, description="sessions open at a time")
    session_idle_s: float = Field(default=1800.0, gt=0, description="a session not used for this long is closed")
