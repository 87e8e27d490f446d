"""How many engines a pool's load needs: what it is asked by, and how operators and autoscalers see
it.

Where several workers serve, only the process that chooses engines has this: it knows all leases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from pdproxy.fleet.audit import LOCAL_HIT
from pdproxy.fleet.engine import Engine
from pdproxy.observe.description import ROLE, Label, MergeRule, Samples, gauge
from pdproxy.observe.events import Observers
from pdproxy.scheduling.admission import Admission
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.scheduling.replicas import ReplicaLedger
from pdproxy.scheduling.scaling_advice import ScalingAdvice
from pdproxy.scheduling.wanted_engines import Wanted, WantedEngines
from pdproxy.upstream.metrics_page import Scrape

DEMAND = gauge(
    "pdproxy_demand_replicas",
    "engines",
    "How many engines of a role the requests of this proxy need. The sum over all proxies is how "
    "many there should be. Absent in the first 90 s, and as long as it is not known "
    "(docs/guide/scaling.md)",
    Label("pool", text="the pool's name"),
    ROLE,
    workers=MergeRule.SUM,
)
_LOOK_S = 5.0
"""Seconds between two looks."""
_COMPUTED = "local_compute"
"""The source of prompt tokens that an engine has computed itself."""


class PoolDemand:
    """What one pool needs. `pools`: what all pools of the process know."""

    def __init__(
        self,
        name: str,
        ledger: Ledger,
        pools: Sequence[WantedEngines],
        admission: Admission,
        now: Callable[[], float],
    ) -> None:
        assert ledger.wanted is not None
        self._name, self._ledger, self._wanted, self._pools = name, ledger, ledger.wanted, pools
        self._admission, self._now = admission, now
        self._advice = ScalingAdvice()
        self._due = 0.0
        """When the next look is due."""
        self._counts: dict[str, tuple[float, float, float]] = {}
        """By an engine's URL: when it was started, and its counts of prompt tokens then: of those
        found in a cache, and of all.
        """

    def show(self, observers: Observers) -> None:
        """Show the gauge."""
        observers.show(DEMAND, self._samples)

    def added(self, engine: Engine) -> None:
        """See `EngineWatcher`."""

    def removed(self, engine: Engine) -> None:
        """See `EngineWatcher`."""
        self._counts.pop(engine.url, None)

    def scraped(self, engine: Engine, metrics: Scrape) -> None:
        """Take what an engine has just reported, and look at the demand if that is due."""
        self._note_cached(engine, metrics)
        now = self._now()
        if now < self._due:
            return
        self._due = now + _LOOK_S
        # requests of other replicas are like those that come here
        replicas = self._ledger.replicas if isinstance(self._ledger, ReplicaLedger) else 1
        needed = {
            role: msgspec.structs.replace(one, engines=replicas * one.engines)
            for role, one in self._needed(now).items()
        }
        self._advice.look(now, needed, self._wanted.has, self._wanted.slo.tpot)

    def scaling(self) -> list[str]:
        """Return which engines are missing, or are too many, a sentence each."""
        return self._advice.sentences()

    def _note_cached(self, engine: Engine, metrics: Scrape) -> None:
        role, sources = engine.in_ledger.role, metrics.by_source
        computed, hits = sources.get(_COMPUTED, 0.0), sources.get(LOCAL_HIT, 0.0)
        if Role.DECODE not in engine.in_ledger.uses:  # there it is KV of prefill engines
            hits = sum(sources.values()) - computed
        before, counts = self._counts.get(engine.url), (metrics.started, hits, hits + computed)
        self._counts[engine.url] = counts
        if before is not None and before[0] == counts[0]:
            self._wanted.found_cached(role, hits - before[1], counts[2] - before[2])

    def _needed(self, now: float) -> Mapping[Role, Wanted]:
        rate = sum(one.rate for one in self._pools)
        # no request that waits is of a pool yet
        part = self._wanted.rate / rate if rate else 0.0
        return self._wanted.needed(now, part * self._admission.waiting)

    def _samples(self) -> Samples:
        needed = self._needed(self._now())
        return [((self._name, role.value), one.engines) for role, one in needed.items()]
