"""Ends decode legs that wait for a push which is lost, since the prefill engine has died before the
push.

Nothing shows at a decode engine that a prefill engine has died before its push. The decode engine
would wait until a deadline. So when a prefill engine is found down, or was started again, the
decode legs are looked at whose prefill that engine has answered. (While a prefill's answer is
awaited, the prefill leg itself shows the end of the engine.) If the engine is up again at once in
the same run, it was only busy and has missed probes: then no leg is ended.

A decode leg that sends data has its KV, and goes on. A decode leg without data may have its KV,
too: a push comes within milliseconds of the prefill's answer, and an answer that is not streamed
may take minutes. No decode engine shows which of its requests wait for KV. Most show how many wait
(`vllm:num_requests_waiting`). The number of lost pushes is this number, less the requests whose
prefill has not been answered yet. So many decode legs are ended, the latest first. If a decode
engine does not report the number, all its decode legs without data are ended.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Protocol

from pdproxy.fleet.engine import Engine
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import EngineError, EngineTimeoutError, OverloadedError
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.upstream.metrics_page import Scrape

logger = logging.getLogger("pdproxy.kv")

GRACE = 0.75
"""Seconds before each look. A push takes milliseconds, and a stream's first data comes a step
later.
"""
LOOKS = 3
"""How often a decode engine is asked. The smallest number counts: who waits for a push under way is
gone at the next look.
"""


class AwaitedPush(Protocol):
    """A push that a decode leg may wait for. Its engine has sent no data."""

    @property
    def prefill(self) -> str:
        """The URL of the engine that pushes."""

    @property
    def decode(self) -> str | None:
        """The URL of the engine that waits."""

    @property
    def since(self) -> float:
        """Since when there is KV, or a promise of KV, in monotonic seconds."""

    @property
    def promised(self) -> bool:
        """Whether the prefill engine has still to answer."""

    def push_lost(self) -> None:
        """End the decode leg: the prefill engine was lost before its push."""


class LostPushes:
    """Watches the decode legs of one pool after the loss of a prefill engine. `awaited`: returns
    the pushes that are awaited now; `scrape(url)` reads an engine's metrics; `spawn`: runs work in
    the background.
    """

    def __init__(
        self,
        awaited: Callable[[], Iterable[AwaitedPush]],
        spawn: Callable[[Coroutine[object, object, None], str], object],
        engines: Mapping[str, Engine],
        scrape: Callable[[str], Awaitable[Scrape]],
        clock: Clock,
        observers: Observers,
    ) -> None:
        self._awaited = awaited
        self._spawn = spawn
        self._engines = engines
        self._scrape = scrape
        self._clock = clock
        self._observers = observers
        self._watches: dict[tuple[str, str], _Watch] = {}
        """The watch of a prefill and a decode engine: of two, the second would end what works, in
        place of what the first has.
        """

    def lost(self, prefill: str) -> None:
        """An engine's run is over, or seems to be. `prefill`: its URL; of other engines nothing is
        awaited.
        """
        now = self._clock.now()
        engine = self._engines.get(prefill)
        run = (
            engine.in_ledger.run_number if engine is not None and not engine.in_ledger.up else None
        )
        for decode in {one.decode for one in self._awaited() if one.prefill == prefill}:
            # also where nothing was answered yet: an answer may be on its way
            if decode is not None:
                watch = self._watches[prefill, decode] = _Watch(self, prefill, decode, now, run)
                watch.look_later()

    def is_current(self, watch: _Watch) -> bool:
        """Return whether its prefill engine was not lost once more since."""
        return self._watches.get((watch.prefill, watch.decode)) is watch

    def over(self, watch: _Watch) -> None:
        """Forget a watch."""
        if self.is_current(watch):
            del self._watches[watch.prefill, watch.decode]

    def is_back(self, prefill: str, run: int | None) -> bool:
        """Return whether an engine is up again, in its run of this number: it was only busy."""
        engine = self._engines.get(prefill)
        return engine is not None and engine.in_ledger.up and engine.in_ledger.run_number == run

    def after_grace(self, then: Callable[[], None]) -> None:
        """Call `then` after `GRACE`."""
        self._clock.after(GRACE, then)

    def awaited(self, prefill: str, decode: str, until: float) -> list[AwaitedPush]:
        """Return what a decode engine may await of a prefill engine that answered, since `until` or
        before, the latest first.
        """
        found = [
            one
            for one in self._of(decode)
            if one.prefill == prefill and one.since <= until and not one.promised
        ]
        return sorted(found, key=lambda one: one.since, reverse=True)

    def certainly_waiting(self, decode: str) -> int:
        """Return how many requests wait at a decode engine for prefills that were not answered
        yet.
        """
        oldest = self._clock.now() - GRACE  # the decode engine may not have counted a later one yet
        return sum(one.promised and one.since <= oldest for one in self._of(decode))

    def spawn(self, look: Coroutine[object, object, None], decode: str) -> None:
        """Run a look in the background."""
        self._spawn(look, f"lost pushes to {decode}")

    async def waiting(self, decode: str) -> int | None:
        """Return how many requests wait at a decode engine, None if it does not report that."""
        try:
            waiting = (await self._scrape(decode)).waiting
        except (EngineError, OverloadedError) as error:
            if isinstance(error, EngineTimeoutError):
                self._observers.notify(DeadlinePassed(error.wait.value, decode))
            return None
        return int(waiting) if waiting is not None and math.isfinite(waiting) else None

    def _of(self, decode: str) -> list[AwaitedPush]:
        return [one for one in self._awaited() if one.decode == decode]


class _Watch:
    """The looks at one decode engine after the loss of one prefill engine at `lost_at` (monotonic
    seconds).

    `run`: the number of the prefill engine's run, None if it was started again.
    """

    def __init__(
        self, where: LostPushes, prefill: str, decode: str, lost_at: float, run: int | None
    ) -> None:
        self._where = where
        self.prefill = prefill
        self.decode = decode
        self._lost_at = lost_at
        self._run = run
        self._looks = 0
        self._least: int | None = None

    def look_later(self) -> None:
        """Look after a grace period."""
        self._where.after_grace(self._look)

    def _look(self) -> None:
        if self._suspects():
            self._where.spawn(self._compare(), self.decode)
        else:
            self._where.over(self)

    def _suspects(self) -> list[AwaitedPush]:
        if not self._where.is_current(self) or self._where.is_back(self.prefill, self._run):
            return []
        return self._where.awaited(self.prefill, self.decode, self._lost_at)

    async def _compare(self) -> None:
        """Compare the number of requests that wait with those that may; end legs after the last
        look.
        """
        waiting = await self._where.waiting(self.decode)
        suspects = self._suspects()
        if waiting is not None:
            left = max(0, waiting - self._where.certainly_waiting(self.decode))
            self._least = left if self._least is None else min(left, self._least)
        if not suspects or self._least == 0:  # all have their KV
            self._where.over(self)
            return
        self._looks += 1
        if self._looks < LOOKS:
            self.look_later()
            return
        self._where.over(self)
        ended = suspects[: self._least]
        logger.warning(
            "%s was lost: %d requests at %s wait for its KV", self.prefill, len(ended), self.decode
        )
        for one in ended:
            one.push_lost()
