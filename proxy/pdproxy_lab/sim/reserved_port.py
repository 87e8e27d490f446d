"""A port that stays this engine's while nobody listens on it: between the end of one run of the
engine and the start of the next.

A socket that is bound and does not listen keeps the system from giving the port to another process,
also as the port of a connection. The kernel refuses connections to it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

_BACKLOG = 1024


class ReservedPort:
    """One port. `release` must be called at the end."""

    def __init__(self) -> None:
        self._reserving: socket.socket | None = None

    @property
    def number(self) -> int:
        """The reserved port, 0 before the first `listen`."""
        return int(self._reserving.getsockname()[1]) if self._reserving is not None else 0

    async def listen(
        self,
        accepted: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None],
        host: str,
        port: int,
    ) -> asyncio.Server:
        """Listen on the reserved port, or reserve `port` (0: any free one) of `host`'s first
        address.

        Raises:
            OSError: the port is taken, or the address is unknown or does not belong to this
                machine. `filename` is the address.
        """
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        try:
            if self._reserving is None:
                self._reserving = bound(found[0][0], found[0][4])
            made = bound(self._reserving.family, self._reserving.getsockname())
            try:
                return await asyncio.start_server(accepted, sock=made, backlog=_BACKLOG)
            except OSError:
                made.close()
                raise
        except OSError as error:
            raise OSError(error.errno, error.strerror, f"{host}:{self.number or port}") from None

    def release(self) -> None:
        """Let others have the port, once nobody listens on it. `listen` may then reserve
        another.
        """
        if self._reserving is not None:
            self._reserving.close()
            self._reserving = None


def bound(family: int, address: tuple[Any, ...]) -> socket.socket:
    """Return a socket with this address that does not listen; other such sockets may have the same
    one.

    Raises:
        OSError: the port is taken, or the address does not belong to this machine.
        OverflowError: there is no such port.
    """
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setblocking(False)
        made.bind(address)
    except (OSError, OverflowError):
        made.close()
        raise
    return made
