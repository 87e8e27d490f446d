"""The gauges of one running proxy: what `/metrics` reads of its parts at each scrape.

Owns their names and texts. Counts of what happened are `observe.metrics`', but for those that their owners keep.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pdproxy.observe.metrics import Gauge

if TYPE_CHECKING:
    from pdproxy.app.compose import Proxy


def gauges(proxy: Proxy) -> Iterable[Gauge]:
    """Return the gauges of a proxy. Each is read whenever somebody scrapes."""
    nodes, readers = proxy.ledger.nodes, proxy.bodies.workers

    def handles() -> Iterable[tuple[tuple[str, ...], float]]:
        return [((state,), count) for state, (count, _) in proxy.custodian.snapshot().items()]

    def ages() -> Iterable[tuple[tuple[str, ...], float]]:
        return [((state,), age) for state, (_, age) in proxy.custodian.snapshot().items()]

    node_labels = ("node", "role")
    return (
        Gauge(
            "pdproxy_node_inflight",
            "Legs in flight on an engine",
            node_labels,
            lambda: [((n.url, n.role.value), n.requests) for n in nodes],
        ),
        Gauge(
            "pdproxy_node_up",
            "Whether an engine may be used",
            node_labels,
            lambda: [((n.url, n.role.value), float(n.usable(proxy.clock.now()))) for n in nodes],
        ),
        Gauge("pdproxy_kv_handles", "KV handles that are not over, by state", ("state",), handles),
        Gauge("pdproxy_kv_handle_age_seconds", "Age of the oldest KV handle in a state", ("state",), ages),
        Gauge("pdproxy_inflight", "Requests being served", (), lambda: [((), proxy.admission.inflight)]),
        Gauge(
            "pdproxy_kv_ready_waits",
            "Prompts that wait for notices",
            (),
            lambda: [((), proxy.transfer.ready.waiting)],
        ),
        Gauge(
            "pdproxy_kv_notices_kept",
            "Notices that nobody has waited for yet",
            (),
            lambda: [((), proxy.transfer.ready.kept)],
        ),
        Gauge(
            "pdproxy_kv_buffer_slots",
            "Chunks of KV that may be in a decode engine's receive buffer",
            ("node",),
            lambda: [((url,), taken) for url, taken in proxy.transfer.buffers.taken.items()],
        ),
        Gauge(
            "pdproxy_body_readers",
            "Reader processes, and large bodies that wait for one, by state",
            ("state",),
            lambda: [(("busy",), readers.busy), (("idle",), readers.idle), (("awaited",), readers.waiting)],
        ),
        Gauge("pdproxy_connections", "Open connections of clients", (), lambda: [((), proxy.connections.open)]),
        Gauge(
            "pdproxy_held_bytes",
            "Bytes that are held: bodies of requests, answers that engines' legs have, whole answers that are not read yet",
            ("what",),
            lambda: [
                (("bodies",), proxy.room.held),
                (("answers",), proxy.answer_room.held),
                (("unread",), proxy.unread.held),
            ],
        ),
        Gauge("pdproxy_queue", "Requests waiting for a place", (), lambda: [((), proxy.admission.waiting)]),
        Gauge(
            "pdproxy_kv_missing_tokens",
            "Prompt tokens that never arrived by KV transfer since the engine's start",
            ("node",),
            lambda: [((url,), missing) for url, missing in proxy.auditor.missing().items()],
        ),
        Gauge(
            "pdproxy_task_restarts",
            "Failures of background tasks that must always run, and that were started again",
            ("task",),
            lambda: [((task,), count) for task, count in proxy.tasks.failures()],
            counts=True,
        ),
        Gauge(
            "pdproxy_log_lines_dropped",
            "Log lines that were dropped, since standard error was not read or could not be written",
            (),
            lambda: [((), proxy.log.dropped if proxy.log is not None else 0)],
            counts=True,
        ),
    )
