"""Whether an engine is seen to work on what it was sent, although a leg to it is silent.

Engines withhold events while they work: a parser of tool calls sends nothing for a whole argument,
a grammar is compiled, reasoning is left out, a prompt waits for its turn. So silence alone is no
failure. Silence is a failure if the engine shows nothing (`fleet.stall_watch`), does not answer, or
reports fewer requests than were sent to it: then the silent request is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from pdproxy.fleet.engine import Engine
from pdproxy.fleet.health_canary import HealthCanary
from pdproxy.kit.errors import EngineError, OverloadedError
from pdproxy.observe.description import Label, counter
from pdproxy.observe.events import WAITS, Observers, SilenceAllowed
from pdproxy.upstream.metrics_page import Scrape

COUNTED = 1.0
"""Seconds before an engine's last sign: what was sent earlier is in the numbers that it reports."""
LOOKS, BETWEEN = 5, 0.1
"""How often these numbers are read before they prove that a request is lost, and the seconds
between.
"""
SILENCES_ALLOWED = counter(
    "pdproxy_silences_allowed_total",
    "waits",
    "Waits for a silent engine that went on behind their deadline, because it was seen to work",
    Label(
        "wait",
        tuple(one for one in WAITS if one[0] in ("prefill", "first_token", "between_tokens")),
    ),
    of=SilenceAllowed,
)


class Works:
    """Looks at the engines of a pool. `is_watched`: whether engines are watched at all; if not,
    nothing excuses a silence.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        scrape: Callable[[str], Awaitable[Scrape]],
        observers: Observers,
        is_watched: Callable[[], bool],
        canary: HealthCanary,
    ) -> None:
        self._engines = engines
        self._scrape = scrape
        self._observers = observers
        self._is_watched = is_watched
        self._canary = canary

    async def on_all(self, url: str, wait: str) -> bool:
        """Return whether an engine works on all that it was sent. `wait`: the wait that may go on,
        for the metric.
        """
        engine = self._engines.get(url)
        if engine is None or not self._is_watched():
            return False
        if not engine.open_legs.waits_out and not await self._works(engine):
            return False
        self._observers.notify(SilenceAllowed(wait, url))
        return True

    async def moves(self, url: str) -> bool | None:
        """Return whether an engine has answered with a token; None if it can't be asked, or refuses
        to say.
        """
        engine = self._engines.get(url)
        return (
            None
            if engine is None or not self._canary.may_ask(engine)
            else await self._canary.works(engine, None)
        )

    async def _works(self, engine: Engine) -> bool:
        return (
            self._shows_work(engine)
            and not await self._has_lost(engine)
            and self._shows_work(engine)
        )

    def _shows_work(self, engine: Engine) -> bool:
        ledger_engine = engine.in_ledger
        return (
            ledger_engine.up
            and ledger_engine.stalled is None
            and not engine.open_legs.shows_nothing
        )

    async def _has_lost(self, engine: Engine) -> bool:
        """Return whether an engine reports fewer requests than were sent to it, or reports nothing.

        A single look proves no loss: the engine has ended a request, and its last bytes have not
        been read here yet.
        """
        legs = engine.open_legs
        are_missing = False
        for look in range(LOOKS):
            if look:
                await asyncio.sleep(BETWEEN)
            sent, canaries = (
                [one for one in legs.legs if one.is_counted and one.since <= legs.life - COUNTED],
                legs.canaries,
            )
            try:
                found = await self._scrape(engine.url)
            except (EngineError, OverloadedError):
                return True  # an engine that does not even answer this is not seen to work
            if found.waiting is None:
                return False
            are_missing = found.running + found.waiting < sum(leg in legs.legs for leg in sent)
            # with a canary, what the engine reports may be our own question
            if not are_missing and not canaries:
                return False
        return are_missing
