"""All connectors. Pure. A new one is one file, one line here and its name in `SimFacts.connector`,
or in `ECTransferConfig.ec_connector` for one that moves encoder outputs.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from pdproxy_lab.sim.connector import Connector
from pdproxy_lab.sim.cpu import CpuConnector
from pdproxy_lab.sim.ec_connector import ECConnector, OutputStorage
from pdproxy_lab.sim.ec_cpu import ECCpu
from pdproxy_lab.sim.ec_example import ECExample
from pdproxy_lab.sim.ec_mooncake import ECMooncake
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.kvstore_keys import KVStoreKeys
from pdproxy_lab.sim.lmcache_mp import LMCacheMP
from pdproxy_lab.sim.lmcache_pd import LMCachePD
from pdproxy_lab.sim.memory import BlockPool
from pdproxy_lab.sim.mooncake import Mooncake
from pdproxy_lab.sim.moriio import Moriio
from pdproxy_lab.sim.nixl import Nixl
from pdproxy_lab.sim.nixl_push import NixlPush
from pdproxy_lab.sim.p2p_nccl import P2pNccl
from pdproxy_lab.sim.shared import SharedStorage
from pdproxy_lab.sim.stats import Stats
from pdproxy_lab.sim.storage import Storage


def connector_of(
    facts: SimFacts,
    engine_id: str,
    side_channel_port: int,
    pool: BlockPool,
    stats: Stats,
    storage: Storage,
) -> Connector:
    """Return the connector of one engine; it may share `storage` with other engines."""
    match facts.connector:
        case "nixl":
            return Nixl(facts, engine_id, side_channel_port, pool, stats)
        case "nixl-push":
            return NixlPush(facts, engine_id, side_channel_port, pool, stats)
        case "mooncake":
            return Mooncake(facts, pool, stats)
        case "lmcache-pd":
            return LMCachePD(facts, pool)
        case "lmcache-mp":
            return LMCacheMP(facts, pool, storage)
        case "shared":
            return SharedStorage(facts, pool, storage)
        case "kvstore-keys":
            return KVStoreKeys(facts, pool, storage)
        case "cpu":
            return CpuConnector(facts, pool)
        case "p2p-nccl":
            return P2pNccl(facts, pool)
        case "moriio":
            return Moriio(facts, pool)
        case "none":
            return Connector()


def ec_connector_of(
    facts: SimFacts, stats: Stats, outputs: OutputStorage | None, outbox: deque[Any]
) -> ECConnector:
    """Return the connector for encoder outputs of one engine. `outputs`: the storage that
    ECExampleConnector needs. `outbox`: for its commands.
    """
    config = facts.ec_transfer_config
    match config and config.ec_connector:
        case "ECExampleConnector":
            assert config is not None
            assert outputs is not None
            return ECExample(config, stats, outputs)
        case "ECCPUConnector":
            return ECCpu(facts, stats, outbox)
        case "ECMooncakeConnector":
            assert config is not None
            return ECMooncake(config, stats, outbox)
    return ECConnector()
