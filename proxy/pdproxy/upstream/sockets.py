"""How soon the kernel reports that an engine's machine does not answer any more: a cable, a switch,
a host without power.

Such a connection is not closed by anybody: what is sent is repeated for a quarter of an hour, and
where nothing is sent nothing is noticed at all.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

_USER_TIMEOUT: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)
_IDLE: int | None = getattr(socket, "TCP_KEEPIDLE", None)
_INTERVAL: int | None = getattr(socket, "TCP_KEEPINTVL", None)
_COUNT: int | None = getattr(socket, "TCP_KEEPCNT", None)


def watch_peer(transport: asyncio.BaseTransport, seconds: float) -> None:
    """Have a connection end once its other side has not acknowledged anything for about `seconds`;
    0: leave it as it is.

    A silent connection is asked after half of them. A process that is stopped acknowledges all the
    same: its kernel does, as long as its buffers hold what is sent. Linux also ends a connection
    that has more to send to a process that has read nothing for so long. Does nothing where the
    transport has no socket, or the system lacks an option.
    """
    found = transport.get_extra_info("socket")
    if found is None or not seconds:
        return
    idle, interval = max(1, round(seconds / 2)), max(1, round(seconds / 6))
    options = (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, _IDLE, idle),
        (socket.IPPROTO_TCP, _INTERVAL, interval),
        (socket.IPPROTO_TCP, _COUNT, max(1, round((seconds - idle) / interval))),
        (socket.IPPROTO_TCP, _USER_TIMEOUT, round(1000 * seconds)),
    )
    for level, option, value in options:
        if option is not None:
            with suppress(OSError):  # the connection may be gone already
                found.setsockopt(level, option, value)
