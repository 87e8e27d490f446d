"""Placements in virtual time: `auto` with what the virtual engines hold, and the fixed rules that
it is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from operator import attrgetter
from random import Random
from typing import TYPE_CHECKING

from pdproxy.engine_model.hardware import Hardware
from pdproxy.scheduling.auto.auto import Auto, AutoOptions
from pdproxy.scheduling.auto.replica import ReplicaAuto
from pdproxy.scheduling.ledger_engine import LedgerEngine
from pdproxy.scheduling.placement import Candidates, Placed, Placement
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.slo import NO_SLO, Slo
from pdproxy_lab.bench import slo as bench

if TYPE_CHECKING:
    from pdproxy_lab.simulate.cluster import Cluster

MakePlacement = Callable[["Cluster"], Placement]
"""Makes the placement of a cluster."""


def bounds_of(slo: bench.BenchSlo | None = None) -> Slo:
    """Return the bounds of an SLO of a measurement, for a placement; None: no bounds."""
    return NO_SLO if slo is None else Slo(slo.ttft, slo.tpot, slo.gap)


def auto(
    slo: Slo,
    *,
    hardware: Hardware | None = None,
    prefixes: bool = True,
    replicas: int | None = None,
) -> MakePlacement:
    """Return what makes the placement `auto`. `hardware`: what it believes the engines to be; None:
    what they are.

    `prefixes`: whether it knows what is in their caches. `replicas`: as how many proxies it
    chooses, None if it is alone.
    """

    numbers = count()

    def make(cluster: Cluster) -> Placement:
        believed = hardware or cluster.hardware
        cached = cluster.memories.cached if prefixes else None

        def times_of(engine: LedgerEngine) -> tuple[Hardware, int]:
            return believed, cluster.shapes[engine.role].max_num_batched_tokens

        options = AutoOptions(times_of=times_of, slo=slo, cached=cached)
        if replicas is None:
            return Auto(options)
        return ReplicaAuto(options, replicas=replicas, chance=Random(next(numbers)).random)

    return make


class Hybrid(Placement):
    """Splits a prompt unless it is short or the prefill engines are busy; then the decode engine
    with the fewest requests serves it whole.

    `legs`: as many requests at the least loaded prefill engine are too many; `tokens`: prompts that
    are not longer are short.
    """

    def __init__(self, *, legs: int | None = None, tokens: int = 0) -> None:
        self._legs, self._tokens = legs, tokens
        self._turn = 0

    def place(self, ask: Ask, candidates: Candidates) -> Placed | None:
        """See `Placement`."""
        self._turn += 1
        decode = self._least(candidates.decode or candidates.whole, "requests", "prompt_bytes")
        if not candidates.prefill or (ask.tokens is not None and ask.tokens <= self._tokens):
            return Placed((decode,), "short")
        prefill = self._least(candidates.prefill, "prompt_bytes", "requests")
        if self._legs is not None and prefill.requests >= self._legs:
            return Placed((decode,), "busy")
        return Placed((prefill, decode), "split")

    def _least(self, engines: tuple[LedgerEngine, ...], *measures: str) -> LedgerEngine:
        turn = self._turn % len(engines)
        return min((*engines[turn:], *engines[:turn]), key=attrgetter(*measures))
