"""Finds the client of a request: by its key if keys are required, otherwise by its address.

Owns that rule. The address is the peer's, or the one that a trusted proxy names (`listen.trusted_proxies`).
"""

from __future__ import annotations

from collections.abc import Iterable

from pdproxy.kit.errors import UnauthorizedError
from pdproxy.kit.frames import drop_traceback
from pdproxy.serving.access.clients import Client, Clients
from pdproxy.serving.access.keys import Keys
from pdproxy.upstream.connection import Headers


class ClientIdentifier:
    """Finds the clients of requests. Each client that is returned is in use (`Clients.enter`) until the caller ends that."""

    def __init__(self, clients: Clients, keys: Keys) -> None:
        self._clients = clients
        self._keys = keys

    def __call__(
        self, peer: Client, headers: Headers, *, peer_is_trusted: bool
    ) -> tuple[Client, UnauthorizedError | None]:
        """Return the client of a request on a connection of `peer`, and the error if its key is required and not valid.

        `peer_is_trusted`: the peer is a trusted proxy, which names its client.
        """
        key_error: UnauthorizedError | None = None
        if self._keys.wanted:
            try:
                # If a header came twice, the first one counts.
                return self._clients.enter(self._keys.verified(_first(headers, b"authorization"))), None
            except UnauthorizedError as error:
                drop_traceback(error)  # it refers to this frame, which refers to the error
                key_error = error
        name = peer.name
        if peer_is_trusted:
            forwarded_for = (value for header, value in headers if header == b"x-forwarded-for")
            name = self._clients.name_behind(name, forwarded_for)
        return self._clients.enter(name), key_error


def _first(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bytes | None:
    return next((value for name, value in headers if name == wanted), None)
