"""What the code server tells Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from agentic_rollout.sandbox.results import RunResult
from agentic_rollout.server.metrics import SECONDS, ServiceMetrics


class CodeMetrics(ServiceMetrics):
    """Counters of a code server.

    Args:
        waiting: number of programs accepted and not yet answered.
        sessions: number of sessions open.
    """

    def __init__(self, waiting: Callable[[], float], sessions: Callable[[], float]) -> None:
        super().__init__("agentic_code", work="programs", failures="Failures of the sandbox", waiting=waiting)
        self._endings = self.prometheus.Counter("endings", "Programs by how they ended", ("ending",), **self.own)
        self._program_seconds = self.prometheus.Histogram(
            "program_seconds", "From a program's start to its end", buckets=SECONDS, **self.own
        )
        self.prometheus.Gauge("sessions", "Sessions open", **self.own).set_function(sessions)

    def observe_program(self, result: RunResult) -> None:
        """One program, run."""
        self._endings.labels(result.status).inc()
        self._program_seconds.observe(result.execution_time_s)
