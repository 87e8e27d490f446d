"""The proxy in front of the pair that is measured, as conformance runs it, and whether it has split
each prompt.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from pdproxy.app.detection import settled
from pdproxy.kit.ids import mint
from pdproxy.observe.events import RequestEnded
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.load import POOL, EngineFlag, Flag, load
from pdproxy.settings.schema import Settings
from pdproxy_lab.calibrate.trials import Runner, Seen, Trial, TrialError
from pdproxy_lab.conformance.stand import Stand, ready, settings_for, stand

_ENDS = 1.0
"""Seconds in which the proxy must be through with a request whose whole answer was received."""


@dataclass(frozen=True, slots=True)
class CalibratedPair:
    """A prefill and a decode engine, and how their KV moves."""

    prefill: str
    decode: str
    connector: str
    key: str | None = None
    ca: Path | None = None
    timeout: float = 30.0
    """Seconds until the pair must be ready."""


def settings_of(pair: CalibratedPair) -> Settings:
    """Return the settings of a proxy for the pair. The environment is not read.

    Raises:
        SettingsError: they are wrong.
    """
    engines = [EngineFlag("prefill", pair.prefill), EngineFlag("decode", pair.decode)]
    settings = load(None, {}, [Flag("--connector", f"{POOL}connector", pair.connector)], engines)
    pool = structs.replace(
        settings.pool,
        tls=structs.replace(settings.pool.tls, ca=pair.ca),
        # The decode engine makes the first token: it then shows when the KV has come.
        lmcache=structs.replace(settings.pool.lmcache, first_token="decode"),  # noqa: S106 - a token of text
    )
    return structs.replace(
        settings, pools=(pool,), auth=structs.replace(settings.auth, engine_api_key=pair.key)
    )


@asynccontextmanager
async def in_front_of(pair: CalibratedPair) -> AsyncIterator[Stand]:
    """Run a proxy in front of the pair.

    Raises:
        TrialError: it can't be run, or does not split prompts.
    """
    try:
        settings = await settled(settings_of(pair), deadline=pair.timeout)
        key = mint()
        engines = settings.pool.nodes
        narrowed = settings_for(settings, engines[0], engines[1], key, notices=True)
        async with stand(narrowed, key) as running:
            why = await ready(running, pair.timeout)
            if why is not None:
                raise TrialError(f"the pair is not ready: {why} (see pdproxy check)")
            yield running
    except SettingsError as error:
        raise TrialError("; ".join(error.mistakes)) from None


def splitting(running: Stand, run: Runner) -> Runner:
    """Return a runner that adds when the first prompt was prefilled, and fails where one engine
    alone served a prompt.
    """

    async def checked(trial: Trial) -> Seen:
        seen = await run(trial)
        tap = running.tap
        log, count = tap.log, len(trial.beside)
        # A client may have its whole answer a little before the proxy is through with it.
        await tap.until(lambda: len(tap.events(RequestEnded, 0)) >= count, _ENDS)
        entries = log[:]
        del log[: len(entries)]  # it has the bodies of all prompts
        legs = [leg for entry in entries if isinstance(entry, RequestEnded) for leg in entry.legs]
        for leg in legs:
            if leg.why_alone is not None:
                raise TrialError(
                    f"{trial.name}: served by one engine alone: {leg.why_alone} (see pdproxy "
                    f"conformance)"
                )
        # Of an earlier attempt of the trial there may be some, too: the last ones are its own.
        taken = (
            [leg.prefill_s for leg in legs[-count:] if leg.prefill_s is not None] if count else []
        )
        if len(taken) < count or not count:
            return seen
        return replace(seen, prefilled=min(one.sent for one in seen.beside) + min(taken))

    return checked
