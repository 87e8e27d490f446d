"""Faults of notices to the proxy, and of KV events. With rate=1 they happen to every one."""

from __future__ import annotations

import msgspec

from pdproxy_lab.sim import notifier
from pdproxy_lab.sim.faults.kind import FaultKind, Occurrence, arguments
from pdproxy_lab.sim.faults.moments import KV_EVENTS, KV_REPLAY, NOTICE
from pdproxy_lab.sim.faults.targets import Delivery

NO_NOTICES = (
    b"",
    b"\xc1",
    b"\x80",
    b"\xff" * 64,
    b'{"type":"ProxyNotif","req_id":"json"}',
    msgspec.msgpack.encode(["ProxyNotif", "an array"]),
    msgspec.msgpack.encode({"type": "ProxyNotif"}),
    msgspec.msgpack.encode({"type": "ProxyNotif", "req_id": 7}),
    msgspec.msgpack.encode({"type": "AllocRequest", "keys": []}),
    msgspec.msgpack.encode(
        {"type": notifier.TYPE, "v": 99, "event": "ready", "req_id": "from the future"}
    ),
    msgspec.msgpack.encode({"type": "ProxyNotif", "req_id": "x" * 100})[:-1],
)
"""Messages that no receiver can take for a notice."""


class _LostNotice(FaultKind):
    name = "lost_notice"
    summary = (
        "a notice is not sent (`rank`: only that worker's, empty: any); with rate=1 none is sent"
    )
    moments = NOTICE
    args = arguments(rank="")

    def on_notice(self, delivery: Delivery, now: Occurrence) -> None:
        delivery.copies = 0


class _LateNotice(FaultKind):
    name = "late_notice"
    summary = "a notice is sent `delay` seconds late"
    moments = NOTICE
    args = arguments(rank="", delay=1.0)

    def on_notice(self, delivery: Delivery, now: Occurrence) -> None:
        delivery.delay += now.args["delay"]


class _DoubleNotice(FaultKind):
    name = "double_notice"
    summary = "a notice is sent twice"
    moments = NOTICE
    args = arguments(rank="")

    def on_notice(self, delivery: Delivery, now: Occurrence) -> None:
        delivery.copies *= 2


class _GarbageNotice(FaultKind):
    name = "garbage_notice"
    summary = "messages that are no notices are sent before a notice, or instead of it (`instead`)"
    moments = NOTICE
    args = arguments(rank="", instead=True)

    def on_notice(self, delivery: Delivery, now: Occurrence) -> None:
        delivery.first += NO_NOTICES
        if now.args["instead"]:
            delivery.copies = 0


class _LostKvEvents(FaultKind):
    name = "lost_kv_events"
    summary = (
        "a message with KV events is not sent; a replay has it (`rank`: only that data-parallel "
        "rank's, empty: any)"
    )
    moments = KV_EVENTS
    args = arguments(rank="")

    def on_notice(self, delivery: Delivery, now: Occurrence) -> None:
        delivery.copies = 0


class _SilentReplay(FaultKind):
    name = "silent_replay"
    summary = "a replay of KV events is not answered"
    moments = KV_REPLAY
    args = arguments(rank="")

    def on_notice(self, delivery: Delivery, now: Occurrence) -> None:
        delivery.copies = 0


FAMILY: tuple[FaultKind, ...] = (
    _LostNotice(),
    _LateNotice(),
    _DoubleNotice(),
    _GarbageNotice(),
    _LostKvEvents(),
    _SilentReplay(),
)
