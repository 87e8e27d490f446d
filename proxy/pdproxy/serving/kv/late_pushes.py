"""Pushes that are late, although both engines are up: whether one is lost, or nothing but patience
is missing.

A decode leg is silent behind its deadline, and its engine works. It may wait for a place there; or
for the KV of a prefill engine that computes one long step, and pushes behind that. Otherwise the
push is lost, and nothing else would end the wait. So the decode engine is asked how many of its
requests wait for KV, and the prefill engine for a token: a core that makes one has begun with the
pushes that it owes. No decode engine shows which of its requests wait for KV: the oldest legs do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

from pdproxy.fleet.engine import Engine
from pdproxy.kit.clock import Clock, sleep
from pdproxy.kit.errors import EngineError, OverloadedError
from pdproxy.serving.kv.lost_pushes import GRACE, LOOKS, AwaitedPush
from pdproxy.upstream.metrics_page import Scrape


class LatePushes:
    """Looks at the engines of one pool. `awaited`: returns the pushes that are awaited now;
    `scrape(url)` reads an engine's metrics.

    `moves(url)` asks an engine for a token: None if it can't be asked. `suspect(url, since)` has
    its silence watched.
    """

    def __init__(
        self,
        awaited: Callable[[], Iterable[AwaitedPush]],
        engines: Mapping[str, Engine],
        scrape: Callable[[str], Awaitable[Scrape]],
        moves: Callable[[str], Awaitable[bool | None]],
        suspect: Callable[[str, float], None],
        clock: Clock,
    ) -> None:
        self._awaited = awaited
        self._engines = engines
        self._scrape = scrape
        self._moves = moves
        self._suspect = suspect
        self._clock = clock

    async def is_lost(self, push: AwaitedPush) -> bool:
        """Return whether the push that a decode leg may wait for is lost. Its prefill engine has
        answered.
        """
        if not await self._late(push):
            return False
        self._suspect(push.prefill, self._clock.now())
        if await self._moves(push.prefill) is False and self._is_in_use(push.prefill):
            return False
        for _ in range(LOOKS):  # those that have just been asked for wait for milliseconds
            await sleep(self._clock, GRACE)
            if not await self._late(push):
                return False
        return True

    def _is_in_use(self, url: str) -> bool:
        engine = self._engines.get(url)
        return engine is not None and engine.in_ledger.up and engine.in_ledger.stalled is None

    async def _late(self, push: AwaitedPush) -> bool:
        """Return whether a decode leg is among those that wait for KV, as far as its engine shows
        that.
        """
        if push.decode is None:
            return True
        try:
            found = await self._scrape(push.decode)
        except (EngineError, OverloadedError):
            return True
        if found.waiting is None:
            return True
        legs = [one for one in self._awaited() if one.decode == push.decode]
        oldest = self._clock.now() - GRACE  # the decode engine may not have counted a later one yet
        promised = sum(one.promised and one.since <= oldest for one in legs)
        waiting = int(found.waiting - (found.queued or 0.0)) - promised
        answered = sorted((one for one in legs if not one.promised), key=lambda one: one.since)
        return push in answered[: max(0, waiting)]
