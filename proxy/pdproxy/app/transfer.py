"""Wiring of KV transfer: the pool's contract, and what engines need for it, from the settings."""

from __future__ import annotations

import dataclasses
import logging
from urllib.parse import urlsplit

from pdproxy.app.share import PoolShare
from pdproxy.deciding.buffers import ReceiveBuffers
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.handle_hosts import HandleHosts
from pdproxy.kit.clock import Clock
from pdproxy.observe.events import Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.serving.dispatch.resources import KvTransfer
from pdproxy.serving.kv.kept_turns import TurnLimits
from pdproxy.serving.kv.ready import ReadyWaits
from pdproxy.serving.kv.turns import PoolTurns
from pdproxy.serving.kv.worker_turns import WorkerTurns
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.kv import LMCache
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy.settings.transfer import receiver_host
from pdproxy.transfer.contract import Contract, Receiver
from pdproxy.transfer.registry import entry_of

logger = logging.getLogger("pdproxy.kv")


def build_transfer(
    settings: Settings, engines: EngineRegistry, clock: Clock, observers: Observers
) -> KvTransfer:
    """Return how KV gets from one engine to another under these settings."""
    pool = settings.pool
    contract = entry_of(pool.connector).contract(settings)
    order = pool.dispatch
    if (
        order is None
        and contract.holder.decode_waits
        and any(engine.role == "any" for engine in pool.nodes)
    ):
        # Two engines that are full of blocks which wait for the other one's KV would have none to
        # make that KV in.
        order = "sequential"
    return KvTransfer(
        contract if order is None else dataclasses.replace(contract, order=order),
        ReadyWaits(clock, observers, clock.now),
        recomputes=settings.kv_ready.on_timeout == "recompute",
        hosts=HandleHosts(settings.engines.allowed, engines.get),
    )


def build_buffers(
    settings: Settings, engines: EngineRegistry, clock: Clock, observers: Observers
) -> ReceiveBuffers:
    """Return what counts the space in decode engines' receive buffers."""
    unit = settings.pool.lmcache.chunk_size
    return ReceiveBuffers(engines, unit, clock, observers, settings.deadlines)


def build_turns(
    settings: Settings,
    contract: Contract,
    ledger: Ledger,
    engines: EngineRegistry,
    clock: Clock,
    observers: Observers,
    own: PoolShare | None,
    hosts: HandleHosts,
) -> PoolTurns | None:
    """Return what hands KV of finished turns back to prefill engines, None where that is not
    wanted.

    `own`: see `build_ledger`. `hosts`: which hosts handles may name.
    """
    wanted = settings.pool.turns
    if not wanted.bidirectional or contract.turns is None:
        return None
    if not settings.kv_ready.notifier:
        logger.warning(
            "turns.bidirectional without kv_ready.notifier: engines before vLLM 0.33.0 name no "
            "handle of a stream, and keep the "
            "KV of each stream for %g s",
            wanted.decoder_kv_blocks_ttl,
        )
    limits = TurnLimits(
        seconds=wanted.decoder_kv_blocks_ttl - wanted.margin,
        count=wanted.max_kept,
        max_bytes=wanted.max_bytes,
        max_blocks=wanted.max_blocks,
        min_tokens=wanted.min_tokens,
        min_share=wanted.min_share,
    )
    by_notice = settings.kv_ready.notifier
    arguments = contract.turns, limits, ledger, engines, settings.deadlines, observers, clock
    if own is None:
        return PoolTurns(*arguments, by_notice=by_notice, hosts=hosts)
    own.turns = WorkerTurns(
        *arguments,
        by_notice=by_notice,
        hosts=hosts,
        number=own.number,
        pool=own.at,
        area=own.kept_turns,
        siblings=own.siblings,
    )
    return own.turns


def receiver_of(engine: ConfiguredEngine) -> Receiver | None:
    """Return where an engine receives KV that is pushed, None if nothing is pushed to it."""
    if not engine.decodes or not engine.receiver.init_ports:
        return None
    return Receiver(receiver_host(engine), engine.receiver.init_ports, engine.receiver.alloc_ports)


def kv_host_of(engine: ConfiguredEngine, pool: Pool) -> str | None:
    """Return the host at which other engines reach this one for KV, None if it is the one that the
    engine itself names.
    """
    by_url = urlsplit(engine.url).hostname if pool.remote_host == "url" else None
    return engine.facts.remote_host or by_url


def buffer_capacity(lmcache: LMCache) -> int | None:
    """Return how many chunks of KV a decode engine's receive buffer holds, None if that is not
    configured.
    """
    if lmcache.pd_buffer_size is None or lmcache.kv_bytes_per_token is None:
        return None
    return lmcache.pd_buffer_size // (lmcache.kv_bytes_per_token * lmcache.chunk_size)
