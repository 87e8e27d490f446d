"""Connector `auto`: finds the connector by asking the engines, and puts it into the settings,
before the proxy is built.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from pdproxy.app.credentials import Credentials
from pdproxy.app.transfer import kv_host_of
from pdproxy.fleet.detection import Detection
from pdproxy.kit.clock import Clock
from pdproxy.settings.crosscheck import crosscheck
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import Mistakes, SettingsError, naming_pool
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy.transfer import detect, registry
from pdproxy.transfer.detect import DetectedContract, Undecided
from pdproxy.upstream.admin import EngineAdmin

logger = logging.getLogger("pdproxy")

KEY = "pools[0].connector"


async def settled(
    settings: Settings, clock: Clock | None = None, *, deadline: float | None = None
) -> Settings:
    """Return the settings with the connectors that the engines of pools run. A pool that names one
    keeps it.

    `deadline`: seconds until all engines have been asked; None: `deadlines.detect`.

    Raises:
        SettingsError: the engines do not show it, with a line per engine on what it was asked and
            answered; or the settings are wrong for the connector that was found.
    """
    if not needs_detection(settings):
        return settings
    if len(settings.pools) > 1:
        try:
            async with asyncio.TaskGroup() as group:
                asking = [
                    group.create_task(_settled(settings, at, clock, deadline))
                    for at in range(len(settings.pools))
                ]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return _checked(
            msgspec.structs.replace(settings, pools=tuple(one.result() for one in asking))
        )
    if not any(engine.prefills for engine in settings.pool.fixed_nodes):
        return with_connector(settings, registry.names()[0])  # no KV is transferred
    seen, silent = await look(settings, deadline or settings.deadlines.detect, clock)
    if isinstance(seen, Undecided):
        raise SettingsError(
            f"{KEY}: {registry.AUTO}: {seen.reason}", *seen.lines, *_silences(silent)
        )
    for line in _silences(silent):
        logger.warning("%s", line)
    for line in seen.lines:
        logger.info("%s", line)
    logger.info("the engines' connector is %s (%s: %s)", seen.contract, KEY, registry.AUTO)
    return with_connector(settings, seen.contract)


async def _settled(
    settings: Settings, at: int, clock: Clock | None, deadline: float | None
) -> Pool:
    pool = settings.pools[at]
    with naming_pool(at, pool.name, pools=len(settings.pools)):
        return (await settled(settings.of_pool(pool), clock, deadline=deadline)).pool


async def look(
    settings: Settings, deadline: float, clock: Clock | None = None
) -> tuple[DetectedContract | Undecided, dict[str, str]]:
    """Ask the engines for `deadline` seconds at most. Return the result, and why engines did not
    answer, by URL.
    """
    credentials = Credentials(settings)
    admin = EngineAdmin(
        deadlines=settings.deadlines,
        key=credentials.engine_key,
        tls=credentials.engine_tls,
        networks=settings.engines.allowed,
    )
    others = EngineAdmin(deadlines=settings.deadlines, networks=settings.engines.allowed)
    asked = [engine for engine in settings.pool.fixed_nodes if engine.prefills or engine.decodes]
    detection = Detection(
        admin,
        others,
        {engine.url: "prefill" if engine.prefills else engine.role for engine in asked},
        clock or Clock(),
        seconds=min(settings.deadlines.first_token, deadline),
        kv_hosts={engine.url: kv_host_of(engine, settings.pool) for engine in asked},
        bootstraps={
            engine.url: _bootstrap(engine, settings) for engine in asked if engine.prefills
        },
    )
    logger.info("connector %s: asking %d engines which one they run", registry.AUTO, len(asked))
    try:
        await detection.ask_all(deadline)
        seen = detection.seen()
        silent = {
            engine.url: detection.troubles.get(engine.url, "no answer in time")
            for engine in asked
            if engine.url not in detection.asked
        }
        if not any(one.role == "prefill" for one in seen):
            lines = tuple(one.text() for one in seen)
            return Undecided(f"no prefill engine answered in {deadline:g} s", (), lines), silent
        found = detect.decide(seen)
        if isinstance(found, DetectedContract):
            decodes = [engine.url for engine in asked if engine.decodes]
            await detection.release(decodes, registry.entry_of(found.contract).contract(settings))
        return found, silent
    finally:
        await admin.close()
        await others.close()


def with_connector(settings: Settings, name: str) -> Settings:
    """Return the settings with a connector.

    Raises:
        SettingsError: they are wrong for it.
    """
    return with_connectors(settings, [name])


def with_connectors(settings: Settings, names: Sequence[str]) -> Settings:
    """Return the settings with a connector for each pool, in their order. Raises as
    `with_connector`.
    """
    pools = tuple(
        msgspec.structs.replace(pool, connector=name)
        for pool, name in zip(settings.pools, names, strict=True)
    )
    return _checked(msgspec.structs.replace(settings, pools=pools))


def needs_detection(settings: Settings) -> bool:
    """Return whether the engines of a pool must be asked for their connector."""
    return any(pool.connector == registry.AUTO for pool in settings.pools)


def _checked(settings: Settings) -> Settings:
    mistakes = Mistakes()
    checked = crosscheck(settings, mistakes, need_engines=False)
    mistakes.raise_any()
    return checked


def _silences(silent: dict[str, str]) -> list[str]:
    return [f"{url} was not asked: {why}" for url, why in silent.items()]


def _bootstrap(engine: ConfiguredEngine, settings: Settings) -> str:
    """Return where a prefill engine's Mooncake bootstrap server is by the settings."""
    if engine.facts.bootstrap is not None:
        return engine.facts.bootstrap
    host = urlsplit(engine.url).hostname or ""
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.pool.bootstrap_port}"
