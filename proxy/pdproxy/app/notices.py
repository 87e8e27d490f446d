"""Wiring of engines' notices that KV is ready: the socket at which they come in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from pdproxy.app.posted_notices import PostedNotices
from pdproxy.app.process import Process
from pdproxy.app.share import PoolShare
from pdproxy.app.sockets import AddressToBind, Sockets, notices_place
from pdproxy.serving.dispatch.resources import KvTransfer
from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.notices import NoticeRouter, Telemetry
from pdproxy.serving.kv.open_turns import OpenTurns
from pdproxy.settings.schema import Settings
from pdproxy.transfer.contract import Channel
from pdproxy.upstream.notices import NoticeSocket
from pdproxy.wire.notices import Notice

logger = logging.getLogger("pdproxy")


@dataclass(frozen=True, slots=True)
class Noticing:
    """What takes notices. `socket` is bound only if the contract's engines send them over ZMQ.

    `posted`: what takes those that the contract's engines post, None if they post none. `sockets`
    None: engines send none to this process.
    """

    socket: NoticeSocket
    posted: PostedNotices | None
    over_zmq: bool
    place: AddressToBind
    sockets: Sockets | None
    process: Process

    def start(self) -> None:
        """Bind the socket, if engines send or post notices to this process.

        Raises:
            SettingsError: it can't be bound.
        """
        if self.sockets is None:
            return
        if self.over_zmq:
            self.sockets.bind(self.socket, self.place)
            logger.info("KV-ready notices are expected on %s", self.socket.address)
        if self.posted is not None:
            self.posted.bind(self.sockets, self.place)
            self.process.tasks.keep(self.posted.run, "notices")
            logger.info(
                "KV-ready notices are expected on http://%s:%d", self.place.host, self.place.port
            )

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
        if self.posted is not None:
            self.posted.close()


def build_notices(
    settings: Settings,
    transfer: KvTransfer,
    custodian: Custodian,
    turns: OpenTurns | None,
    process: Process,
    sockets: Sockets | None,
    own: PoolShare | None,
) -> Noticing:
    """Return what takes the notices of a contract's engines. `sockets`: how the pool's are
    bound, None: they are not. `own`: the process's part of the pool, if there are several
    processes.
    """
    contract, ready = transfer.contract, transfer.ready
    over_zmq, posts = (contract.has_notices_over(one) for one in (Channel.ZMQ, Channel.HTTP))
    failed = process.tasks.watch("notices").failed
    take: Callable[[Notice], None] = ready.receive
    is_read = False
    if over_zmq:
        take = NoticeRouter(ready, custodian, turns).receive
        is_read = contract.handle_from_notice is not None or turns is not None
    if own is not None and (over_zmq or posts):
        take = own.notices(take, process.observers, failed, is_read=is_read)
    socket = NoticeSocket(take, ready.undecodable, failed)
    posted = None
    if posts:
        posted = PostedNotices(Telemetry(ready.undecodable), take, process.clock, process.observers)
    return Noticing(socket, posted, over_zmq, notices_place(settings), sockets, process)
