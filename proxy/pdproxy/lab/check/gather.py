"""Gathers the facts: every engine at once, then the pairs one after the other. Owns the order of the questions."""

from __future__ import annotations

import asyncio

from pdproxy.app.credentials import Credentials
from pdproxy.kit.ids import mint
from pdproxy.lab.check.ask import Asker
from pdproxy.lab.check.engines import ask_engine, scrape
from pdproxy.lab.check.facts import EngineFacts, Facts, Surroundings
from pdproxy.lab.check.handles import Handles
from pdproxy.lab.check.options import Options
from pdproxy.lab.check.pairs import PairProbe, try_pairs
from pdproxy.settings.schema import Settings
from pdproxy.transfer.nixl import NIXL


def _mark() -> str:
    return mint()[:12]


async def gather(settings: Settings, options: Options, surroundings: Surroundings) -> Facts:
    """Ask the engines of the settings; whatever they do, facts come back."""
    credentials = Credentials(settings)
    asker = Asker(timeout=options.timeout, key=credentials.engine_key, tls=credentials.engine_tls)
    try:
        engines = await asyncio.gather(*(ask_engine(asker, node, _mark()) for node in settings.pool.nodes))
        facts = Facts(settings=settings, engines=engines, surroundings=surroundings, timeout=options.timeout)
        handles = Handles(asker, NIXL, options)
        await try_pairs(PairProbe(asker, handles, options, _mark), facts, options.lease_watch)
        await asyncio.gather(*(_see_restart(asker, engine) for engine in engines if engine.answers))
        return facts
    finally:
        await asker.close()


async def _see_restart(asker: Asker, engine: EngineFacts) -> None:
    after = await scrape(asker, engine.url)
    if after is not None and engine.metrics is not None and after.started != engine.metrics.started:
        engine.restarted = True
