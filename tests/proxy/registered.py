"""The real proxy in front of simulated engines that register with it, beside a plain engine that
answers as one engine would.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from pdproxy.app.compose import Proxy
from pdproxy.engine_model.hardware import Hardware
from pdproxy.fleet.registration import Registrations
from pdproxy.kit.clock import Clock
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.engines import Facts as EngineFacts
from pdproxy.settings.health import Health, Probes
from pdproxy.settings.kv import RegistrationSettings
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.server import SimServer
from tests.fakes.client import Answer, exchange, request
from tests.fakes.ports import free_port
from tests.fakes.recorder import Recorder
from tests.fakes.several import built
from tests.fakes.world import DEADLINES, World, _serve, until

FAST = Hardware(speed=0)
INTERVAL = 0.02
"""Seconds between two heartbeats of an engine here."""


@dataclass
class Fleet:
    """A world whose engines register. `plain` is no engine of the proxy."""

    world: World
    proxy: Proxy
    plain: SimServer
    p: list[SimServer] = field(default_factory=list)
    d: list[SimServer] = field(default_factory=list)

    @property
    def known(self) -> Registrations:
        """The proxy's registrations."""
        assert self.proxy.registrations is not None
        known = self.proxy.registrations.known
        assert isinstance(known, Registrations)
        return known

    @property
    def engines(self) -> list[SimServer]:
        """The engines that register."""
        return [*self.p, *self.d]

    async def ask(self, path: str, body: dict[str, Any]) -> Answer:
        """Ask the proxy."""
        return await self.world.ask(path, body)

    async def asked_plain(self, path: str, body: dict[str, Any]) -> Answer:
        """Ask the plain engine the same."""
        return await exchange(self.plain.port, request("POST", path, body))

    async def registered(self, count: int | None = None) -> None:
        """Wait until all engines are registered, or `count` of them."""
        wanted = len(self.engines) if count is None else count
        known = [
            one.registrations.known for one in self.world.workers if one.registrations is not None
        ]
        await until(lambda: all(one.count == wanted for one in known))

    def left_behind(self) -> dict[str, float]:
        """What engines hold for requests that are over."""
        return {name: left for sim in self.engines for name, left in sim.engine.handles.items()}

    def ready(self) -> list[str]:
        """The details of `/ready`: those of all workers, each once."""
        return list(
            dict.fromkeys(text for one in self.world.workers for text in one.readiness().details)
        )


def facts(connector: str, role: str, address: str, **more: Any) -> SimFacts:
    """Facts of an engine here."""
    usual: dict[str, Any] = {
        "model": "tiny",
        "eos_every": 0,
        "hardware": FAST,
        "connector": connector,
        "role": role,
    }
    usual |= {
        "register": address,
        "registration_interval": INTERVAL,
        "randomize_request_ids": False,
    }
    return SimFacts(**(usual | more))


@asynccontextmanager
async def fleet(
    connector: str,
    prefills: int = 1,
    decodes: int = 1,
    *,
    alone: bool = False,
    deadlines: Mapping[str, float] | None = None,
    registration: Mapping[str, Any] | None = None,
    everybody: Mapping[str, Any] | None = None,
    d: Mapping[str, Any] | None = None,
    plain_facts: Mapping[str, Any] | None = None,
    node_facts: Mapping[str, EngineFacts] | None = None,
    dispatch: Literal["sequential", "concurrent"] | None = None,
    clock: Clock | None = None,
    wait: bool = True,
) -> AsyncIterator[Fleet]:
    """Run engines of a connector that register. `alone`: with an aggregated engine that needs no
    registration.

    `everybody`, `d`, `plain_facts`: facts of all engines that register, of decode engines, of the
    plain one. `node_facts`: settings, by role.
    `wait` False: don't wait until all engines are registered.
    """
    port = free_port()
    register = f"tcp://127.0.0.1:{port}"
    more = dict(everybody or {})
    async with AsyncExitStack() as stack:

        async def sim(made: SimFacts, chance: int) -> SimServer:
            return await stack.enter_async_context(SimServer(made, port=free_port(), chance=chance))

        p = [await sim(facts(connector, "prefill", register, **more), n) for n in range(prefills)]
        dd = [
            await sim(facts(connector, "decode", register, **(more | dict(d or {}))), 10 + n)
            for n in range(decodes)
        ]
        usual = {"model": "tiny", "eos_every": 0, "hardware": FAST, **(plain_facts or {})}
        plain = await sim(SimFacts(**{**usual, "connector": "none"}), 99)
        given = node_facts or {}
        engines = [
            ConfiguredEngine(url=one.url, role="prefill", facts=given.get("prefill", EngineFacts()))
            for one in p
        ]
        engines += [
            ConfiguredEngine(url=one.url, role="decode", facts=given.get("decode", EngineFacts()))
            for one in dd
        ]
        if alone:
            engines.append(ConfiguredEngine(url=plain.url, role="aggregated"))
        settings = Settings(
            pools=(Pool(connector=connector, dispatch=dispatch, nodes=tuple(engines)),),
            deadlines=msgspec.structs.replace(DEADLINES, **(deadlines or {})),
            health=Health(stalled_after=0),
            registration=RegistrationSettings(
                **{"port": port, "timeout": 1.0, **(registration or {})}
            ),
            probes=Probes(interval=3600, scrape_interval=3600),
        )
        recorder = Recorder()
        made = built(settings, clock=clock)
        proxy, *others = made.proxies
        world = World(proxy, None, (), recorder)  # type: ignore[arg-type]
        world.others = others
        for worker in world.workers:
            worker.observers.add(recorder)
        made.start()
        http_port = free_port()
        world.servers = [
            await _serve(one, world, http_port, together=bool(others)) for one in world.workers
        ]
        found = Fleet(world, proxy, plain, p, dd)
        try:
            await until(
                lambda: all(
                    engine.probed for worker in world.workers for engine in worker.ledger.engines
                )
            )
            if wait:
                await found.registered()
            yield found
            await until(lambda: not world.busy())
        finally:
            await world.disconnect()
            await made.stop()
