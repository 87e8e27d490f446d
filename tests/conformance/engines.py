"""One pair of simulated engines of any connector, a plain engine beside them, and a run of checks
on them in one line.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import structs

from pdproxy.engine_model.hardware import Hardware
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.engines import Facts as EngineFacts
from pdproxy.settings.health import Probes
from pdproxy.settings.kv import KvReady, LMCache, ReceiverSettings, RegistrationSettings
from pdproxy.settings.limits import Deadlines
from pdproxy.settings.listen import Listen
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy_lab.conformance.checks import CHECKS
from pdproxy_lab.conformance.options import ConformanceOptions
from pdproxy_lab.conformance.pair_under_test import PairUnderTest
from pdproxy_lab.conformance.results import Result
from pdproxy_lab.conformance.runner import run
from pdproxy_lab.sim.facts import (
    CpuBuffer,
    ECExtraConfig,
    ECTransferConfig,
    MooncakeFacts,
    SimFacts,
)
from pdproxy_lab.sim.facts import LMCacheFacts as SimLMCache
from pdproxy_lab.sim.server import SimServer
from pdproxy_lab.sim.storage import MemoryStorage
from tests.fakes.ports import free_port

CHUNK = 32
PATIENT = ConformanceOptions(timeout=30, lease_watch=20, settle=8, poll=0.02, silence=0.3)
"""For engines that are well: a machine that stalls must not fail them."""
BRISK = ConformanceOptions(timeout=10, lease_watch=1, settle=0.8, poll=0.02, silence=0.3)
"""For engines that are not."""
DEADLINES = Deadlines(kv_ready=5, abandoned_prefill=1, release=1, tokenize=5, probe=5)


@dataclass
class Rig:
    """The engines and the settings that list them."""

    p: SimServer
    d: SimServer
    plain: SimServer
    settings: Settings
    e: SimServer | None = None

    async def judge(
        self,
        *names: str,
        options: ConformanceOptions = BRISK,
        plain: bool = False,
        seconds: float | None = None,
    ) -> dict[str, Result]:
        """Run the checks of these names (none: all) behind the one of the pair; return the results
        by name.

        `seconds`: for each of them, in place of the options' timeout, which the check of the pair
        keeps.
        """
        if plain:
            options = structs.replace(options, plain=self.plain.url)
        checks = [check for check in CHECKS if not names or check.name in ("pair", *names)]
        assert len(checks) >= len(names)
        if seconds is not None:
            checks = [
                one if one.name == "pair" else replace(one, takes=exactly(seconds))
                for one in checks
            ]
        (pair,) = (await run(self.settings, options, checks)).pairs
        return {result.name: result for result in pair.results}


def exactly(seconds: float) -> Callable[[PairUnderTest], float]:
    """What `Check.takes` is for a check that gets so many seconds, whatever the options say."""
    return lambda pair: seconds - pair.options.timeout


@asynccontextmanager
async def rig(
    connector: str = "nixl",
    *,
    ranks: int = 1,
    notifier: bool = False,
    p: Mapping[str, Any] | None = None,
    d: Mapping[str, Any] | None = None,
    kv_ready: Mapping[str, Any] | None = None,
    deadlines: Mapping[str, float] | None = None,
    lease: float = 1.5,
    said_lease: float | None = None,
    speed: float = 2.0,
    encodes: bool = False,
) -> AsyncIterator[Rig]:
    """Run them. `p`, `d`: facts of theirs alone. `said_lease`: what the settings say of P's lease.
    `encodes`: all have vision, and there is an
    encoder engine.
    """
    zmq_port, http_port = free_port(), free_port()
    notify = {
        "lmcache-pd": f"tcp://127.0.0.1:{zmq_port}",
        "lmcache-mp": f"http://127.0.0.1:{zmq_port}/api/v1/telemetry",
    }
    if notifier:
        notify["nixl"] = notify["lmcache-pd"]
    usual: dict[str, Any] = {
        "connector": connector,
        "hardware": Hardware(speed=speed),
        "kv_lease_duration": lease,
    }
    usual |= {"handshake_timeout": 0.5, "tensor_parallel_size": ranks, "vision": encodes}
    usual |= {"enable_prefix_caching": False} if connector in ("lmcache-pd", "cpu") else {}
    usual |= {"cpu": CpuBuffer(cpu_port=free_port())} if connector == "cpu" else {}
    usual |= {"mooncake": MooncakeFacts(bootstrap_port=0)} if connector == "mooncake" else {}
    told = {"notify": notify[connector]} if connector in notify else {}
    if connector in ("p2p-nccl", "moriio"):
        usual |= {"register": f"tcp://127.0.0.1:{zmq_port}", "registration_interval": 0.1}
        usual |= {"randomize_request_ids": False}
    receives: dict[str, Any] = {
        "pd_peer_init_port": 0,
        "pd_peer_alloc_port": 0,
        "skip_last_n_tokens": 1,
    }
    storage = MemoryStorage() if connector in ("shared", "lmcache-mp", "kvstore-keys") else None
    p_facts: dict[str, Any] = {
        **usual,
        **told,
        "lmcache": SimLMCache(chunk_size=CHUNK),
        **(p or {}),
    }
    d_facts: dict[str, Any] = {
        **usual,
        **(told if notifier else {}),
        "lmcache": SimLMCache(chunk_size=CHUNK, **receives),
        **(d or {}),
    }
    async with AsyncExitStack() as stack:
        e, encoders = None, tuple[ConfiguredEngine, ...]()
        if encodes:
            folder = stack.enter_context(TemporaryDirectory())
            extra = ECExtraConfig(shared_storage_path=folder)
            made, used = (
                ECTransferConfig(
                    ec_connector="ECExampleConnector", ec_role=role, ec_connector_extra_config=extra
                )
                for role in ("ec_producer", "ec_consumer")
            )
            p_facts["ec_transfer_config"] = used
            e_facts = {**usual, "connector": "none", "ec_transfer_config": made}
            e = await stack.enter_async_context(
                SimServer(SimFacts(role="encode", **e_facts), chance=4)
            )
            encoders = (ConfiguredEngine(url=e.url, role="encode"),)
        one = await stack.enter_async_context(
            SimServer(SimFacts(role="prefill", **p_facts), chance=1, storage=storage)
        )
        two = await stack.enter_async_context(
            SimServer(SimFacts(role="decode", **d_facts), chance=2, storage=storage)
        )
        plain = await stack.enter_async_context(
            SimServer(
                SimFacts(role="aggregated", **{**usual, "connector": "none", "register": None}),
                chance=3,
            )
        )
        receiver = ReceiverSettings()
        if connector == "lmcache-pd":
            init, alloc = two.engine.receiver_ports
            receiver = ReceiverSettings(init_ports=tuple(init), alloc_ports=tuple(alloc))
        bootstrap = one.engine.bootstrap.url if one.engine.bootstrap is not None else None
        engines = (
            ConfiguredEngine(
                url=one.url,
                role="prefill",
                facts=EngineFacts(bootstrap=bootstrap, kv_lease_duration=said_lease),
            ),
            ConfiguredEngine(url=two.url, role="decode", receiver=receiver),
            ConfiguredEngine(url=plain.url, role="aggregated"),
            *encoders,
        )
        settings = Settings(
            listen=Listen(port=http_port),
            pools=(Pool(connector=connector, nodes=engines, lmcache=LMCache(chunk_size=CHUNK)),),
            deadlines=structs.replace(DEADLINES, **(deadlines or {})),
            kv_ready=KvReady(**{"port": zmq_port, "notifier": notifier, **(kv_ready or {})}),
            registration=RegistrationSettings(port=zmq_port),
            probes=Probes(interval=3600, scrape_interval=3600),
        )
        yield Rig(one, two, plain, settings, e)
