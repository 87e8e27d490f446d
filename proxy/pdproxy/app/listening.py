"""Clients' listening sockets: one at a host and port, several that share one, or a Unix socket in
their place.
"""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self

from pdproxy.app.unix_socket import UnixSocket
from pdproxy.settings.listen import Listen

BACKLOG = 2048


class Listening:
    """Where clients reach this proxy: bound for one process, or for each worker."""

    def __init__(self, settings: Listen) -> None:
        """Bind it.

        Raises:
            OSError: the port is taken, or the address is not of this machine; or the Unix socket is
                in use or can't be made.
        """
        self._unix: UnixSocket | None = None
        self._address = settings.host, settings.port
        count = settings.workers
        if settings.uds is not None:
            self._unix = UnixSocket(settings.uds, BACKLOG)
            self.sockets = [self._unix.socket.dup() for _ in range(count)]
        elif count == 1:
            self.sockets = [listen(*self._address)]
        else:
            self.sockets = listen_together(*self._address, count)
            self._address = settings.host, self.sockets[0].getsockname()[1]
        """One per worker."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def bind_again(self, number: int) -> None:
        """Give a worker a socket again, if its own was closed. It gets connections from when the
        worker serves it.
        """
        if self.sockets[number].fileno() < 0:
            self.sockets[number] = (
                _bound(*self._address) if self._unix is None else self._unix.socket.dup()
            )

    def keep_only(self, number: int) -> None:
        """Close what belongs to others, in a worker's own process."""
        for at, one in enumerate(self.sockets):
            if at != number:
                one.close()
        if self._unix is not None:
            self._unix.socket.close()  # not its file

    def close(self) -> None:
        """Close all; remove the Unix socket's file."""
        for one in self.sockets:
            one.close()
        if self._unix is not None:
            self._unix.close()


def listen(host: str, port: int, *, together: bool = False) -> socket.socket:
    """Return a listening socket; port 0 is any free one. `together`: others of this user may listen
    there, too.

    Raises:
        OSError: the port is taken, or the address is not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if together:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.set_inheritable(False)
    except OSError:
        listener.close()
        raise
    return listener


def listen_together(host: str, port: int, count: int) -> list[socket.socket]:
    """Return so many sockets that listen at one address, among which the system spreads
    connections. Port 0 is any free one.

    Raises:
        OSError: the port is taken, or the address is not of this machine.
    """
    # Sockets that share a port would also share it with another proxy of this user: that must be an
    # error, as with one worker.
    with listen(host, port) as first:
        port = first.getsockname()[1]
    listeners: list[socket.socket] = []
    try:
        listeners.extend(listen(host, port, together=True) for _ in range(count))
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _bound(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
