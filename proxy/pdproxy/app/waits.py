"""Wiring of what says whether a leg may go on waiting, and of what ends legs that wait for a push
that is lost: by engines' own numbers, and the legs that are there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from pdproxy.app.process import Process
from pdproxy.app.share import Legs, PoolShare
from pdproxy.app.watching import Watching
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.works import Works
from pdproxy.scheduling.ledger import Ledger
from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.custody import Custody
from pdproxy.serving.kv.late_pushes import LatePushes
from pdproxy.serving.kv.lost_pushes import AwaitedPush, LostPushes
from pdproxy.settings.health import Health
from pdproxy.upstream.admin import EngineAdmin
from pdproxy.upstream.metrics_page import Scrape

Waits = tuple[Callable[[str, str], Awaitable[bool]], Callable[[Custody], Awaitable[bool]]]
"""`ExchangeResources.works` and `is_push_lost`."""


def build_waits(
    health: Health,
    process: Process,
    ledger: Ledger,
    engines: EngineRegistry,
    admin: EngineAdmin,
    watching: Watching,
    custodian: Custodian,
    own: PoolShare | None,
) -> Waits:
    """Return what legs of a pool ask behind their deadlines. `own`: see `build_ledger`."""
    clock, observers, probing = process.clock, process.observers, watching.probing
    if probing is None:
        assert own is not None
        return own.waits(custodian)
    legs = None if own is None else own.legs

    def awaited() -> list[AwaitedPush]:
        return [*custodian.awaiting_push(), *(legs.pushes() if legs is not None else ())]

    async def scrape(url: str) -> Scrape:
        found = await admin.scrape(url)
        if legs is not None:
            await legs.hear()  # what is known of legs is as new as what the engine reports
        return found

    pushes = LostPushes(awaited, custodian.spawn, engines.known, scrape, clock, observers)
    lost = pushes.lost if legs is None else _behind(legs, pushes.lost, custodian)
    if custodian.decode_waits:
        ledger.when_lost(lost)
    works = Works(
        engines.known, scrape, observers, lambda: health.stalled_after > 0, watching.canary
    )
    late = LatePushes(awaited, engines.known, scrape, works.moves, probing.stalls.suspect, clock)
    if legs is None:
        return works.on_all, late.is_lost

    async def on_all(url: str, wait: str) -> bool:
        await legs.hear()
        return await works.on_all(url, wait)

    legs.answer(on_all, late.is_lost)
    return on_all, late.is_lost


def _behind(legs: Legs, lost: Callable[[str], None], custodian: Custodian) -> Callable[[str], None]:
    """Return what calls `lost` with an engine's URL once it is known which pushes are awaited."""

    async def hear(url: str) -> None:
        await legs.hear()
        lost(url)

    return lambda url: custodian.spawn(hear(url), f"pushes of {url}")
