"""Wiring of KV transfer: the pool's contract, and what engines need for it, from the settings."""

from __future__ import annotations

import dataclasses
import logging
from urllib.parse import urlsplit

from pdproxy.app.share import PoolShare
from pdproxy.deciding.buffers import ReceiveBuffers
from pdproxy.deciding.kept_turns import TurnLimits
from pdproxy.deciding.turns import PoolTurns
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.handle_hosts import HandleHosts
from pdproxy.kit.clock import Clock
from pdproxy.observe.description import Label, MergeRule, Samples, gauge
from pdproxy.observe.events import Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.serving.dispatch.resources import KvTransfer
from pdproxy.serving.kv.open_turns import OpenTurns, TurnKeeper
from pdproxy.serving.kv.ready import ReadyWaits
from pdproxy.settings.engines import BY_LABEL, ConfiguredEngine
from pdproxy.settings.kv import LMCache
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy.settings.transfer import receiver_host
from pdproxy.transfer.contract import Contract, Receiver
from pdproxy.transfer.registry import entry_of

logger = logging.getLogger("pdproxy.kv")

TURN_BYTES = gauge(
    "pdproxy_turn_bytes",
    "bytes",
    "Bytes of token ids and handles that are held (turns.max_bytes)",
    Label(
        "of",
        (("kept", "turns that may be used"), ("open", "turns whose answer or notice has not come")),
    ),
    workers=MergeRule.SUM,
)


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
        and any(engine.role in ("any", BY_LABEL) for engine in pool.nodes)
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
) -> tuple[OpenTurns | None, PoolTurns | None]:
    """Return what hands KV of finished turns back to prefill engines: the turns of this process's
    requests, and those that are kept if this process does that. None where that is not wanted.

    `own`: see `build_ledger`. `hosts`: which hosts handles may name.
    """
    wanted = settings.pool.turns
    if not wanted.bidirectional or contract.turns is None:
        return None, None
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
    arguments = contract.turns, limits, ledger, engines, settings.deadlines, observers, clock
    keeper: TurnKeeper = PoolTurns(*arguments) if own is None else own.turns(*arguments)

    def host_of(decode: str) -> str | None:
        engine = engines.known.get(decode)
        return None if engine is None else engine.kv_host

    opened = OpenTurns(
        contract.turns,
        keeper,
        clock.now,
        max_bytes=limits.max_bytes,
        by_notice=settings.kv_ready.notifier,
        host_of=host_of,
        checked=hosts.checked,
    )
    turns = keeper if isinstance(keeper, PoolTurns) else None

    def sizes() -> Samples:
        kept = [] if turns is None else [(("kept",), turns.kept.size)]
        return [*kept, (("open",), opened.size)]

    observers.show(TURN_BYTES, sizes)
    return opened, turns


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
