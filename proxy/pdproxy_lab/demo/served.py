"""A proxy in this process, from its listener to its end."""

from __future__ import annotations

import asyncio
import socket

import aiohttp

from pdproxy.app.server import fit_files, serve
from pdproxy.app.signals import Ending
from pdproxy.settings.health import OutlierSettings, Probes
from pdproxy.settings.limits import Deadlines, Limits
from pdproxy.settings.listen import Listen
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy_lab.up import examples
from pdproxy_lab.up.errors import UpError

READY = 30.0
"""Seconds until the proxy must be ready, after its engines are up."""
DRAIN = 10.0
"""Seconds for the user's unfinished answers when the demo ends."""
CONTINUATIONS = 4
"""How often a stream may go on: a user may stop one engine after the other under it."""

COMPARED_EVERY = 5.0
"""Seconds between two comparisons of engines: nobody watches a demo for a minute."""


class ServedProxy:
    """One proxy. `at_once`: set when it is to end without a drain. It does not own the listener."""

    def __init__(self, host: str, listener: socket.socket, at_once: asyncio.Event) -> None:
        self._host, self._listener = host, listener
        self._ending = Ending(at_once)
        self.task: asyncio.Task[int] | None = None
        """Runs while it serves; None: not started."""
        self.url = examples.url_of(host, listener.getsockname()[1])

    def start(self, pool: Pool) -> None:
        """Begin to serve with a pool's engines."""
        settings = Settings(
            listen=Listen(host=self._host, port=self._listener.getsockname()[1], linger=0),
            pools=(pool,),
            limits=Limits(continuations=CONTINUATIONS),
            deadlines=Deadlines(drain=DRAIN),
            probes=Probes(interval=1.0),
            outliers=OutlierSettings(interval=COMPARED_EVERY),
        )
        self.task = asyncio.create_task(
            serve(fit_files(settings), self._listener, self._ending), name="proxy"
        )

    async def until_ready(self, session: aiohttp.ClientSession) -> None:
        """Wait until it can serve a request.

        Raises:
            UpError: it can't within `READY` seconds.
        """
        reason = "no answer"
        try:
            async with asyncio.timeout(READY):
                while True:
                    async with session.get(f"{self.url}/ready") as answer:
                        if answer.status == 200:
                            return
                        reason = await answer.text()
                    await asyncio.sleep(0.05)
        except (TimeoutError, aiohttp.ClientError) as error:
            raise UpError(f"the proxy was not ready within {READY:.0f} s: {reason}") from error

    async def end(self) -> int:
        """Let it drain and end; return its exit code, 0 if it was not started."""
        if self.task is None:
            return 0
        self._ending.requested.set()
        return await self.task
