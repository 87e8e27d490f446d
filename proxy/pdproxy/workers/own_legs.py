"""A worker tells the scheduler process what its legs have shown, when it is asked.

Nothing is sent while a request is served: the scheduler process asks when it compares an engine's
own numbers with what the legs of all workers have there.
"""

from __future__ import annotations

from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.observe.events import Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.workers.leg_messages import (
    EngineLegs,
    Told,
    decode_of_scheduler,
    encode,
    topic,
)
from pdproxy.workers.scheduler_link import SchedulerLink


class _Moved:
    """Prompt tokens of one decode engine's legs: `loading` now, and how many of them were `told`;
    `arrived` and not told yet.
    """

    __slots__ = ("arrived", "loading", "told")

    def __init__(self) -> None:
        self.loading = self.told = self.arrived = 0


class WorkerAuditor(Auditor):
    """Counts the KV of this worker's legs. The scheduler process compares it with what engines
    report; accounts here are what it has found.
    """

    def __init__(self, engines: EngineRegistry, ledger: Ledger, observers: Observers) -> None:
        super().__init__(engines, ledger, observers)
        self._moved: dict[Engine, _Moved] = {}

    def asked(self, decode: Engine, prompt_tokens: int) -> None:
        """See `Auditor`."""
        moved = self._moved.get(decode)
        if moved is None:
            moved = self._moved[decode] = _Moved()
        moved.loading += self._blocks(prompt_tokens)

    def over(self, decode: Engine, prompt_tokens: int, *, loaded: bool) -> None:
        """See `Auditor`."""
        if (moved := self._moved.get(decode)) is not None:
            tokens = self._blocks(prompt_tokens)
            moved.loading = max(0, moved.loading - tokens)
            if loaded:
                moved.arrived += tokens

    def changes(self) -> list[EngineLegs]:
        """Return what has changed since the last call."""
        changes: list[EngineLegs] = []
        for engine, moved in list(self._moved.items()):
            change = moved.loading - moved.told
            if change or moved.arrived:
                changes.append(EngineLegs(engine.url, change, moved.arrived))
                moved.told, moved.arrived = moved.loading, 0
            elif not moved.loading:
                del self._moved[engine]
        return changes

    def tell_anew(self) -> None:
        """Begin anew: of what loads now, nothing was told."""
        for moved in self._moved.values():
            moved.told = 0


class OwnLegs:
    """What a worker says of its legs in the pool with number `pool`."""

    def __init__(self, link: SchedulerLink, pool: int, auditor: WorkerAuditor) -> None:
        self._link = link
        self._topic = topic(pool)
        self._auditor = auditor
        link.hears[self._topic] = self._heard
        link.holds[self._topic] = self._begin
        link.say(self._topic, self._begin())

    def __repr__(self) -> str:
        return f"<OwnLegs of {self._topic!r}>"

    def _begin(self) -> bytes:
        """Return what a new scheduler process is told first."""
        self._auditor.tell_anew()
        return encode(Told(0))

    def _heard(self, body: bytes) -> None:
        item = decode_of_scheduler(body)
        self._link.say(self._topic, encode(Told(item.number, self._auditor.changes())))
