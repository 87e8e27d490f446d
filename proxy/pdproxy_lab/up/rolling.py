"""One engine is started again with another command while the others serve: drained by the proxy's
admin API first, and used again once it is ready. With a command that fails it gets its old one.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import aiohttp

from pdproxy_lab.up.command import EngineCommand
from pdproxy_lab.up.errors import UpError
from pdproxy_lab.up.program import run
from pdproxy_lab.up.supervised import Supervised

PDPROXY = (sys.executable, "-m", "pdproxy")
DRAIN = 600.0
"""Seconds until the engine must have ended its requests, and until it must be used again."""
_EXTRA = 30.0
"""Seconds for the command that waits for it to begin and end."""

Say = Callable[[str], None]


async def restart(
    engine: Supervised,
    command: EngineCommand,
    url: str,
    settings: Path,
    session: aiohttp.ClientSession,
    say: Say,
) -> None:
    """Start an engine again. `url`: its own; `settings`: the proxy's file. Nobody else keeps the
    engine running meanwhile.

    Raises:
        UpError: it can't be drained and runs on as it is; or it does not start, and runs with its
            old command.
    """
    never = asyncio.Event()
    if engine.process.runs:
        say(f"{engine.name}: gets no more requests, and ends those that it has")
        await _engines("drain", url, settings)
    try:
        await _start(engine, command, never, session, say)
    except UpError as error:
        say(f"{error}\n{engine.name}: starts again as it was")
        await _start(engine, engine.command, never, session, say)
        await _engines("undrain", url, settings)
        raise UpError(
            f"{engine.name} does not start with these flags and runs as before; the change ends "
            f"here"
        ) from None
    engine.command = command
    await _engines("undrain", url, settings)
    say(f"{engine.name}: serves with its new flags")


async def _start(
    engine: Supervised,
    command: EngineCommand,
    never: asyncio.Event,
    session: aiohttp.ClientSession,
    say: Say,
) -> None:
    await engine.stop(never)
    engine.start(command)
    await engine.until_ready(session, say)


async def _engines(action: str, url: str, settings: Path) -> None:
    command = [*PDPROXY, "engines", action, url, "--config", str(settings)]
    wait = ["--wait", "--wait-for", f"{DRAIN:g}"]
    ended = await run([*command, *wait], DRAIN + _EXTRA, f"pdproxy engines {action}")
    if ended.code:
        said = ended.err.decode("utf-8", "replace").strip()
        raise UpError(f"{url} can't be {action}ed: {said}")
