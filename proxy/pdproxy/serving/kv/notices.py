"""Passes each notice of an engine on: to the wait for KV, to the custody, or to the prefill legs whose client has left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.ready import KvReady
from pdproxy.serving.kv.turns import Turns
from pdproxy.wire import lmcache_telemetry
from pdproxy.wire.notices import Notice, NoticeEvent


class NoticeRouter:
    """Routes the notices of one proxy."""

    def __init__(self, ready: KvReady, custodian: Custodian, turns: Turns | None = None) -> None:
        self._ready = ready
        self._custodian = custodian
        self._turns = turns

    def receive(self, notice: Notice) -> None:
        """Take a notice from the notices' socket."""
        if notice.event is not NoticeEvent.READY:
            self._custodian.receive(notice)
            if self._turns is not None:
                self._turns.receive(notice)
        elif not self._custodian.orphans.receive(notice):
            self._ready.receive(notice)


class Telemetry:
    """Takes LMCache's telemetry for all pools whose engines post it."""

    def __init__(self, pools: Sequence[KvReady]) -> None:
        self._pools = pools
        self.receive: Callable[[Notice], None] = self._route
        """What gets each notice."""

    def __call__(self, body: bytes) -> bool:
        """Take a POST. Return whether it was telemetry."""
        found = lmcache_telemetry.notices(body)
        if found is None:
            self._pools[0].undecodable()
            return False
        for notice in found:
            self.receive(notice)
        return True

    def _route(self, notice: Notice) -> None:
        pool = next((one for one in self._pools if one.knows(notice.request_id)), self._pools[0])
        pool.receive(notice)
