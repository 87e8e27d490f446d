"""Passes each notice of an engine on: to the wait for KV, to the custody, or to the prefill legs
whose client has left.
"""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.open_turns import OpenTurns
from pdproxy.serving.kv.ready import ReadyWaits
from pdproxy.wire import lmcache_telemetry
from pdproxy.wire.notices import Notice, NoticeEvent


class NoticeRouter:
    """Routes the notices of one proxy."""

    def __init__(
        self, ready: ReadyWaits, custodian: Custodian, turns: OpenTurns | None = None
    ) -> None:
        self._ready = ready
        self._custodian = custodian
        self._turns = turns

    def receive(self, notice: Notice) -> None:
        """Take a notice from the notices' socket."""
        if notice.event is not NoticeEvent.READY:
            self._custodian.receive(notice)
            if self._turns is not None:
                self._turns.noticed(notice)
        elif not self._custodian.orphans.receive(notice):
            self._ready.receive(notice)


class Telemetry:
    """Reads LMCache's telemetry. `undecodable` is called for a body that is something else."""

    def __init__(self, undecodable: Callable[[], None]) -> None:
        self._undecodable = undecodable

    def __call__(self, body: bytes) -> list[Notice] | None:
        """Return the notices of a POST, None if it was no telemetry."""
        found = lmcache_telemetry.notices(body)
        if found is None:
            self._undecodable()
        return found
