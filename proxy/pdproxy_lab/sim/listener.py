"""A listening port that can close and open again, and stop accepting connections without closing.

Owns the sockets. The port stays reserved while it is closed: a socket that is bound and doesn't
listen keeps other processes from getting it, and the kernel refuses connections to it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from pdproxy_lab.sim.reserved_port import bound

_BACKLOG = 1024


class Listener:
    """One port. `factory` makes the protocol of each connection; `tls` None: plain TCP."""

    def __init__(
        self,
        host: str,
        port: int,
        factory: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self.host, self.port = host, port
        self._factory = factory
        self._reserving: socket.socket | None = None
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        scheme = "http" if self._tls is None else "https"
        return (
            f"{scheme}://[{self.host}]:{self.port}"
            if ":" in self.host
            else f"{scheme}://{self.host}:{self.port}"
        )

    @property
    def listening(self) -> bool:
        """Whether connections are accepted, also when only the kernel does."""
        return self._socket is not None

    def open(self) -> None:
        """Listen, on the same port as before if there was one. Connections wait in the backlog
        until `accept`.

        Raises:
            OSError: the port is taken, or the address does not belong to this machine. `filename`
                is the address.
        """
        try:
            self._open()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.url) from None

    def _open(self) -> None:
        if self._reserving is None:
            self._reserving = self._bound()
            self.port = self._reserving.getsockname()[1]
        if self._socket is None:
            made = self._bound()
            try:
                made.listen(_BACKLOG)
            except OSError:
                made.close()
                raise
            self._socket = made

    def _bound(self) -> socket.socket:
        return bound(
            socket.AF_INET6 if ":" in self.host else socket.AF_INET, (self.host, self.port)
        )

    async def accept(self) -> None:
        """Accept connections."""
        if self._socket is not None and self._server is None:
            loop = asyncio.get_running_loop()
            # A duplicate: asyncio closes the socket that it gets, and the port must stay open in
            # `stop_accepting`.
            self._server = await loop.create_server(
                self._factory, sock=self._socket.dup(), backlog=_BACKLOG, ssl=self._tls
            )

    def stop_accepting(self) -> None:
        """Let new connections wait in the backlog."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def close(self) -> None:
        """Refuse connections, those in the backlog too. The port stays reserved."""
        self.stop_accepting()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def release(self) -> None:
        """Close, and release the port."""
        self.close()
        if self._reserving is not None:
            self._reserving.close()
            self._reserving = None
