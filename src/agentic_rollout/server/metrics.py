"""What the servers tell Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from agentic_rollout.errors import SettingsError

if TYPE_CHECKING:
    from prometheus_client import Counter, Histogram
    from prometheus_client.metrics_core import Metric

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_QUERIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class ServiceMetrics:
    """Counters of one server, in a registry of its own: several servers may share a process.

    Args:
        namespace: what the names of the metrics begin with.
        work: what is accepted and queued, as a plural.
        failures: what a failure is, for people.
        waiting: how much was accepted and is not yet answered.

    Attributes:
        accepted: counts work.

    Raises:
        SettingsError: prometheus-client is not installed.
    """

    def __init__(self, namespace: str, *, work: str, failures: str, waiting: Callable[[], float]) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError:
            remedy = 'Run `pip install "agentic-rollout[search]"`.'
            raise SettingsError("metrics", None, "prometheus-client to be installed", remedy) from None
        self.work = work
        self.prometheus = prometheus
        self.registry = prometheus.CollectorRegistry()
        self.own: dict[str, Any] = {"namespace": namespace, "registry": self.registry}
        self._requests = prometheus.Counter("requests", "Requests answered", ("route", "status"), **self.own)
        self._seconds = prometheus.Histogram(
            "request_seconds", "From a request's head to its reply", ("route",), buckets=SECONDS, **self.own
        )
        self.accepted = prometheus.Counter(work, f"{work.capitalize()} accepted", **self.own)
        queue = prometheus.Gauge(f"queue_{work}", f"{work.capitalize()} accepted and not yet answered", **self.own)
        queue.set_function(waiting)
        self._failures = prometheus.Counter("backend_failures", failures, ("status",), **self.own)
        prometheus.ProcessCollector(registry=self.registry)
        self._children: dict[tuple[str, int], tuple[Counter, Histogram]] = {}

    def observe(self, route: str, status: int, seconds: float) -> None:
        """One request, answered."""
        children = self._children.get((route, status))
        if children is None:  # labels are looked up once: they cost more than counting does
            children = self._requests.labels(route, str(status)), self._seconds.labels(route)
            self._children[route, status] = children
        children[0].inc()
        children[1].observe(seconds)

    def count_failure(self, status: str) -> None:
        """One failure of what stands behind the server."""
        self._failures.labels(status).inc()

    def exposition(self) -> tuple[bytes, str]:
        """The text that Prometheus reads, and its content type."""
        return self.prometheus.generate_latest(self.registry), self.prometheus.CONTENT_TYPE_LATEST


class SearchMetrics(ServiceMetrics):
    """Counters of a search server.

    Args:
        waiting: number of queries accepted and not yet answered.
        cache_lookups: number of queries by where their answer came from; None without a cache.
    """

    def __init__(self, waiting: Callable[[], float], cache_lookups: Mapping[str, int] | None) -> None:
        failures = "Failed searches, pages and rerankings"
        super().__init__("agentic_search", work="queries", failures=failures, waiting=waiting)
        histogram = self.prometheus.Histogram
        self.batch = histogram("batch_queries", "Queries of one batch", buckets=_QUERIES, **self.own)
        if cache_lookups is not None:
            self.registry.register(_CacheLookups(cache_lookups))


class _CacheLookups:
    """Reads the cache's own counts when they are asked for."""

    def __init__(self, lookups: Mapping[str, int]) -> None:
        self._lookups = lookups

    def collect(self) -> Iterable[Metric]:
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily("agentic_search_cache_lookups", "Queries by origin of answer", labels=["origin"])
        for origin, number in sorted(self._lookups.items()):
            family.add_metric([origin], number)
        yield family
