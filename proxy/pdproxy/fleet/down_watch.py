"""Ends legs in silence at engines that are down.

An engine sends nothing before an unstreamed answer is whole, which may take as long as a request
may take. If its machine stops meanwhile, its connections stay open: only probes show that. So a leg
ends once probes have found its engine down for some time.
"""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.clock import Clock, Timer
from pdproxy.kit.errors import EngineTimeoutError, Wait

LOOK = 1.2
"""Seconds between two looks, at most."""


class DownWatch:
    """Looks at the legs of all engines of one pool, while any is in silence. `longest`: seconds
    that an engine may be down.
    """

    def __init__(self, engines: EngineRegistry, clock: Clock, longest: Callable[[], float]) -> None:
        self._engines = engines
        self._clock = clock
        self._longest = longest
        self._timer: Timer | None = None

    def watch(self) -> None:
        """Look from now on: a leg begins to wait in silence."""
        if self._timer is None:
            self._timer = self._clock.after(min(self._longest(), LOOK), self._look)

    def _look(self) -> None:
        self._timer = None
        now, most = self._clock.now(), self._longest()
        for engine in list(self._engines.known.values()):
            silent = [leg for leg in engine.open_legs.legs if leg.in_silence]
            if silent and engine.in_ledger.down_for(now) >= most:
                for leg in silent:
                    text = f"{engine.url} has been down for {most:g} s"
                    leg.fail(EngineTimeoutError(text, wait=Wait.BETWEEN_TOKENS))
            elif silent:
                self.watch()
