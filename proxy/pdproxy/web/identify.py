"""Who asks: the client of a request, by its key where keys are wanted, else by its address.

Owns that rule. An address is the peer's, or the one that a trusted proxy names (`listen.trusted_proxies`).
"""

from __future__ import annotations

from collections.abc import Iterable

from pdproxy.kit.errors import UnauthorizedError
from pdproxy.serving.access.clients import Client, Clients
from pdproxy.serving.access.keys import Keys
from pdproxy.upstream.connection import Headers


class Identify:
    """Tells clients apart. Each answer is a use of the client (`Clients.enter`), which the caller ends."""

    def __init__(self, clients: Clients, keys: Keys) -> None:
        self._clients = clients
        self._keys = keys

    def __call__(
        self, peer: Client, headers: Headers, *, speaks_for_others: bool
    ) -> tuple[Client, UnauthorizedError | None]:
        """Return the client of a request on a connection of `peer`, and why it is refused if it brought no valid key.

        `speaks_for_others`: the peer is a trusted proxy.
        """
        stranger: UnauthorizedError | None = None
        if self._keys.wanted:
            try:
                # Of a header that came twice, the first counts.
                return self._clients.enter(self._keys.known(_first(headers, b"authorization"))), None
            except UnauthorizedError as error:
                stranger = error
        name = peer.name
        if speaks_for_others:
            forwarded_for = (value for header, value in headers if header == b"x-forwarded-for")
            name = self._clients.behind(name, forwarded_for)
        return self._clients.enter(name), stranger


def _first(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bytes | None:
    return next((value for name, value in headers if name == wanted), None)
