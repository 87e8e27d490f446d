"""Wiring of engines' notices that KV is ready: the socket at which they come in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from pdproxy.app.posted_notices import PostedNotices
from pdproxy.app.process import Process
from pdproxy.app.sockets import AddressToBind, Sockets, notices_place
from pdproxy.app.worker_notices import WorkerNotices
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

    `posted`: what takes those that the contract's engines post, None if they post none.
    """

    socket: NoticeSocket
    posted: PostedNotices | None
    over_zmq: bool
    place: AddressToBind
    sockets: Sockets
    process: Process

    def start(self) -> None:
        """Bind the socket, if engines send or post notices to it, and this process serves.

        Raises:
            SettingsError: it can't be bound.
        """
        share = self.process.share.several
        if share is not None and not share.serves:
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
    sockets: Sockets,
) -> Noticing:
    """Return what takes the notices of a contract's engines. `sockets`: how the pool's are
    bound.
    """
    contract, name = transfer.contract, settings.pool.name
    router = NoticeRouter(transfer.ready, custodian, turns)
    failed = process.tasks.watch("notices").failed
    over_zmq = contract.has_notices_over(Channel.ZMQ)
    receive: Callable[[Notice], None] = router.receive
    if over_zmq:
        is_read = contract.handle_from_notice is not None or turns is not None
        receive = _of_all(process, f"notices {name}", receive, failed, is_read=is_read)
    socket = NoticeSocket(receive, transfer.ready.undecodable, failed)
    posted = None
    if contract.has_notices_over(Channel.HTTP):
        take = _of_all(process, f"notices {name}", transfer.ready.receive, failed, is_read=False)
        read = Telemetry(transfer.ready.undecodable)
        posted = PostedNotices(read, take, process.clock, process.observers)
    return Noticing(socket, posted, over_zmq, notices_place(settings), sockets, process)


def _of_all(
    process: Process,
    topic: str,
    take: Callable[[Notice], None],
    failed: Callable[[Exception], None],
    *,
    is_read: bool,
) -> Callable[[Notice], None]:
    """Return what gets the notices that come to this process: of several workers, `take` gets those
    about its own prompts.
    """
    share = process.share.several
    if share is None:
        return take
    return WorkerNotices(
        share.number,
        share.workers,
        topic,
        share.siblings,
        take,
        process.observers,
        failed,
        is_read=is_read,
    ).receive
