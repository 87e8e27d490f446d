"""The breakers: an engine that failed too often in a row gets no requests for a time, then one,
then more and more.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdproxy.scheduling.leases import Lease
from pdproxy.scheduling.ledger_engine import LedgerEngine

TRIED = 1 << 10
"""Places of a slow start at which it is over, whatever time is left: so many requests at once are
what any engine has.
"""


class BreakerState(msgspec.Struct, array_like=True, frozen=True):
    """The breaker of an engine, as `LedgerEngine` has it."""

    failures: int
    open_until: float
    trial_places: int
    slow_until: float
    why: str | None


class Breakers:
    """After `failures` failed legs in a row, an engine's breaker is open for `cooldown` seconds.

        closed --failures in a row--> open --cooldown--> half-open --a good leg--> slow start
        --time--> closed
                                        ^                    |
                                        +----a failed leg----+

    Open: the engine is chosen only if there is no other. Half-open: it gets one request at a time,
    until one has shown data or ended well. Slow start: for `slow_start` seconds it has two places
    at first, and twice as many after each good leg; 0: none. Legs that were sent before the breaker
    opened may still end. While it is open, their failures neither open it again nor keep it open
    for longer, and a good one resets the count of failures without closing it. After the cooldown
    they count as all do.
    """

    def __init__(self, failures: int, cooldown: float, slow_start: float = 0.0) -> None:
        self.configure(failures, cooldown, slow_start)
        self.opened: set[LedgerEngine] = set()
        """Engines whose breaker was opened and is not closed yet, also those that are half-open or
        start slowly.
        """
        self.changed: Callable[[LedgerEngine], None] = lambda _: None
        """Called when a breaker was opened or closed, or lets more requests pass."""

    def configure(self, failures: int, cooldown: float, slow_start: float) -> None:
        """Use these numbers from the next failure, or the next good leg, on."""
        self._failures, self._cooldown, self._slow_start = failures, cooldown, slow_start

    def leased(self, lease: Lease) -> None:
        """A request begins at one of the engines in `opened`, or at another one."""
        engine = lease.engine
        if engine.trial_places:
            lease.trial = engine.trial_number
            engine.trials += 1

    def over(self, lease: Lease) -> None:
        """A leg that has the number of a trial is over."""
        if lease.trial == lease.engine.trial_number:
            lease.engine.trials -= 1

    def proved(self, lease: Lease, now: float) -> None:
        """The engine of a trial has shown data, or has ended the leg well. Calling it twice for a
        leg changes nothing.
        """
        engine = lease.engine
        if lease.proved or lease.trial != engine.trial_number or now < engine.open_until:
            return
        lease.proved = True
        self._tried(engine, now)

    def good(self, lease: Lease, now: float) -> None:
        """A leg of an engine ended well."""
        engine = lease.engine
        engine.failures = 0
        if lease.trial:
            self.proved(lease, now)
        elif now >= engine.open_until:
            self._tried(engine, now)

    def failed(self, lease: Lease, now: float) -> bool:
        """A leg of an engine failed. Return whether this opened its breaker.

        An engine that is down or stalled gets no requests anyway.
        """
        engine = lease.engine
        engine.failures += 1
        if now < engine.open_until or engine.down_because is not None or engine.stalled is not None:
            return False
        is_trial = lease.trial == engine.trial_number and engine.half_open(now)
        if engine.failures < self._failures and not is_trial:
            return False
        self._half_open(engine)
        engine.open_until = now + self._cooldown
        engine.excluded_because = None
        return True

    def exclude(self, engine: LedgerEngine, why: str, until: float) -> None:
        """Open an engine's breaker until a time, whatever its last legs have shown."""
        self._half_open(engine)
        engine.failures, engine.open_until, engine.excluded_because = 0, until, why

    def let_in(self, engine: LedgerEngine, now: float) -> None:
        """Let an engine show with one request that it serves again."""
        engine.failures = 0
        self._half_open(engine)
        engine.open_until = now

    def warm_up(self, engine: LedgerEngine, now: float) -> None:
        """Begin the slow start of an engine that has no failures: its run is new. Without slow
        starts nothing changes.
        """
        if self._slow_start:
            self._half_open(engine)
            engine.trial_places, engine.open_until, engine.slow_until = (
                2,
                0.0,
                now + self._slow_start,
            )

    def take_over(self, engine: LedgerEngine, before: LedgerEngine) -> None:
        """Have an engine whose settings have changed be as far out of use as before. `before`: a
        copy of its engine from then.
        """
        engine.failures = before.failures
        if before.open_until or before.trial_places:
            self._half_open(engine)
            engine.open_until, engine.excluded_because = before.open_until, before.excluded_because
            engine.trial_places, engine.slow_until = before.trial_places, before.slow_until

    def any_left(self, now: float) -> bool:
        """End the slow starts whose time is over. Return whether any engine is still in
        `opened`.
        """
        for engine in [one for one in self.opened if one.slow_until and now >= one.slow_until]:
            self._close(engine)
        return bool(self.opened)

    def reset(self, engine: LedgerEngine) -> None:
        """Forget an engine's failures."""
        engine.failures = 0
        self._close(engine)

    @staticmethod
    def state(engine: LedgerEngine) -> BreakerState:
        """Return the breaker of an engine, for `follow`."""
        return BreakerState(
            engine.failures,
            engine.open_until,
            engine.trial_places,
            engine.slow_until,
            engine.excluded_because,
        )

    def follow(self, engine: LedgerEngine, state: BreakerState) -> None:
        """Have a breaker be in a state."""
        engine.failures, engine.excluded_because = state.failures, state.why
        engine.open_until, engine.slow_until = state.open_until, state.slow_until
        engine.trial_places = state.trial_places
        if state.trial_places:
            self.opened.add(engine)
        else:
            self.opened.discard(engine)

    def _half_open(self, engine: LedgerEngine) -> None:
        """Have an engine get one request at a time, once its cooldown is over."""
        self.changed(engine)
        self.opened.add(engine)
        engine.trial_number += 1  # what began before is no trial any more
        engine.trials, engine.trial_places, engine.slow_until = 0, 1, 0.0

    def _tried(self, engine: LedgerEngine, now: float) -> None:
        if engine.trial_places and (not engine.slow_until or now < engine.slow_until):
            self.changed(engine)
            engine.trial_places *= 2
            if not engine.slow_until:
                engine.open_until, engine.slow_until = 0.0, now + self._slow_start
            if now < engine.slow_until and engine.trial_places < TRIED:
                return
        self._close(engine)

    def _close(self, engine: LedgerEngine) -> None:
        if engine.trial_places:
            self.changed(engine)
        engine.open_until = engine.slow_until = 0.0
        engine.trials = engine.trial_places = 0
        engine.excluded_because = None
        self.opened.discard(engine)
