"""Engines' bounds with several workers: each computes them from the same windows, and from the
requests of all.
"""

from __future__ import annotations

from pdproxy.app.capacity import Places, PoolCapacity
from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.scheduling.worker_ledger import WorkerLedger
from pdproxy.scheduling.worker_windows import WorkerWindows
from pdproxy.settings.limits import Limits
from pdproxy.upstream.metrics_page import Scrape


class WorkerPoolCapacity(PoolCapacity):
    """The `PoolCapacity` of one of several workers. `ledger`: its own, which knows the others'
    loads.

    The process that probes learns from what engines report; any of them learns from a refusal.
    """

    def __init__(
        self,
        limits: Limits,
        engines: EngineRegistry,
        admission: Places,
        replicas: int,
        *,
        windows: WorkerWindows,
        ledger: WorkerLedger,
    ) -> None:
        super().__init__(limits, engines, admission, replicas, windows)
        self._shared = windows
        self._ledger = ledger

    def look(self) -> None:
        """Take over what other workers have learned, and what is left of their requests at engines
        on their way out.
        """
        if self._shared.look() or self._going:
            self._resize()

    def scraped(self, engine: Engine, metrics: Scrape) -> None:
        """See `PoolCapacity`."""
        self._ledger.refresh()
        super().scraped(engine, metrics)

    def _resize(self) -> None:
        self._ledger.refresh()
        self._shared.look()
        super()._resize()
