"""Requests that wait for engines that stand still: none of the others can serve them, and an engine
may only be slow.

A plain engine would answer all of them behind its long step. A request waits as long as one that
waits for a place, and keeps its place meanwhile: so no more than half of the places wait here, and
the requests of other pools go on. Whenever an engine has changed, those that wait are tried again.
"""

from __future__ import annotations

import asyncio

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import Wait
from pdproxy.observe.description import MergeRule, gauge
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.scheduling.engine_states import EngineStates
from pdproxy.settings.limits import Limits

WAITING_FOR_ENGINES = gauge(
    "pdproxy_waiting_for_engines",
    "requests",
    "Requests that wait for an engine that stands still, because no other can serve them "
    "(deadlines.queue)",
    workers=MergeRule.SUM,
)


class Comebacks:
    """All such requests of one pool."""

    def __init__(
        self, states: EngineStates, clock: Clock, observers: Observers, limits: Limits
    ) -> None:
        self._states = states
        self._clock = clock
        self._observers = observers
        self._limits = limits
        self._waiting: dict[asyncio.Future[None], None] = {}
        states.when_changed(self._changed)
        observers.show(WAITING_FOR_ENGINES, lambda: [((), self.waiting)])

    def __repr__(self) -> str:
        return f"<Comebacks {self.waiting} waiting>"

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    async def wait(self, model: str | None, until: float) -> bool:
        """Wait until the engines have changed, up to a time. Return False if that is no use, or if
        too many wait.
        """
        most = min(self._limits.max_queue, self._limits.max_inflight // 2)
        if not self._states.may_return(model) or self.waiting >= most:
            return False
        changed = asyncio.get_running_loop().create_future()
        self._waiting[changed] = None
        try:
            with self._clock.within(until - self._clock.now()):
                await changed
        except TimeoutError:
            self._observers.notify(DeadlinePassed(Wait.ENGINE.value))
            return False
        finally:
            self._waiting.pop(changed, None)
        return True

    def _changed(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
