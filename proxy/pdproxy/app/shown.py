"""What an operator is shown: `/ready`, `/metrics`, `/load` and `/drained`."""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.app.readiness import judged
from pdproxy.observe.metrics import Metrics
from pdproxy.observe.snapshot import Snapshot
from pdproxy.scheduling.admission import Admission
from pdproxy.web.operation import EngineWork, Readiness


class Shown:
    """What a process that serves alone shows."""

    def __init__(
        self,
        admission: Admission,
        readiness: Callable[[], Readiness],
        metrics: Metrics,
        work_at: Callable[[str], EngineWork],
    ) -> None:
        self._admission = admission
        self._own_readiness = readiness
        self._own_metrics = metrics
        self._own_work_at = work_at

    async def load(self) -> int:
        """Return the number of requests that are served or wait."""
        return self._admission.inflight + self._admission.waiting

    async def readiness(self) -> Readiness:
        """Return whether a request could be served now."""
        return judged(self._own_readiness())

    async def work_at(self, place: str) -> EngineWork:
        """Return what is left at the engine with this `host:port`."""
        return self._own_work_at(place)

    async def snapshot(self) -> Snapshot:
        """Return all metrics but those of the process itself."""
        found = self._own_metrics.counts()
        found.values.update(await self._own_metrics.gauges_in_turns())
        return found

    async def metrics(self) -> bytes:
        """Return the page of all metrics."""
        return await self._own_metrics.page_in_turns()
