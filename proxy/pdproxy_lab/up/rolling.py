"""One engine is started again with another command while the others serve: drained by the proxy's
admin API first, and used again once it is ready. With a command that fails it gets its old one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from pdproxy_lab.up.command import EngineCommand
from pdproxy_lab.up.errors import UpError
from pdproxy_lab.up.state import Folder
from pdproxy_lab.up.supervised import Supervised
from pdproxy_lab.up.taken_out import give_back, take_out

Say = Callable[[str], None]


async def restart(
    engine: Supervised,
    command: EngineCommand,
    url: str,
    folder: Folder,
    session: aiohttp.ClientSession,
    say: Say,
) -> None:
    """Start an engine again. `url`: its own. Nobody else keeps the engine running meanwhile.

    Raises:
        UpError: it can't be drained and runs on as it is; or it does not start, and runs with its
            old command.
    """
    never = asyncio.Event()
    if engine.process.runs:
        say(f"{engine.name}: gets no more requests, and ends those that it has")
        await take_out(url, folder)
    try:
        await _start(engine, command, never, session, say)
    except UpError as error:
        say(f"{error}\n{engine.name}: starts again as it was")
        await _start(engine, engine.command, never, session, say)
        await give_back(url, folder)
        raise UpError(
            f"{engine.name} does not start with these flags and runs as before; the change ends "
            f"here"
        ) from None
    engine.command = command
    await give_back(url, folder)
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
