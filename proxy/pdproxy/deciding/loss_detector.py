"""Whether an engine is lost: its process has ended, or its core. A connection that breaks alone
does not say so.

The engine is asked for `/health` once, for all requests whose connections have broken at about the
same time. One that does not answer is lost. An engine that is slow, silent, or answers another
error is not lost, nor is one that is drained.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from pdproxy.deciding.loss import Loss
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.clock import Clock
from pdproxy.kit.expiring import Expiring
from pdproxy.kit.one_shot_event import OneShotEvent
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import Observers
from pdproxy.scheduling.ledger_engine import LedgerEngine

TOGETHER = 10.0
"""Seconds in which legs to one run of an engine break together."""
ASK = 0.5
"""Seconds for the answer of an engine. One that takes longer is not lost, as far as is known."""
MOST_KEPT = 1024
"""Losses: the oldest is forgotten."""
_GONE = "it has disappeared under a request"


class LossDetector:
    """Of one pool. `found_gone`: see `Scheduler`. `is_alive` asks the engine of a URL for its
    health. `lost` is called with each that is lost.

    `lost` is called before those that wait for `find_out` go on, and before the engine is taken out
    of use.
    """

    def __init__(
        self,
        found_gone: Callable[[str, str, float], None],
        engines: EngineRegistry,
        is_alive: Callable[[str], Awaitable[bool]],
        observers: Observers,
        tasks: TaskOwner,
        clock: Clock,
        now: Callable[[], float],
        lost: Callable[[Loss], None],
    ) -> None:
        self._found_gone = found_gone
        self._engines = engines
        self._is_alive = is_alive
        self._observers = observers
        self._tasks = tasks
        self._clock = clock
        self._now = now
        self._lost = lost
        self._losses: Expiring[tuple[str, int], Loss] = Expiring(MOST_KEPT)

    def __repr__(self) -> str:
        return f"<LossDetector {len(self._losses)}>"

    def at(self, engine: LedgerEngine) -> Loss | None:
        """Return what is known of a run of an engine to which connections have broken, None if none
        have.
        """
        loss = self._losses.get((engine.url, engine.run_number))
        return None if loss is None or loss.until <= self._now() else loss

    def suspect(self, ledger_engine: LedgerEngine, broke_at: float | None) -> Loss | None:
        """Suspect the loss of an engine. Return None if it is meant to go. `broke_at`: see
        `Loss`.
        """
        engine = self._engines.get(ledger_engine.url)
        if (
            engine is None
            or engine.in_ledger is not ledger_engine
            or ledger_engine.draining is not None
        ):
            return None
        loss = self.at(ledger_engine)
        if loss is None:
            loss = Loss(ledger_engine, self._now() + TOGETHER, broke_at)
            self._losses.keep((ledger_engine.url, ledger_engine.run_number), loss)
        return loss

    def forget_old(self) -> None:
        """Forget those whose time is over."""
        self._losses.forget_old(self._now())

    def find_out(self, loss: Loss) -> OneShotEvent:
        """Ask the engine whether it is still there, unless that was done. Return what announces the
        answer.
        """
        if loss.known is None:
            loss.known = OneShotEvent()
            self._tasks.spawn(self._ask(loss, loss.known), f"is {loss.engine.url} still there")
        return loss.known

    async def _ask(self, loss: Loss, known: OneShotEvent) -> None:
        try:
            with self._clock.within(ASK):
                loss.is_lost = not await self._is_alive(loss.engine.url)
            if loss.is_lost:
                self._lost(loss)
        except TimeoutError:
            loss.is_lost = False
        finally:
            known.set()
        if loss.is_lost:
            self._take_out(loss.engine)
        else:  # what breaks there later is another matter
            loss.until = 0.0

    def _take_out(self, ledger_engine: LedgerEngine) -> None:
        """No other request has to find out that the engine is gone, where another engine of its
        role can serve them.
        """
        engine = self._engines.get(ledger_engine.url)
        if engine is None or engine.in_ledger is not ledger_engine:
            return
        others = (one.in_ledger for one in self._engines.values() if one is not engine)
        if not any(other.role is ledger_engine.role and other.available for other in others):
            return  # it may be back in a moment: requests try it as ever
        self._found_gone(ledger_engine.url, _GONE, self._now())
