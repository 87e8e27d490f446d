"""Engines' states, which the scheduler process writes and publishes, and workers follow: what they
say of them, and how a state is taken over.

What a worker notes of an engine by itself it says; until the scheduler process has heard that,
states of this engine may be older, and don't count. Of the states of an engine that workers tell a
new scheduler process, the newest counts there, and none that is older than what the new process has
found out itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.engine import AuditAccount, Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.observe.events import NodeChanged, Observers
from pdproxy.scheduling.breakers import BreakerState
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import Evidence
from pdproxy.workers.calls import told


class EngineState(msgspec.Struct, array_like=True, frozen=True):
    """What is known of an engine. `at`: when that was noted, in monotonic seconds.

    `down`, `stalled`: why, None if it is not; `down_since`, `asleep`, `ejected`: see
    `LedgerEngine`. `left_out`: see `Outliers.left_out`. `account`, `blind`: of its audit.
    """

    url: str
    at: float
    evidence: Evidence | None
    down: str | None
    down_since: float
    stalled: str | None
    asleep: str | None
    ejected: list[str]
    breaker: BreakerState
    left_out: tuple[float, int] | None
    kv_expired: float | None
    account: AuditAccount | None
    blind: bool


TOPIC = "engines"
"""Behind this word, the topic of the states of a pool's engines has the pool's number."""


class StatesAtWorker(Protocol):
    """What a worker is told besides the states."""

    @told
    def heard(self, number: int) -> None:
        """What the worker has noted up to this number is known: the states of these engines are
        sent behind this.
        """


class Following:
    """Takes states over: in a worker those of the scheduler process, and in a new scheduler process
    those that workers have. `then`: called with an engine of which something was noted in any other
    way.
    """

    def __init__(
        self,
        engines: EngineRegistry,
        ledger: Ledger,
        auditor: Auditor,
        observers: Observers,
        now: Callable[[], float],
        then: Callable[[str], None],
    ) -> None:
        self._engines = engines
        self._ledger = ledger
        self._auditor = auditor
        self._observers = observers
        self._now = now
        self._then = then
        self._is_following = False
        ledger.when_noted = self._noted

    def _noted(self, url: str) -> None:
        if not self._is_following:
            self._then(url)

    def follow(self, engine: Engine, state: EngineState, before: EngineState | None) -> None:
        """Take an engine's state over. `before`: the one that was taken over last."""
        self._is_following = True
        try:
            self._follow(engine, state, before)
        finally:
            self._is_following = False

    def follow_leaving(self, state: EngineState) -> None:
        """Note whether an engine is up that was removed: legs to it are under way."""
        for engine in self._engines.leaving:
            if engine.url == state.url:
                self._ledger.mark_removed(engine.in_ledger, state.down, state.down_since)

    def stalled(self, engine: Engine, why: str) -> None:
        """Note that a worker has found an engine to stand still."""
        if self._ledger.mark_stalled(engine.url, why):
            self._changed(engine, "stalled", why)

    def follow_audit(self, engine: Engine, state: EngineState) -> None:
        """Take the account of an engine's audit over."""
        self._auditor.follow(engine, state.account, blind=state.blind)

    def _follow(self, engine: Engine, state: EngineState, before: EngineState | None) -> None:
        ledger, ledger_engine, url = self._ledger, engine.in_ledger, engine.url
        is_first = not ledger_engine.probed
        if state.down is not None:
            if ledger.mark_down(url, state.down, state.down_since) or is_first:
                self._changed(engine, "down", state.down)
        elif state.evidence is not None:
            if is_first or _was_down_between(state, before):
                ledger.mark_down(url, "was down", state.down_since)
            if ledger.mark_up(url, state.evidence):
                self._changed(engine, None, "it is up")
            if state.stalled is None:
                if ledger.let_in(url, self._now()):
                    self._changed(engine, None, "it has shown a sign")
            elif ledger.mark_stalled(url, state.stalled):
                self._changed(engine, "stalled", state.stalled)
        for other in state.ejected:
            if other not in ledger_engine.ejected:
                ledger.eject(url, other)
        if ledger.mark_asleep(url, state.asleep):
            how = state.asleep
            self._changed(engine, None if how is None else "asleep", how or "it is awake")
        ledger.breakers.follow(ledger_engine, state.breaker)
        engine.kv_expired = state.kv_expired

    def _changed(self, engine: Engine, out: str | None, reason: str) -> None:
        """Tell of a change. `out`: how the engine is out of use, None if it is in use."""
        url, role = engine.url, engine.in_ledger.role.value
        event = NodeChanged(url, role, up=out is None, reason=reason, state=out or "down")
        self._observers.notify(event)


def _was_down_between(state: EngineState, before: EngineState | None) -> bool:
    """Return whether an engine that was up, and is, was down between: without a start time nothing
    else shows that its run is another one.
    """
    return (
        before is not None
        and before.down is None
        and before.evidence is not None
        and not before.evidence.started
        and before.down_since != state.down_since
    )
