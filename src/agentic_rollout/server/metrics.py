"""What the server tells Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from agentic_rollout.errors import SettingsError

if TYPE_CHECKING:
    from prometheus_client import Counter, Histogram
    from prometheus_client.metrics_core import Metric

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_QUERIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class ServerMetrics:
    """Counters of one server, in a registry of its own: several servers may share a process.

    Args:
        waiting: number of queries accepted and not yet answered.
        cache_lookups: number of queries by where their answer came from; None without a cache.

    Raises:
        SettingsError: prometheus-client is not installed.
    """

    def __init__(self, waiting: Callable[[], float], cache_lookups: Mapping[str, int] | None) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError:
            remedy = 'Run `pip install "agentic-rollout[search]"`.'
            raise SettingsError("serve-search", None, "prometheus-client to be installed", remedy) from None
        self._prometheus = prometheus
        self._registry = prometheus.CollectorRegistry()
        own: dict[str, Any] = {"namespace": "agentic_search", "registry": self._registry}
        self._requests = prometheus.Counter("requests", "Requests answered", ("route", "status"), **own)
        self._seconds = prometheus.Histogram(
            "request_seconds", "From a request's head to its reply", ("route",), buckets=_SECONDS, **own
        )
        self.queries = prometheus.Counter("queries", "Queries accepted", **own)
        self.batch = prometheus.Histogram("batch_queries", "Queries of one batch", buckets=_QUERIES, **own)
        self._failures = prometheus.Counter(
            "backend_failures", "Failed searches, pages and rerankings", ("status",), **own
        )
        prometheus.Gauge("queue_queries", "Queries accepted and not yet answered", **own).set_function(waiting)
        prometheus.ProcessCollector(registry=self._registry)
        if cache_lookups is not None:
            self._registry.register(_CacheLookups(cache_lookups))
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
        return self._prometheus.generate_latest(self._registry), self._prometheus.CONTENT_TYPE_LATEST


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
