"""Simulated engines with a proxy in front of them; the split ones have a second proxy, with `auto`.

Owns the engines' lives: they are stopped, started and slowed down here.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import aiohttp

from pdproxy.app.listening import listen
from pdproxy.engine_model.profile import Profile
from pdproxy.settings.engines import ConfiguredEngine, Facts, Role
from pdproxy.settings.pools import Pool, PoolPolicy
from pdproxy_lab.demo.comparison.setup import SLOW, facts
from pdproxy_lab.demo.figures import ShownEngine
from pdproxy_lab.demo.served import ServedProxy
from pdproxy_lab.sim.server import SimServer
from pdproxy_lab.up.errors import UpError

Way = Literal["split", "auto", "plain"]


class Fleet:
    """Engines of equal number that serve in one way or, the split ones, in two."""

    def __init__(
        self,
        roles: Sequence[Role],
        model: str,
        chunk: int,
        like: Profile,
        *,
        host: str,
        listener: socket.socket | None,
        at_once: asyncio.Event,
        first_seed: int,
    ) -> None:
        """Make engines that a proxy knows by these roles. `listener`: of the proxy that users
        reach; None: it gets any free port of the loopback. `first_seed`: engine ids are drawn, and
        must differ between fleets.
        """
        self.roles = tuple(roles)
        self.places: list[ShownEngine] = []
        """Names, roles and URLs; known after the start."""
        self.way: Way = "plain" if "decode" not in roles else "split"
        self._chunk = chunk
        # An engine of role any can prefill and decode for others; which of both a proxy decides.
        kind: Role = "aggregated" if self.way == "plain" else "any"
        self._sims = [
            SimServer(facts(kind, model, chunk, like), host="127.0.0.1", chance=first_seed + number)
            for number in range(len(roles))
        ]
        self._own = [] if listener is not None else [listen("127.0.0.1", 0)]
        self._proxies: dict[Way, ServedProxy] = {
            self.way: ServedProxy(
                host if listener is not None else "127.0.0.1", listener or self._own[0], at_once
            )
        }
        if self.way == "split":
            self._own.append(listen("127.0.0.1", 0))
            self._proxies["auto"] = ServedProxy("127.0.0.1", self._own[-1], at_once)

    @property
    def url(self) -> str:
        """The proxy that serves in the present way."""
        return self._proxies[self.way].url

    @property
    def tasks(self) -> list[asyncio.Task[int]]:
        """The proxies' tasks."""
        return [proxy.task for proxy in self._proxies.values() if proxy.task is not None]

    async def start(self, session: aiohttp.ClientSession, profile: Path) -> None:
        """Start engines and proxies, and wait until all can serve. `profile`: the file that `auto`
        predicts by.

        Raises:
            UpError: one of them can't.
        """
        counts: dict[Role, int] = {}
        for role, sim in zip(self.roles, self._sims, strict=True):
            try:
                await sim.start()
            except OSError as error:
                raise UpError(
                    f"a simulated engine can't listen on 127.0.0.1: {error.strerror or error}"
                ) from error
            self.places.append(ShownEngine(str(counts.setdefault(role, 0)), role, sim.url))
            counts[role] += 1
        for way, proxy in self._proxies.items():
            proxy.start(self._pool(way, profile))
        for proxy in self._proxies.values():
            await proxy.until_ready(session)

    def _pool(self, way: Way, profile: Path) -> Pool:
        if way != "auto":
            nodes = [
                ConfiguredEngine(url=sim.url, role=role)
                for role, sim in zip(self.roles, self._sims, strict=True)
            ]
            return Pool(nodes=tuple(nodes))
        chunk = Facts(max_num_batched_tokens=self._chunk)
        nodes = [ConfiguredEngine(url=sim.url, role="any", facts=chunk) for sim in self._sims]
        return Pool(nodes=tuple(nodes), policy=PoolPolicy(placement="auto"), profile=str(profile))

    async def kill(self, number: int) -> None:
        """Kill an engine, as SIGKILL does."""
        self._sims[number].engine.slowness = 1.0
        await self._sims[number].kill()

    async def revive(self, number: int) -> None:
        """Start an engine that was killed again, on its port.

        Raises:
            OSError: another process has the port by now.
        """
        await self._sims[number].restart()

    def slow_down(self, number: int, *, slow: bool) -> None:
        """Have an engine's steps take `SLOW` times as long, or as long as usual."""
        self._sims[number].engine.slowness = SLOW if slow else 1.0

    async def stop(self) -> int:
        """End proxies and engines; return the proxies' worst exit code."""
        try:
            return max([await proxy.end() for proxy in self._proxies.values()])
        finally:
            for sim in self._sims:
                await sim.stop()
            for own in self._own:
                own.close()
