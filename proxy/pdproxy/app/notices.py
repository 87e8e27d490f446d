"""Wiring of engines' notices that KV is ready: the socket at which they come in, and the route to which they are posted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from pdproxy.app.sockets import bind
from pdproxy.kit.tasks import TaskOwner
from pdproxy.serving.dispatch.resources import KvTransfer
from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.notices import NoticeRouter
from pdproxy.serving.kv.turns import Turns
from pdproxy.settings.engine_sockets import KvReady
from pdproxy.transfer.contract import Channel
from pdproxy.upstream.notices import NoticeSocket

logger = logging.getLogger("pdproxy")


@dataclass(frozen=True, slots=True)
class Noticing:
    """What takes notices. `socket` is bound only if the contract's engines send them over ZMQ.

    `telemetry` takes the body of a POST and returns whether it holds notices; None if the contract's engines post none.
    """

    socket: NoticeSocket
    telemetry: Callable[[bytes], bool] | None
    over_zmq: bool
    settings: KvReady

    def start(self) -> None:
        """Bind the socket, if engines send notices to it.

        Raises:
            SettingsError: it can't be bound.
        """
        if self.over_zmq:
            bind(self.socket, "kv_ready", self.settings.host, self.settings.port)
            logger.info("KV-ready notices are expected on %s", self.socket.address)


def build_notices(
    settings: KvReady, transfer: KvTransfer, custodian: Custodian, turns: Turns | None, tasks: TaskOwner
) -> Noticing:
    """Return what takes the notices of a contract's engines."""
    contract = transfer.contract
    router = NoticeRouter(transfer.ready, custodian, turns)
    socket = NoticeSocket(router.receive, transfer.ready.undecodable, tasks.watch("notices").failed)
    posted = contract.has_notices_over(Channel.HTTP)
    return Noticing(socket, router.telemetry if posted else None, contract.has_notices_over(Channel.ZMQ), settings)
