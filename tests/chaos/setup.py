"""Which engines a run has, how each is configured for its connector, and what the proxy is told of
them. Pure.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pdproxy.engine_model.hardware import Hardware
from pdproxy.scheduling.placements import SPLIT
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.engines import Facts as EngineFacts
from pdproxy.settings.pools import Pool, PoolPolicy
from pdproxy.transfer import registry
from pdproxy_lab.sim.facts import (
    ConnectorName,
    CpuBuffer,
    ECExtraConfig,
    ECTransferConfig,
    LMCacheFacts,
    MooncakeFacts,
    SimFacts,
)
from pdproxy_lab.sim.mooncake import LONGER_THAN_PREFILL
from tests.chaos.options import Options

PROXY = "10.0.1.1"
JUDGE = "10.0.3.1"
"""The host of the engine that is asked what is right. The proxy does not know it."""
PORT = 8000
MODEL = "tiny"
NOTICES = 7500
LEASE = 10.0
"""Seconds for which a prefill engine keeps KV that nobody fetches."""
STORED: tuple[ConnectorName, ...] = ("shared", "lmcache-mp", "kvstore-keys")
"""Connectors whose engines share a storage."""
CONNECTORS: tuple[ConnectorName, ...] = ("nixl", "nixl-push", "mooncake", "cpu", *STORED)
"""Those whose engines need no ZMQ."""
ANY: tuple[ConnectorName, ...] = ("nixl", "nixl-push", "mooncake", "lmcache-mp", "shared")
"""Those whose engines may have the role `any`."""
HARDWARE = Hardware(prefill_tokens_per_s=4000.0, decode_step_s=0.02, request_overhead_s=0.001)
"""Slow enough that many requests are under way at once."""
_SIDE_PORT, _CPU_PORT = 5600, 5700
_QUIET = 8.0
_QUESTION = LEASE + LONGER_THAN_PREFILL + 2.0
"""Seconds that a decode engine with Mooncake waits for an answer that was lost."""
_CHUNK = 32
"""Tokens of LMCache's chunks: less than its own 256, so that most prompts have some."""

PlaceRole = Literal["encode", "prefill", "decode", "any", "aggregated"]


class Place(msgspec.Struct, frozen=True):
    """An engine: its name, its role, its host, and for connector `cpu` the host that it pushes
    to.
    """

    name: str
    role: PlaceRole
    host: str
    pushes_to: str = ""

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.host}:{PORT}"


def places(options: Options) -> list[Place]:
    """Return the engines of a run: P0, P1, ... and D0, D1, ...; or E0, E1, ..., each for any
    role. Encoder engines are V0, V1, ...
    """
    encode = [Place(f"V{n}", "encode", f"10.0.0.{90 + n}") for n in range(options.encode)]
    if options.pool == "any":
        count = options.prefill + options.decode
        return [*(Place(f"E{n}", "any", f"10.0.0.{10 + n}") for n in range(count)), *encode]
    decode = [Place(f"D{n}", "decode", f"10.0.0.{50 + n}") for n in range(options.decode)]
    prefill = [
        Place(f"P{n}", "prefill", f"10.0.0.{10 + n}", decode[n % len(decode)].host)
        for n in range(options.prefill)
    ]
    return [*prefill, *decode, *encode]


def unsuitable(options: Options) -> str | None:
    """Return why a run with these options is not possible, None if it is."""
    if options.connector not in CONNECTORS:
        known = ", ".join(CONNECTORS)
        return (
            f"--connector {options.connector} needs ZMQ, which the virtual network has not: "
            f"expected one of {known}"
        )
    if options.pool == "any" and options.connector not in ANY:
        return (
            f"--pool any: engines of connector {options.connector} have one role; those of "
            f"{', '.join(ANY)} can be any"
        )
    if options.encode and options.connector != "nixl":
        return f"--encode {options.encode}: with {options.connector} one engine serves media whole"
    if options.notices != "none" and options.connector != "nixl":
        return f"--notices {options.notices}: only engines of connector nixl have the notifier"
    if options.connector == "cpu" and options.prefill < options.decode:
        return (
            "--connector cpu: each decode engine needs a prefill engine of its own: --prefill is "
            "less than --decode"
        )
    return None


def quiet_for(options: Options) -> float:
    """Return the seconds until nothing may be held any more: engines close idle connections after 5
    s.
    """
    return _QUESTION if options.connector == "mooncake" else _QUIET


def facts(
    place: Place, connector: ConnectorName, *, notifies: bool = False, outputs: str = ""
) -> SimFacts:
    """Return how the engine at a place is configured. `notifies`: it has the notifier; `outputs`:
    the folder of encoder outputs, "" where no engine has vision.
    """
    is_posting = connector == "lmcache-mp" and place.role != "decode"
    notify = f"http://{PROXY}:{NOTICES}/api/v1/telemetry" if is_posting else None
    if notifies:
        notify = f"tcp://{PROXY}:{NOTICES}"
    cpu_host = place.host if place.role == "decode" else place.pushes_to
    ec = None
    if outputs and place.role not in ("decode", "aggregated"):
        ec = ECTransferConfig(
            ec_connector="ECExampleConnector",
            ec_role="ec_producer" if place.role == "encode" else "ec_consumer",
            ec_connector_extra_config=ECExtraConfig(shared_storage_path=outputs),
        )
    return SimFacts(
        role=place.role,
        model=MODEL,
        connector="none" if place.role == "encode" else connector,
        vision=bool(outputs),
        ec_transfer_config=ec,
        hardware=HARDWARE,
        eos_every=0,
        enable_prefix_caching=connector not in ("cpu", "lmcache-mp"),
        kv_lease_duration=LEASE,
        heartbeat_interval=2.0,
        handshake_timeout=2.0,
        side_channel_host=place.host,
        side_channel_port=0 if connector == "mooncake" else _SIDE_PORT,
        notify=notify,
        lmcache=LMCacheFacts(chunk_size=_CHUNK),
        cpu=CpuBuffer(cpu_host=cpu_host, cpu_port=_CPU_PORT) if connector == "cpu" else CpuBuffer(),
        mooncake=MooncakeFacts(abort_request_timeout=LEASE, connector_timeout=3.0),
    )


def nodes(options: Options) -> dict[str, ConfiguredEngine]:
    """Return what the proxy is told of each engine, by name."""
    found = {}
    for place in places(options):
        sources: tuple[str, ...] = ()
        if options.connector == "cpu" and place.role == "decode":
            sources = tuple(
                one.url
                for one in places(options)
                if one.role == "prefill" and one.pushes_to == place.host
            )
        assert place.role != "aggregated"
        found[place.name] = ConfiguredEngine(
            url=place.url,
            role=place.role,
            sources=sources,
            facts=EngineFacts(kv_lease_duration=LEASE),
        )
    return found


def pool(options: Options, made: dict[str, ConfiguredEngine]) -> Pool:
    """Return the settings of the pool."""
    assert options.connector in registry.names()
    # Where nothing is known of the engines' times, `auto` splits no prompt: every second seed
    # splits them all.
    policy = PoolPolicy(placement=SPLIT if options.pool == "any" and options.seed % 2 else None)
    return Pool(connector=options.connector, nodes=tuple(made.values()), policy=policy)
