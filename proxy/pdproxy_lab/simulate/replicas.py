"""Several proxies in front of one fleet, in virtual time: each has a ledger of its own, and reads
what engines report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any

import msgspec

from pdproxy.engine_model.hardware import Hardware
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.scheduling.policy import Cached, PolicyFactory
from pdproxy.scheduling.replicas import ReplicaLedger
from pdproxy_lab.simulate.cluster import Call, Cluster
from pdproxy_lab.simulate.memories import RoutedMemories
from pdproxy_lab.simulate.placements import MakePlacement
from pdproxy_lab.simulate.records import RequestTimes
from pdproxy_lab.simulate.shape import Fleet, Shape

SAMPLE_S = 0.25
"""Seconds between two looks at all engines."""


class Replicas(msgspec.Struct, frozen=True, kw_only=True):
    """The proxies. `told`: as how many each chooses; 1: as if it were alone, without reports.

    `scrape_s`: seconds between two reports of an engine to one of them. `by_session`: the balancer
    gives the requests of a session to one of them; otherwise chance decides. `events`: each knows
    what is in all engines' caches; otherwise only what it has sent there itself. `direct`: the part
    of the requests that comes to the first `direct_to` engines past all of them.
    """

    count: int = 1
    told: int = 1
    scrape_s: float = 5.0
    by_session: bool = False
    events: bool = True
    direct: float = 0.0
    direct_to: int = 1


class ReplicatedCluster(Cluster):
    """A `Cluster` behind several proxies. Run once."""

    def __init__(
        self,
        fleet: Fleet,
        hardware: Hardware,
        shapes: Mapping[Role, Shape],
        policies: Mapping[Role, str | PolicyFactory],
        placement: MakePlacement | None = None,
        *,
        replicas: Replicas,
        seed: int = 0,
    ) -> None:
        super().__init__(fleet, hardware, shapes, policies, placement)
        self._replicas, self._chance = replicas, Random(f"{seed}:balancer")
        self._last_due = 0.0
        self._routed: dict[int, RoutedMemories] = {}
        """What each proxy has sent where, by the identity of its ledger."""
        self.samples: list[tuple[float, float]] = []
        """While requests come: the largest number of requests of an engine that answers clients,
        and the mean one.
        """
        self.ledgers = [self._make(number) for number in range(replicas.count)]
        for url in list(self.engines)[replicas.direct_to :]:
            self.ledger.mark_draining(url, "others' clients don't use it")
        self._at(SAMPLE_S, self._sampled, None)

    def _make(self, number: int) -> Ledger:
        replicas = self._replicas
        cached: Cached | None = None
        routed: RoutedMemories | None = None
        if not replicas.events:
            units = {
                url: (self.shapes[role].kv_tokens, self.shapes[role].unit_tokens)
                for url, role in self.roles.items()
            }
            routed = RoutedMemories(units)
            cached = routed.cached
        options = self.ledger_options(seed=number, cached=cached)
        ledger: Ledger
        if replicas.told == 1:
            ledger = self.all_up(Ledger(self.specs, options))
        else:
            ledger = self.all_up(
                ReplicaLedger(
                    self.specs,
                    options,
                    replicas=replicas.told,
                    max_age=lambda: 3 * replicas.scrape_s,
                )
            )
            # Each proxy was started at another time. It asks all engines at once.
            self._at(self._chance.random() * replicas.scrape_s, self._scraped, ledger)
        if routed is not None:
            self._routed[id(ledger)] = routed
        return ledger

    def run(self, calls: Iterable[Call]) -> RequestTimes:
        """See `Cluster`."""
        planned = list(calls)
        self._last_due = planned[-1].due
        return super().run(planned)

    def ledger_for(self, call: Call) -> Ledger:
        """See `Cluster`."""
        replicas = self._replicas
        if replicas.direct and self._chance.random() < replicas.direct:
            return self.ledger
        chance = (
            Random(call.session)
            if replicas.by_session and call.session is not None
            else self._chance
        )
        return self.ledgers[chance.randrange(replicas.count)]

    def _arrived(self, call: Call, now: float) -> None:
        super()._arrived(call, now)
        lease = call.prefill_lease or call.lease
        if lease is not None and (routed := self._routed.get(id(call.ledger))) is not None:
            routed.routed(lease.engine.url, call.keys)

    def _scraped(self, ledger: ReplicaLedger, now: float) -> None:
        for url, engine in self.engines.items():
            ledger.reported(url, engine.requests, now)
        self._again(self._replicas.scrape_s, self._scraped, ledger)

    def _sampled(self, _: None, now: float) -> None:
        counts = [
            engine.requests
            for url, engine in self.engines.items()
            if self.roles[url] is not Role.PREFILL
        ]
        self.samples.append((max(counts), sum(counts) / len(counts)))
        self._again(SAMPLE_S, self._sampled, None)

    def _again(self, seconds: float, what: Callable[[Any, float], None], argument: Any) -> None:
        if self.now < self._last_due:
            self._at(self.now + seconds, what, argument)
