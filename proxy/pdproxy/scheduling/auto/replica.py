"""An engine's load with what other replicas have there: their requests, as many as the ledger says,
taken to be like ours. Pure.

`LedgerEngine.of_replicas` is their number. What they are is not reported: prompts that wait,
sequences that decode and their contexts are the mean ones of our own requests at engines of the
same use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from pdproxy.scheduling.auto.auto import Auto, AutoOptions
from pdproxy.scheduling.auto.demand import Demand
from pdproxy.scheduling.auto.loads import MEMORY_S, PredictedLoad
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.placement import Candidates, Placed
from pdproxy.scheduling.policy import Ask

REVIEW_S = 0.25
"""Seconds for which a mean is used."""
_APART_S = 0.02
"""Up to so many seconds are added to an engine's order for prompts, by chance: replicas would
choose the same one.
"""


class Mean:
    """Our own requests at some engines: sums over these, and means per request of them. Seconds,
    tokens.
    """

    __slots__ = (
        "age_s",
        "context",
        "decoding",
        "delay",
        "expected",
        "expected_tokens",
        "made",
        "outputs",
        "pending_s",
        "pending_steps",
        "pulls",
        "weight",
    )

    def __init__(self, loads: Iterable[PredictedLoad], now: float) -> None:
        engines = requests = decoding = expected = pulls = 0
        tokens = prompts = outputs = age = made = pending = steps = delay = weight = 0.0
        for load in loads:
            engines += 1
            requests += load.engine.known_load[0]
            decoding += load.decoding
            expected += load.expected
            pulls += load.pulls
            weight += load.weight
            tokens += load.expected_tokens
            prompts += load.prompts
            outputs += load.outputs
            age += load.decoding * now - load.began_sum
            made += load.decoding * load.steps - load.began_steps
            pending += load.pending_s
            steps += load.pending_steps
            delay += load.delay * math.exp((load.delay_at - now) / MEMORY_S)
        requests, sequences, waiting = max(requests, 1), max(decoding, 1), max(expected, 1)
        self.decoding, self.expected, self.pulls = (
            decoding / requests,
            expected / requests,
            pulls / requests,
        )
        """The parts of the requests that decode, that are still to begin, and that wait for KV."""
        self.weight = weight / (decoding + expected) if decoding + expected else 1.0
        """What a miss of one that decodes or is to begin counts."""
        self.context, self.outputs = prompts / sequences, outputs / sequences
        """Of a sequence that decodes: its prompt, and its expected answer."""
        self.age_s, self.made = age / sequences, made / sequences
        """Since it began, in seconds and in steps."""
        self.expected_tokens = tokens / waiting
        self.pending_s, self.pending_steps = pending / requests, steps / requests
        """Prefill that is not done, per request."""
        self.delay = delay / max(engines, 1)
        """As `PredictedLoad.delay`, per engine."""


class SeenLoad(PredictedLoad):
    """One engine as all replicas together load it. `own`: what our leases make of it."""

    __slots__ = ("_chance", "mean", "replicas")

    def __init__(self, own: PredictedLoad, replicas: int, chance: Callable[[], float]) -> None:
        super().__init__(own.engine, own.times, assumed=own.assumed, corrects=own.corrects)
        self.own, self.mean, self.replicas, self._chance = own, Mean((), 0.0), replicas, chance

    @property
    def known(self) -> bool:
        """See `PredictedLoad`."""
        return self.own.known

    def advance(self, now: float) -> None:
        """Take over what our leases make of it, and add the others'."""
        own, mean, engine = self.own, self.mean, self.engine
        count = engine.of_replicas[0]
        own.advance(now)
        decoding, expected = round(count * mean.decoding), round(count * mean.expected)
        self.decoding, self.expected = own.decoding + decoding, own.expected + expected
        self.pulls = own.pulls + round(count * mean.pulls)
        self.weight = own.weight + (decoding + expected) * mean.weight
        self.expected_tokens = own.expected_tokens + round(expected * mean.expected_tokens)
        self.prompts = own.prompts + round(decoding * mean.context)
        self.outputs = own.outputs + decoding * mean.outputs
        self.steps, self.wait_s = own.steps, own.wait_s
        self.began_sum = own.began_sum + decoding * (now - mean.age_s)
        self.began_steps = own.began_steps + decoding * (own.steps - mean.made)
        pending = count * mean.pending_s
        self.pending_s, self.pending_steps = (
            own.pending_s + pending,
            own.pending_steps + count * mean.pending_steps,
        )
        self.free_at = max(own.free_at, now) + pending if pending else own.free_at
        self.delay, self.delay_at = own.delay, own.delay_at
        if self.replicas > 1:
            left = math.exp((own.delay_at - now) / MEMORY_S)
            self.delay, self.delay_at = own.delay * left + (self.replicas - 1) * mean.delay, now
        self._order()
        if self.replicas > 1:
            self.prefill_order += _APART_S * self._chance()


class ReplicaAuto(Auto):
    """`Auto` of one of several replicas. `replicas`: how many there are, with this one; `chance`:
    from 0 to 1, without 1.

    Decisions see engines as all replicas load them, and the demand of all. What becomes of our
    leases is noted as by `Auto`.
    """

    def __init__(self, options: AutoOptions, *, replicas: int, chance: Callable[[], float]) -> None:
        super().__init__(options)
        self._replicas, self._chance = replicas, chance
        self._seen_loads: dict[str, SeenLoad] = {}
        self._means_at = -math.inf

    def use_replicas(self, replicas: int) -> None:
        """See `Placement`."""
        self._replicas, self._means_at = replicas, -math.inf

    def place(self, ask: Ask, candidates: Candidates) -> Placed | None:
        """See `Placement`."""
        if ask.now - self._means_at >= REVIEW_S:
            self._review_means(ask.now)
        return super().place(ask, candidates)

    def opened(self, lease: Lease, ask: Ask) -> None:
        """See `Placement`."""
        super().opened(lease, ask)
        self._changed(lease, ask.now)

    def began(self, lease: Lease, now: float) -> None:
        """See `Placement`."""
        super().began(lease, now)
        self._changed(lease, now)

    def closed(self, lease: Lease, verdict: Verdict, now: float, tokens: int | None) -> None:
        """See `Placement`."""
        super().closed(lease, verdict, now, tokens)
        self._changed(lease, now)

    def engines_changed(self, engines: Sequence[LedgerEngine]) -> None:
        """See `Placement`."""
        super().engines_changed(engines)
        present = {engine.url: engine for engine in engines}
        for url in [
            url for url, load in self._seen_loads.items() if present.get(url) is not load.engine
        ]:
            del self._seen_loads[url]

    def _seen(self, engine: LedgerEngine) -> PredictedLoad:
        own = self._load(engine)
        found = self._seen_loads.get(own.url)
        if found is None or found.own is not own:
            found = self._seen_loads[own.url] = SeenLoad(own, self._replicas, self._chance)
        return found

    def _of_all(self, demand: Demand | None) -> Demand | None:
        return None if demand is None else demand.of_all(self._replicas)

    def _changed(self, lease: Lease, now: float) -> None:
        load = self._seen_loads.get(lease.engine.url)
        if load is not None and load.engine is lease.engine:
            load.advance(now)

    def _review_means(self, now: float) -> None:
        """Compute anew what our requests are like, and how the others' load engines."""
        self._means_at = now
        loads = self._seen_loads.values()
        for prefills in (False, True):
            some = [
                load
                for load in loads
                if (load.kept or load.engine.role is Role.PREFILL) is prefills
            ]
            mean = Mean([load.own for load in some], now)
            for load in some:
                load.mean, load.replicas = mean, self._replicas
                load.advance(now)
