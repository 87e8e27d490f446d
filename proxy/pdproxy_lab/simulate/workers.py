"""Several workers of one proxy in front of one fleet, in virtual time: each has a ledger of its
own, on shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import count
from random import Random

from pdproxy.engine_model.hardware import Hardware
from pdproxy.kit.shared_table import SharedTable
from pdproxy.scheduling import worker_breakers, worker_ledger
from pdproxy.scheduling.auto.auto import AutoOptions
from pdproxy.scheduling.auto.workers import AutoMemory, WorkerAuto
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.policy import PolicyFactory
from pdproxy.scheduling.slo import Slo
from pdproxy.scheduling.worker_breakers import WorkerBreakers
from pdproxy.scheduling.worker_ledger import LedgerShare, WorkerLedger
from pdproxy_lab.simulate.cluster import Call, Cluster
from pdproxy_lab.simulate.placements import MakePlacement
from pdproxy_lab.simulate.records import RequestTimes
from pdproxy_lab.simulate.shape import Fleet, Shape

LOOK_S = 0.25
"""Seconds between two looks of a worker at what is shared (`app.share.REFRESH_EVERY`), and between
two samples.
"""
CONNECTIONS = 64
"""Of the clients. Each stays with its worker."""
_SLOTS = 512


def auto(slo: Slo, workers: int, *, leader: int = 0) -> MakePlacement:
    """Return what makes the placement `auto` of each of so many workers, in their order. `leader`:
    who judges for all.
    """
    memory, numbers = AutoMemory(workers, _SLOTS), count()

    def make(cluster: Cluster) -> WorkerAuto:
        number = next(numbers)

        def times_of(engine: LedgerEngine) -> tuple[Hardware, int]:
            return cluster.hardware, cluster.shapes[engine.role].max_num_batched_tokens

        share = memory.of(number, lambda: number == leader)
        return WorkerAuto(
            AutoOptions(times_of=times_of, slo=slo, cached=cluster.memories.cached), share
        )

    return make


class WorkersCluster(Cluster):
    """A `Cluster` behind so many workers, among which connections are spread. Run once."""

    def __init__(
        self,
        fleet: Fleet,
        hardware: Hardware,
        shapes: Mapping[Role, Shape],
        policies: Mapping[Role, str | PolicyFactory],
        placement: MakePlacement | None = None,
        *,
        workers: int,
        seed: int = 0,
    ) -> None:
        self._chance = Random(f"{seed}:connections")
        self._loads = SharedTable(workers, _SLOTS, worker_ledger.MEASURES)
        self._breakers = SharedTable(
            workers, _SLOTS, worker_breakers.MEASURES, worker_breakers.KEPT
        )
        self._numbers = count()
        self._last_due = 0.0
        self.samples: list[tuple[float, float]] = []
        """While requests come: the largest number of requests of an engine that answers clients,
        and the mean one.
        """
        super().__init__(fleet, hardware, shapes, policies, placement)
        self.ledgers = [self.ledger, *(self.make_ledger() for _ in range(workers - 1))]
        self._of_connection = [self.ledgers[number % workers] for number in range(CONNECTIONS)]
        for number, ledger in enumerate(self.ledgers):  # they were not started at the same time
            self._at(LOOK_S * number / workers, self._looked, ledger)
        self._at(LOOK_S, self._sampled, None)

    def make_ledger(self) -> Ledger:
        """Return the ledger of the next worker."""
        number = next(self._numbers)
        column, others = self._breakers.of(number)
        breakers = partial(WorkerBreakers, column=column, others=others, number=number)
        share = LedgerShare(*self._loads.of(number), breakers)
        return self.all_up(WorkerLedger(self.specs, self.ledger_options(seed=number), share))

    def ledger_for(self, call: Call) -> Ledger:
        """See `Cluster`."""
        return self._chance.choice(self._of_connection)

    def run(self, calls: Iterable[Call]) -> RequestTimes:
        """See `Cluster`."""
        planned = list(calls)
        self._last_due = planned[-1].due
        return super().run(planned)

    def _looked(self, ledger: Ledger, now: float) -> None:
        if isinstance(ledger.placement, WorkerAuto):
            ledger.placement.look(now)
        if now < self._last_due:
            self._at(now + LOOK_S, self._looked, ledger)

    def _sampled(self, _: None, now: float) -> None:
        counts = [
            engine.requests
            for url, engine in self.engines.items()
            if self.roles[url] is not Role.PREFILL
        ]
        self.samples.append((max(counts), sum(counts) / len(counts)))
        if now < self._last_due:
            self._at(now + LOOK_S, self._sampled, None)
