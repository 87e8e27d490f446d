"""A listening port that can close and open again, and stop taking connections without closing.

Owns the sockets. The port stays ours while it is closed: a socket that is bound and doesn't listen keeps others from getting
it, and the kernel refuses connections to it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

_BACKLOG = 1024


class Listener:
    """One port. `factory` makes the protocol of each connection; `tls` None: plain TCP."""

    def __init__(
        self, host: str, port: int, factory: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None = None
    ) -> None:
        self._tls = tls
        self.host, self.port = host, port
        self._factory = factory
        self._keeper: socket.socket | None = None
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://[{self.host}]:{self.port}" if ":" in self.host else f"{scheme}://{self.host}:{self.port}"

    @property
    def listening(self) -> bool:
        """Whether connections are accepted, be it by the kernel alone."""
        return self._socket is not None

    def open(self) -> None:
        """Listen, on the port of the last time if there was one. Connections wait in the backlog until `take`.

        Raises:
            OSError: the port is taken, or the address is none of this machine's. `filename` is the address.
        """
        try:
            self._open()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.url) from None

    def _open(self) -> None:
        if self._keeper is None:
            self._keeper = self._bound()
            self.port = self._keeper.getsockname()[1]
        if self._socket is None:
            made = self._bound()
            try:
                made.listen(_BACKLOG)
            except OSError:
                made.close()
                raise
            self._socket = made

    def _bound(self) -> socket.socket:
        made = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.setblocking(False)
            made.bind((self.host, self.port))
        except (OSError, OverflowError):
            made.close()
            raise
        return made

    async def take(self) -> None:
        """Take connections from the backlog."""
        if self._socket is not None and self._server is None:
            loop = asyncio.get_running_loop()
            # A duplicate: asyncio closes what it was given, and the port must stay open when connections are let wait.
            self._server = await loop.create_server(
                self._factory, sock=self._socket.dup(), backlog=_BACKLOG, ssl=self._tls
            )

    def leave(self) -> None:
        """Let new connections wait in the backlog."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def close(self) -> None:
        """Refuse connections, those in the backlog too. The port stays ours."""
        self.leave()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def give_up(self) -> None:
        """Close, and let others have the port."""
        self.close()
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
