"""Several proxies in front of the same engines, without a store: how much of an engine's load is
that of other replicas. Pure.

A replica knows its own leases exactly. What the others have is estimated from two facts: there are
`replicas` of them, which get like shares of the requests, and now and then an engine reports how
many requests it has. At that moment the report is the load. From then on, each of our leases that
begins or ends stands for as many as there are replicas: they see the same reports, and send the
same requests. Without a report our own load stands for that of all. vLLM's own balancer is the
model, which multiplies an API server's load by the number of these (`DPLBAsyncMPClient` in
`v1/engine/core_client.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, LedgerEngine, Role
from pdproxy.scheduling.policy import Ask

MAX_REPLICAS = 256
MAX_REPORTED = 1 << 20
"""Requests that an engine may report: more are taken for so many."""
_GAIN = 0.02
"""The weight of one prompt in the mean size of prompts."""


def others(own: int, replicas: int, reported: float | None = None, then: int = 0) -> int:
    """Return how many requests of an engine came from other replicas. `own`: ours now; `replicas`:
    1 or more, with us.

    `reported`: how many it had at its last report, None if there is none that counts; `then`: ours
    at that time.
    """
    if reported is None:
        return (replicas - 1) * own
    return max(0, round(reported) - then + (replicas - 1) * (own - then))


class _Report(NamedTuple):
    """What an engine reported at a time: its requests. `own`: ours then; `run`: the number of the
    engine's run.
    """

    requests: float
    own: int
    at: float
    run: int


class ReplicaLedger(Ledger):
    """A `Ledger` of one of several replicas: an engine's counters hold what the others are
    estimated to have there, too.

    `replicas`: how many there are, with this one. `max_age()`: for how many seconds a report
    counts. An engine that is being drained has our own load alone: nothing chooses it, and its end
    waits for our leases.
    """

    def __init__(
        self,
        specs: Iterable[EngineSpec],
        options: LedgerOptions,
        *,
        replicas: int,
        max_age: Callable[[], float],
    ) -> None:
        super().__init__([], options)
        self.replicas = replicas
        """Read only."""
        self._max_age = max_age
        self._reports: dict[LedgerEngine, _Report] = {}
        self._sizes = dict.fromkeys(Role, 0.0)
        """The mean prompt bytes of our leases, by the role of their engines."""
        for spec in specs:
            self.add(spec)

    def use_replicas(self, replicas: int) -> None:
        """Note that there is another number of replicas."""
        self.replicas = replicas
        if self.placement is not None:
            self.placement.use_replicas(replicas)
        for engine in self.engines:
            self._estimate(engine)

    def reported(self, url: str, requests: float | None, now: float) -> None:
        """Note how many requests an engine has just reported, running ones and those that wait;
        None: it does not say.
        """
        engine = self._engines.get(url)
        if engine is not None:
            if requests is None:
                self._reports.pop(engine, None)
            else:
                own = engine.known_load[0]
                # A sum of what an engine says may be no number.
                count = min(requests, MAX_REPORTED) if requests >= 0 else 0
                self._reports[engine] = _Report(count, own, now, engine.run_number)
            self._estimate(engine)
        longest = self._max_age()
        for old in [one for one, report in self._reports.items() if now - report.at > longest]:
            del self._reports[old]
            self._estimate(old)

    def mark_draining(self, url: str, why: str | None) -> None:
        """See `Ledger`."""
        super().mark_draining(url, why)
        if (engine := self._engines.get(url)) is not None:
            self._estimate(engine)

    def remove(self, url: str) -> None:
        """See `Ledger`. What is left of the engine's load is our own."""
        engine = self._engines[url]
        super().remove(url)
        self._reports.pop(engine, None)
        self._suppose(engine, 0)

    def close(self, lease: Lease, verdict: Verdict, now: float, tokens: int | None = None) -> bool:
        """See `Ledger`."""
        if not lease.closed:
            self._suppose(lease.engine, self._of_replicas(lease.engine, -1))
        return super().close(lease, verdict, now, tokens)

    def _open(self, engine: LedgerEngine, role: Role, prompt_bytes: int, ask: Ask) -> Lease:
        self._sizes[engine.role] += _GAIN * (prompt_bytes - self._sizes[engine.role])
        self._suppose(engine, self._of_replicas(engine, 1))
        return super()._open(engine, role, prompt_bytes, ask)

    def _of_replicas(self, engine: LedgerEngine, more: int) -> int:
        """Return what others have of an engine, when we have so many requests more."""
        if engine.draining is not None or self._engines.get(engine.url) is not engine:
            return 0
        own, report = engine.known_load[0] + more, self._reports.get(engine)
        if report is None or report.run != engine.run_number:
            return others(own, self.replicas)
        return others(own, self.replicas, report.requests, report.own)

    def _estimate(self, engine: LedgerEngine) -> None:
        """Estimate anew what others have of an engine, and have the policies know it."""
        before = engine.of_replicas
        self._suppose(engine, self._of_replicas(engine, 0))
        if engine.of_replicas != before:
            for policy in self._interested[engine.uses]:
                policy.load_changed(engine)

    def _suppose(self, engine: LedgerEngine, requests: int) -> None:
        """Have an engine's counters hold so many requests of other replicas."""
        size, before = requests * round(self._sizes[engine.role]), engine.of_replicas
        engine.requests += requests - before[0]
        engine.prompt_bytes += size - before[1]
        engine.of_replicas = requests, size
