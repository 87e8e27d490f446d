"""The socket for engines' notices that KV is ready: ZMQ PULL, bound here. Every prefill rank
connects to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import zmq

from pdproxy.upstream.inbound_socket import InboundSocket
from pdproxy.wire.notices import MAX_BYTES, Notice, decode

HIGH_WATER = 256
"""Messages that ZMQ keeps of each sender: 256 MiB, if all have the maximum length. Then the
sender's own queue fills.
"""


class NoticeSocket(InboundSocket):
    """Receives notices and passes each to `received`. For every other message it calls
    `undecodable`. `failed`: see the base.
    """

    kind = zmq.PULL
    name = "notices"
    max_bytes = MAX_BYTES
    high_water = HIGH_WATER

    def __init__(
        self,
        received: Callable[[Notice], None],
        undecodable: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        super().__init__(failed)
        self._received = received
        self._undecodable = undecodable

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        self.take(frames[0].bytes if len(frames) == 1 else b"")

    def take(self, message: bytes) -> None:
        """Handle a message, however it came."""
        notice = decode(message)
        if notice is None:
            self._undecodable()
        else:
            self._received(notice)
