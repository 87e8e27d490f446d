"""A proxy in front of several pools of simulated engines, each with a connector and a model of its
own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pdproxy.app.compose import Proxy
from pdproxy.app.watch import Watch
from pdproxy.engine_model.hardware import Hardware
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.engines import Facts as EngineFacts
from pdproxy.settings.health import Health, Probes
from pdproxy.settings.kv import KvReady
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy_lab.sim.facts import MooncakeFacts, SimFacts
from pdproxy_lab.sim.server import SimServer
from tests.fakes.ports import free_port
from tests.fakes.recorder import Recorder
from tests.fakes.tokenizer import Shelf
from tests.fakes.world import DEADLINES, World, _serve, until


@dataclass
class PoolOf:
    """One pool: with `connector` none so many engines that serve alone, with all others a prefill
    and a decode engine.
    """

    model: str
    connector: str = "none"
    settings: dict[str, Any] = field(default_factory=dict)
    alone: int = 1
    notifies: int | None = None
    """The port of the pool's own socket for notices, None: its engines send none."""


@dataclass
class Pools:
    """The world, and the engines of each pool."""

    world: World
    engines: list[list[SimServer]]

    async def model_of(self, model: str, **fields: Any) -> str:
        """The model that an answer shows."""
        answer = await self.world.ask("/v1/completions", body(model, **fields))
        assert answer.status == 200, answer.body
        shown: str = answer.json["model"]
        return shown

    async def listed(self) -> list[str]:
        """The names of `/v1/models`."""
        return [card["id"] for card in (await self.world.get("/v1/models")).json["data"]]


def body(model: str, **fields: Any) -> dict[str, Any]:
    """A completion of some blocks."""
    return {"model": model, "prompt": "word " * 20, "max_tokens": 4, "temperature": 0, **fields}


@asynccontextmanager
async def pools(
    *wanted: PoolOf,
    probes: float = 3600,
    chance: Callable[[], float] | None = None,
    **more: Any,
) -> AsyncIterator[Pools]:
    """Run pools. `probes`: seconds between probes; `chance`: of choices among pools and engines;
    `more`: other settings.
    """
    notifier = any(one.notifies is not None for one in wanted)
    async with AsyncExitStack() as stack:
        engines: list[list[SimServer]] = []
        own: list[Pool] = []
        for number, one in enumerate(wanted):
            made = [
                await stack.enter_async_context(
                    SimServer(facts, port=free_port(), chance=10 * number + at)
                )
                for at, facts in enumerate(_facts(one))
            ]
            engines.append(made)
            own.append(_settings(one, f"pool {number}", made))
        settings = Settings(
            pools=tuple(own),
            deadlines=DEADLINES,
            kv_ready=KvReady(notifier=notifier),
            health=Health(stalled_after=0),
            probes=Probes(interval=probes, scrape_interval=probes),
            **more,
        )
        recorder = Recorder()
        watch = (
            Watch(observers=[recorder])
            if chance is None
            else Watch(observers=[recorder], chance=chance)
        )
        proxy = Proxy.build(settings, Shelf(), watch)
        world = World(proxy, None, (), recorder)  # type: ignore[arg-type]
        found = Pools(world, engines)
        proxy.start()
        world.servers = [await _serve(proxy, world)]
        try:
            await until(
                lambda: all(engine.probed for pool in proxy.pools for engine in pool.ledger.engines)
            )
            await until(
                lambda: all(
                    n.kv_not_ready is None for pool in proxy.pools for n in pool.ledger.engines
                )
            )
            yield found
            await until(
                lambda: (
                    not any(
                        engine.requests for pool in proxy.pools for engine in pool.ledger.engines
                    )
                )
            )
        finally:
            await world.disconnect()
            for pool in proxy.pools:
                await pool.custodian.settle(0)
            await proxy.stop()


def _facts(one: PoolOf) -> Sequence[SimFacts]:
    usual: dict[str, Any] = {
        "model": one.model,
        "eos_every": 0,
        "hardware": Hardware(speed=0),
        "runtime_lora": True,
    }
    usual["connector"] = one.connector
    if one.connector == "none":
        return [SimFacts(**usual)] * one.alone
    if one.connector == "mooncake":
        usual["mooncake"] = MooncakeFacts(bootstrap_port=0)
    if one.notifies is not None:
        usual["notify"] = f"tcp://127.0.0.1:{one.notifies}"
    return [SimFacts(**usual, role="prefill"), SimFacts(**usual, role="decode")]


def _settings(one: PoolOf, name: str, engines: Sequence[SimServer]) -> Pool:
    if one.connector == "none":
        nodes: tuple[ConfiguredEngine, ...] = tuple(
            ConfiguredEngine(url=engine.url, role="aggregated") for engine in engines
        )
        return Pool(**{"name": name, "nodes": nodes, **one.settings})
    p, d = engines
    own = one.settings if one.notifies is None else {"kv_ready_port": one.notifies, **one.settings}
    bootstrap = p.engine.bootstrap.url if p.engine.bootstrap is not None else None
    nodes = (
        ConfiguredEngine(url=p.url, role="prefill", facts=EngineFacts(bootstrap=bootstrap)),
        ConfiguredEngine(url=d.url, role="decode"),
    )
    return Pool(**{"name": name, "connector": one.connector, "nodes": nodes, **own})
