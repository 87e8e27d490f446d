"""The proxy and simulated engines of benchmarks/overload.py in virtual time: what work of the proxy
itself costs is not in it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Self, TypeVar

from uvicorn.server import ServerState

from pdproxy.app.compose import Proxy
from pdproxy.engine_model.hardware import Hardware
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.keys import Auth
from pdproxy.settings.limits import AUTO, Limits
from pdproxy.settings.listen import Listen
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.server import SimServer
from tests.chaos.virtual.loop import VirtualLoop
from tests.chaos.virtual.network import VirtualNetwork
from tests.chaos.virtual.ports import VirtualPorts
from tests.chaos.world import begin_proxy

PROXY = "10.0.1.1"
PORT = 8000
HARDWARE = {
    "gpu": Hardware(
        prefill_tokens_per_s=60_000.0, decode_step_s=0.01, decode_step_per_seq_s=0.000_05
    ),
    "steep": Hardware(
        prefill_tokens_per_s=60_000.0, decode_step_s=0.01, decode_step_per_seq_s=0.001_3
    ),
}
"""`gpu`: 16 requests at once take 1.08 times as long as one; `steep`: three times."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class Fleet:
    """What there is. `batch`: the requests that a decode engine runs at once; `places`: the
    proxy's, None: it learns them.

    `hardware`: of engines in virtual time.
    """

    prefill: int = 1
    decode: int = 1
    batch: int = 16
    places: int | None = 16
    hardware: str = "gpu"


class VirtualFleet:
    """The engines and the proxy, while they run."""

    def __init__(self, fleet: Fleet, network: VirtualNetwork, keys: Path, seed: int) -> None:
        self._network, self._seed = network, seed
        ports = VirtualPorts(network)
        self.engines: list[SimServer] = []
        engines = []
        for place in range(fleet.prefill + fleet.decode):
            role: Literal["prefill", "decode"] = "prefill" if place < fleet.prefill else "decode"
            host = f"10.0.0.{10 + place}"
            facts = SimFacts(
                role=role,
                model="sim",
                hardware=HARDWARE[fleet.hardware],
                eos_every=0,
                enable_prefix_caching=False,
                max_num_seqs=fleet.batch if role == "decode" else 256,
                side_channel_host=host,
                side_channel_port=5600,
            )
            sim = SimServer(facts, host=host, port=PORT, chance=seed * 100 + place, network=ports)
            self.engines.append(sim)
            engines.append(ConfiguredEngine(url=sim.url, role=role))
        limits = (
            Limits(engine_requests=AUTO)
            if fleet.places is None
            else Limits(max_inflight=fleet.places)
        )
        self.settings = Settings(
            listen=Listen(host=PROXY, port=PORT),
            auth=Auth(api_keys_file=str(keys)),
            pools=(Pool(nodes=tuple(engines)),),
            limits=limits,
        )
        self.url = f"http://{PROXY}:{PORT}"
        self.state = ServerState()
        self.proxy: Proxy

    async def __aenter__(self) -> Self:
        for engine in self.engines:
            await engine.start()
        chance = random.Random(f"{self._seed}/proxy")
        self.proxy = begin_proxy(self.settings, self._network, self.state, chance)
        while not all(ledger_engine.probed for ledger_engine in self.proxy.ledger.engines):
            await asyncio.sleep(0.05)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._network.unlisten(PROXY, PORT)
        await self.proxy.drain(self.state.tasks)
        for connection in list(self.state.connections):
            connection.transport.abort()
        await self.proxy.stop()
        for engine in self.engines:
            await engine.stop()


def in_virtual_time(
    fleet: Fleet, key_lines: str, seed: int, do: Callable[[VirtualFleet], Awaitable[Found]]
) -> Found:
    """Run a fleet in a virtual loop of its own, and return what `do` found."""
    network = VirtualNetwork()
    loop = VirtualLoop(network)

    async def run() -> Any:
        async with VirtualFleet(fleet, network, keys, seed) as virtual:
            return await do(virtual)

    with TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text(key_lines)
        try:
            found: Found = loop.run_until_complete(run())
        finally:
            loop.close()
    return found
