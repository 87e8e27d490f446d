"""The gauges of KV that is held, awaited or on its way."""

from __future__ import annotations

from pdproxy.observe.metrics import Gauge
from pdproxy.serving.kv.buffers import ReceiveBuffers
from pdproxy.serving.kv.custody import Custodian
from pdproxy.serving.kv.ready import KvReady


def kv_gauges(custodian: Custodian, ready: KvReady, buffers: ReceiveBuffers) -> list[Gauge]:
    """Return the gauges of custody, notices and receive buffers. Each is read at every scrape."""

    def handles() -> list[tuple[tuple[str, ...], float]]:
        return [((state,), count) for state, (count, _) in custodian.snapshot().items()]

    def ages() -> list[tuple[tuple[str, ...], float]]:
        return [((state,), age) for state, (_, age) in custodian.snapshot().items()]

    def chunks() -> list[tuple[tuple[str, ...], float]]:
        return [((url,), taken) for url, taken in buffers.taken.items()]

    text = "Chunks of KV that may be in a decode engine's receive buffer"
    return [
        Gauge("pdproxy_kv_handles", "KV handles that have not ended, by state", ("state",), handles),
        Gauge("pdproxy_kv_handle_age_seconds", "Age of the oldest KV handle in a state", ("state",), ages),
        Gauge("pdproxy_kv_ready_waits", "Prompts that wait for notices", (), lambda: [((), ready.waiting)]),
        Gauge("pdproxy_kv_notices_kept", "Notices that nobody has waited for yet", (), lambda: [((), ready.kept)]),
        Gauge("pdproxy_kv_buffer_slots", text, ("node",), chunks),
    ]
