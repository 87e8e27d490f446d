"""The gauges of KV that is held, awaited or on its way."""

from __future__ import annotations

from pdproxy.observe import catalog, catalog_turns
from pdproxy.observe.metrics import Gauge
from pdproxy.serving.kv.buffers import ReceiveBuffers
from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.ready import KvReady
from pdproxy.serving.kv.turns import Turns


def kv_gauges(custodian: Custodian, ready: KvReady, buffers: ReceiveBuffers) -> list[Gauge]:
    """Return the gauges of custody, notices and receive buffers. Each is read at every scrape."""

    def handles() -> list[tuple[tuple[str, ...], float]]:
        return [((state,), count) for state, (count, _) in custodian.snapshot().items()]

    def ages() -> list[tuple[tuple[str, ...], float]]:
        return [((state,), age) for state, (_, age) in custodian.snapshot().items()]

    def chunks() -> list[tuple[tuple[str, ...], float]]:
        return [((url,), taken) for url, taken in buffers.taken.items()]

    def stuck() -> list[tuple[tuple[str, ...], float]]:
        return [((url,), count) for url, (count, _) in custodian.stuck.snapshot(custodian.now()).items()]

    def stuck_ages() -> list[tuple[tuple[str, ...], float]]:
        return [((url,), age) for url, (_, age) in custodian.stuck.snapshot(custodian.now()).items()]

    return [
        Gauge(catalog.KV_STUCK, stuck),
        Gauge(catalog.KV_STUCK_AGE, stuck_ages),
        Gauge(catalog.KV_HANDLES, handles),
        Gauge(catalog.KV_HANDLE_AGE, ages, max),
        Gauge(catalog.KV_READY_WAITS, lambda: [((), ready.waiting)]),
        Gauge(catalog.KV_NOTICES_KEPT, lambda: [((), ready.kept)]),
        Gauge(catalog.KV_BUFFER_SLOTS, chunks),
    ]


def turn_gauges(turns: Turns) -> list[Gauge]:
    """Return the gauges of turns whose KV decode engines keep. Each is read at every scrape."""

    def blocks() -> list[tuple[tuple[str, ...], float]]:
        return [((url,), count) for url, count in turns.kept.blocks().items()]

    def held() -> list[tuple[tuple[str, ...], float]]:
        return [(("kept",), turns.kept.size), (("open",), turns.open.size)]

    return [
        Gauge(catalog_turns.TURNS, lambda: [((), len(turns.kept.own))]),
        Gauge(catalog_turns.TURN_BLOCKS, blocks),
        Gauge(catalog_turns.TURN_BYTES, held),
    ]
