"""Gathers the facts: all engines at once, then the pairs one after the other. Owns the order of the
requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from pdproxy.app.credentials import Credentials
from pdproxy.app.detection import look
from pdproxy.app.transfer import kv_host_of
from pdproxy.check.engines import ask_engine, scrape
from pdproxy.check.facts import CheckFacts, EngineFacts, MachineFacts
from pdproxy.check.handles import Handles
from pdproxy.check.http_client import HttpClient
from pdproxy.check.options import CheckOptions
from pdproxy.check.pairs import PairProbe, try_pairs
from pdproxy.kit.ids import mint
from pdproxy.settings.errors import naming_pool
from pdproxy.settings.schema import Settings
from pdproxy.transfer.detect import DetectedContract, Undecided
from pdproxy.transfer.nixl import NIXL
from pdproxy.transfer.registry import AUTO


def _mark() -> str:
    return mint()[:12]


async def gather_all(
    settings: Settings, pools: Iterable[int], options: CheckOptions, machine: MachineFacts
) -> dict[str, CheckFacts]:
    """Return the facts of pools, which are given by their numbers, by their names.

    Raises:
        SettingsError: a file of keys or certificates can't be used.
    """
    found: dict[str, CheckFacts] = {}
    for at in pools:
        pool = settings.pools[at]
        with naming_pool(at, pool.name, pools=len(settings.pools)):
            found[pool.name] = await gather(settings.of_pool(pool), options, machine)
    return found


async def gather(settings: Settings, options: CheckOptions, machine: MachineFacts) -> CheckFacts:
    """Ask the engines of the only pool of the settings and return the facts, whatever the engines
    do.
    """
    shown = await _connector(settings, options)
    tried = shown is None or (isinstance(shown, DetectedContract) and shown.contract == NIXL.name)
    credentials = Credentials(settings)
    http = HttpClient(
        timeout=options.timeout, key=credentials.engine_key, tls=credentials.engine_tls
    )
    try:
        # Some engines crash at a completion that is not of their connector.
        asked = (
            ask_engine(http, ledger_engine, _mark(), generates=tried)
            for ledger_engine in settings.pool.nodes
        )
        engines = await asyncio.gather(*asked)
        facts = CheckFacts(
            settings=settings,
            engines=engines,
            machine=machine,
            timeout=options.timeout,
            connector=shown,
        )
        if not tried:
            return facts
        hosts = {
            ledger_engine.url: kv_host_of(ledger_engine, settings.pool)
            for ledger_engine in settings.pool.nodes
        }
        handles = Handles(http, NIXL, options, hosts)
        await try_pairs(PairProbe(http, handles, options, _mark), facts, options.lease_watch)
        await asyncio.gather(
            *(_note_restart(http, engine) for engine in engines if engine.could_be_asked)
        )
        return facts
    finally:
        await http.close()


async def _connector(
    settings: Settings, options: CheckOptions
) -> DetectedContract | Undecided | None:
    """Return the connector that the engines show. None: the settings name it, or no KV is
    transferred.
    """
    if settings.pool.connector != AUTO or not any(
        engine.prefills for engine in settings.pool.nodes
    ):
        return None
    shown, _ = await look(settings, options.timeout)
    return shown


async def _note_restart(http: HttpClient, engine: EngineFacts) -> None:
    after = await scrape(http, engine.url)
    if after is not None and engine.metrics is not None and after.started != engine.metrics.started:
        engine.restarted = True
