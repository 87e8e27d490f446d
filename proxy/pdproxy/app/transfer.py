"""Wiring of KV transfer: the pool's contract with what its settings say of it."""

from __future__ import annotations

from pdproxy.kit.clock import Clock
from pdproxy.observe.events import Observers
from pdproxy.serving.dispatch.resources import KvTransfer
from pdproxy.serving.kv.buffers import ReceiveBuffers
from pdproxy.serving.kv.ready import KvReady
from pdproxy.settings.schema import Settings
from pdproxy.settings.transfer_checks import receiver_host
from pdproxy.transfer.contract import Receiver
from pdproxy.transfer.kvstore_keys import KVSTORE_KEYS
from pdproxy.transfer.lmcache_mp import LMCACHE_MP
from pdproxy.transfer.lmcache_pd import lmcache_pd
from pdproxy.transfer.nixl import nixl
from pdproxy.transfer.shared import SHARED


def build_transfer(settings: Settings, clock: Clock, observers: Observers) -> KvTransfer:
    """Return how KV gets from one engine to another under these settings."""
    pool = settings.pool
    lmcache = pool.lmcache
    contracts = {
        "nixl": nixl(notifier=settings.kv_ready.notifier, early=settings.kv_ready.early),
        "shared": SHARED,
        "lmcache-mp": LMCACHE_MP,
        "kvstore-keys": KVSTORE_KEYS,
        "lmcache-pd": lmcache_pd(
            first_on_prefill=lmcache.first_token == "prefill",  # noqa: S105 - a token of text
            chunk_size=lmcache.chunk_size,
            unfull_chunks=lmcache.save_unfull_chunk,
            first_rank_only=lmcache.first_rank_only,
        ),
    }
    decodes = [node for node in pool.nodes if node.role == "decode"]
    receivers = {
        node.url: Receiver(receiver_host(node), node.receiver.init_ports, node.receiver.alloc_ports)
        for node in decodes
        if node.receiver.init_ports
    }
    capacity: dict[str, int] = {}
    if lmcache.pd_buffer_size is not None and lmcache.kv_bytes_per_token is not None:
        slots = lmcache.pd_buffer_size // (lmcache.kv_bytes_per_token * lmcache.chunk_size)
        capacity = dict.fromkeys(receivers, slots)
    return KvTransfer(
        contracts[pool.connector],
        KvReady(clock, observers, clock.now),
        ReceiveBuffers(capacity, lmcache.chunk_size, clock, observers, settings.deadlines.queue),
        receivers,
        recomputes=settings.kv_ready.on_timeout == "recompute",
    )
