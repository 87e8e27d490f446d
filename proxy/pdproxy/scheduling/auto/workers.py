"""`Auto` of one of several workers: it chooses as one process would, on numbers that all workers
share. Pure.

The loads of engines are those of all workers (`worker_loads`), read before each decision. Demand
and lengths of answers are exchanged several times per second (`worker_demand`). Which engines are
kept for prefill is decided by the process that leads. How wrong predictions were is each worker's
own: a metric alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdproxy.kit.shared_rows import OtherRows, OwnRows, SharedRows
from pdproxy.scheduling.auto import worker_demand, worker_loads
from pdproxy.scheduling.auto.auto import Auto, AutoOptions, Group
from pdproxy.scheduling.auto.loads import PredictedLoad
from pdproxy.scheduling.auto.replica import ReplicaAuto
from pdproxy.scheduling.auto.roles import REVIEW_S, typical
from pdproxy.scheduling.auto.times import WorkTimes
from pdproxy.scheduling.auto.view import EnginesView, models_of
from pdproxy.scheduling.auto.worker_demand import WorkerMeter, WorkerOutputs
from pdproxy.scheduling.auto.worker_loads import WorkerLoad
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.placement import Candidates, Placed, PlacementState
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.slo import Slo

_GROUPS = 64
"""Sets of models whose demand is shared. That for others counts in each worker by itself."""


class AutoMemory:
    """The memory of so many workers for one pool. Make it before they are forked."""

    def __init__(self, workers: int, engines: int) -> None:
        self.loads = SharedRows(workers, engines, worker_loads.FLOATS)
        self.demand = SharedRows(workers, _GROUPS, worker_demand.DEMAND_FLOATS)
        self.outputs = SharedRows(workers, 1, worker_demand.OUTPUT_FLOATS)

    def clear(self, number: int) -> None:
        """Give back what a worker had that has ended."""
        for rows in (self.loads, self.demand, self.outputs):
            rows.clear(number)

    def of(self, number: int, leads: Callable[[], bool]) -> AutoShare:
        """Return a worker's part. `leads()`: whether it judges for all."""
        return AutoShare(
            leads,
            *[
                (rows.column(number), rows.others(number))
                for rows in (self.loads, self.demand, self.outputs)
            ],
        )


@dataclass(frozen=True, slots=True)
class AutoShare:
    """A worker's part of an `AutoMemory`: its own rows, and the other workers' rows."""

    leads: Callable[[], bool]
    loads: tuple[OwnRows, OtherRows]
    demand: tuple[OwnRows, OtherRows]
    outputs: tuple[OwnRows, OtherRows]


class WorkerAuto(Auto):
    """See the module. `look` has to be called several times per second."""

    def __init__(self, options: AutoOptions, share: AutoShare) -> None:
        super().__init__(options)
        self._share = share
        self._of_key: dict[int, WorkerLoad] = {}
        self._meters: dict[frozenset[str], WorkerMeter] = {}
        self._outputs = WorkerOutputs(*share.outputs)
        self.outputs = self._outputs
        self._changed_at: float | None = None
        """When the change was made that was marked last, None if none was since the age was
        computed.
        """
        self.shared_age = 0.0
        """How long before it was read here another worker had made the last change of an engine's
        load, in seconds. Read only.
        """

    def place(self, ask: Ask, candidates: Candidates) -> Placed | None:
        """See `Placement`."""
        self._read(ask.now)
        return super().place(ask, candidates)

    def look(self, now: float) -> None:
        """Take what other workers have noted, and review which engines are kept for prefill where
        this one leads.
        """
        available = [engine for engine in self._engines if engine.available]
        for engine in available:  # also where no request has come yet
            self._load(engine)
        self._read(now)
        for load in self._of_key.values():
            load.advance(now)  # answers that come as a whole begin
        self._outputs.exchange()
        for models in {models_of(engine) for engine in available}:
            group = self._group(models)
            if now - group.reviewed >= REVIEW_S:
                self._review_group(now, models, group)

    def _review(self, now: float, view: EnginesView, group: Group) -> None:
        self.look(now)
        group.reviewed = now  # also where its engines were not found

    def _review_group(self, now: float, models: frozenset[str], group: Group) -> None:
        engines = [
            engine for engine in self._engines if engine.available and models_of(engine) == models
        ]
        loads = [self._seen(engine) for engine in engines if engine.role is Role.ANY]
        if len(loads) < 2 or not self.slo:
            return
        group.reviewed = now
        meter, times = self._meters[models], typical(loads)
        meter.exchange(now)
        demand = self._of_all(meter.demand(now, times))
        kept = group.kept
        if self._share.leads():
            prefill = sum(engine.role is Role.PREFILL for engine in engines)
            kept.review(now, loads, demand, times, prefill, len(engines) - len(loads))
            for load in loads:
                own = load.own
                assert isinstance(own, WorkerLoad)
                own.tell_kept(kept=load.kept)
            meter.tell_share(kept.share)
        else:
            kept.count, kept.share = sum(load.kept for load in loads), meter.share

    def _read(self, now: float) -> None:
        """Mark the engines that other workers have changed. What has changed is taken of those that
        are looked at.
        """
        self._mark()
        if self._changed_at is not None:
            self.shared_age, self._changed_at = max(0.0, now - self._changed_at), None

    def _mark(self) -> None:
        written = self._share.loads[1].written()
        if written is None:
            for load in self._of_key.values():
                load.read()
            return
        of_key = self._of_key
        for column, key, head in written:
            one = of_key.get(key)
            if one is not None:
                one.mark(column, head)
                self._changed_at = head[-1]

    def _as_least_load(self, view: EnginesView, candidates: Candidates) -> Placed | None:
        for load in self._of_key.values():
            load.take()
        return super()._as_least_load(view, candidates)

    def _kept_changed(self, load: PredictedLoad) -> None:
        """The leading process keeps an engine for prefill, or does not any more."""
        for group in self._groups.values():
            group.kept.changes += 1

    # -- engines, and what belongs to them

    def engines_changed(self, engines: Sequence[LedgerEngine]) -> None:
        """See `Placement`."""
        super().engines_changed(engines)
        for key, load in list(self._of_key.items()):
            if self._loads.get(load.url) is not load:
                load.leave()
                del self._of_key[key]
        for models in [models for models in self._meters if models not in self._groups]:
            self._meters.pop(models).leave()

    def configure(self, slo: Slo, *, refuses: bool) -> None:
        """See `Placement`."""
        super().configure(slo, refuses=refuses)
        for meter in self._meters.values():
            meter.leave()
        self._meters.clear()

    def _new_load(self, engine: LedgerEngine, times: WorkTimes) -> WorkerLoad:
        load = WorkerLoad(
            engine,
            times,
            *self._share.loads,
            self._kept_changed,
            assumed=self._assumed(engine),
            corrects=self._corrects,
            look=self._mark,
        )
        self._of_key[load.key] = load
        return load

    def _new_meter(self, models: frozenset[str]) -> WorkerMeter:
        meter = self._meters[models] = WorkerMeter(" ".join(sorted(models)), *self._share.demand)
        return meter

    def state(self) -> PlacementState:
        """See `Placement`."""
        found = super().state()
        return PlacementState(found.errors, found.corrections, found.kept, self.shared_age)


class WorkerReplicaAuto(ReplicaAuto, WorkerAuto):
    """`Auto` of one of several workers of one of several replicas: what others have is added to the
    loads of all workers.
    """

    def __init__(
        self, options: AutoOptions, share: AutoShare, *, replicas: int, chance: Callable[[], float]
    ) -> None:
        WorkerAuto.__init__(self, options, share)
        self._begin(replicas, chance)

    def _read(self, now: float) -> None:
        super()._read(now)
        for load in self._of_key.values():
            if (
                load.is_marked
                and (seen := self._seen_loads.get(load.url)) is not None
                and seen.own is load
            ):
                seen.advance(now)

    def _kept_changed(self, load: PredictedLoad) -> None:
        super()._kept_changed(load)
        if (seen := self._seen_loads.get(load.url)) is not None and seen.own is load:
            seen.kept = load.kept
