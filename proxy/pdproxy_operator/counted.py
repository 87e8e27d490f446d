"""The operator's own metrics: what it has done, and how it is."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector

from pdproxy_operator.work import Result

SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Counted:
    """The metrics of one operator, with a registry of their own."""

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()
        ProcessCollector(registry=own)
        GCCollector(registry=own)
        self.reconciles = Counter(
            "pdproxy_operator_reconciles",
            "Reconciliations of a PDProxy with its pools, or of a PDRuntime without a PDProxy, by "
            "result: done, gone, failed, or late (the deadline has passed)",
            ["result"],
            registry=own,
        )
        for one in Result:
            self.reconciles.labels(one.value)
        self.seconds = Histogram(
            "pdproxy_operator_reconcile_seconds",
            "Seconds of a reconciliation",
            buckets=SECONDS,
            registry=own,
        )
        self.writes = Counter(
            "pdproxy_operator_writes",
            "Objects that were written, by kind and by verb: apply, patch, delete or create",
            ["kind", "verb"],
            registry=own,
        )
        self._queue = self._gauge("queue_length", "Reconciliations that are due, and wait")
        self._age = self._gauge(
            "store_age_seconds", "Seconds since all objects were known to be as the API has them"
        )
        self._leader = self._gauge("leader", "1: this operator acts; 0: another one does")
        self._unreadable = self._gauge(
            "unreadable_objects", "PDRuntimes and PDProxies that can't be read: the log names them"
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"pdproxy_operator_{name}", text, registry=self._registry)

    def show(
        self,
        *,
        queue: Callable[[], float],
        age: Callable[[], float],
        leader: Callable[[], float],
        unreadable: Callable[[], float],
    ) -> None:
        """Show what is asked for at each scrape."""
        self._queue.set_function(queue)
        self._age.set_function(age)
        self._leader.set_function(leader)
        self._unreadable.set_function(unreadable)

    def ended(self, result: Result, seconds: float) -> None:
        """Count a reconciliation."""
        self.reconciles.labels(result.value).inc()
        self.seconds.observe(seconds)

    def wrote(self, kind: str, verb: str) -> None:
        """Count a write."""
        self.writes.labels(kind, verb).inc()

    def page(self) -> bytes:
        """Return all as text."""
        return generate_latest(self._registry)
