"""Settings of the code server."""

from __future__ import annotations

import math
import os

from pydantic import Field, ValidationInfo, field_validator

from agentic_rollout.sandbox.settings import SandboxSettings
from agentic_rollout.server.settings import ServiceSettings


class CodeServerSettings(ServiceSettings):
    """What the code server accepts, and how much of it at a time. Times are in seconds."""

    max_queue: int = Field(default=1024, ge=1, description="programs accepted and not yet answered; 503 beyond")
    deadline_s: float = Field(default=600.0, gt=0, description="one request, its wait for a core included; 504 beyond")
    max_run_timeout_s: float = Field(default=120.0, gt=0, description="a request for more is refused")
    max_memory_mb: int = Field(default=4096, ge=16, description="a request for more is refused")
    sandbox: SandboxSettings = Field(
        default_factory=lambda: SandboxSettings(max_concurrency=usable_cores()),
        validate_default=True,
        description="limits of programs",
    )

    @field_validator("sandbox")
    @classmethod
    def _within_max_run_timeout(cls, value: SandboxSettings, info: ValidationInfo) -> SandboxSettings:
        limit_s = info.data.get("max_run_timeout_s")
        if limit_s is not None and value.wall_time_s > limit_s:
            raise ValueError(f"a wall_time_s of at most max_run_timeout_s, which is {limit_s:g}")
        return value

    def sandbox_settings(self) -> SandboxSettings:
        """The sandbox's, whose processor time must not end what a request gives more wall time."""
        cpu_time_s = max(self.sandbox.cpu_time_s, math.ceil(self.max_run_timeout_s))
        return self.sandbox.model_copy(update={"cpu_time_s": cpu_time_s})


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
