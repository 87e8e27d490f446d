"""Wiring of KV transfer: the pool's contract, built from its settings, with its receivers and buffers."""

from __future__ import annotations

import time

from pdproxy.kit.clock import Clock
from pdproxy.observe.events import Observers
from pdproxy.serving.dispatch.resources import KvTransfer
from pdproxy.serving.kv.buffers import ReceiveBuffers
from pdproxy.serving.kv.ready import KvReady
from pdproxy.settings.schema import Settings
from pdproxy.settings.transfer_checks import receiver_host
from pdproxy.transfer.contract import Receiver
from pdproxy.transfer.registry import entry_of


def build_transfer(settings: Settings, clock: Clock, observers: Observers) -> KvTransfer:
    """Return how KV gets from one engine to another under these settings."""
    pool = settings.pool
    lmcache = pool.lmcache
    contract = entry_of(pool.connector).contract(settings)
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
        contract,
        KvReady(clock, observers, time.monotonic),
        ReceiveBuffers(capacity, lmcache.chunk_size, clock, observers, settings.deadlines.queue),
        receivers,
        recomputes=settings.kv_ready.on_timeout == "recompute",
    )
