"""Finds the client of a request: by its key if keys are required, otherwise by its address; or the tenant that it belongs to.

Owns that rule, and the report of a request without a valid key. The address is the peer's, or the one that a trusted proxy names
(`listen.trusted_proxies`); of an IPv6 address only the network (/64) is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from pdproxy.kit.errors import UnauthorizedError
from pdproxy.kit.frames import drop_traceback
from pdproxy.observe.events import Observers
from pdproxy.serving.access.clients import Client, Clients
from pdproxy.serving.access.keys import Keys
from pdproxy.serving.access.tenants import Tenants
from pdproxy.upstream.connection import Headers
from pdproxy.web.refusals import report_refusal
from pdproxy.wire.cache_salt import TenantSalt


class Identified(NamedTuple):
    """The client of one request. `key`: the name of its key; `key_error`: why it is refused, None if it is not.

    `salt`: of its tenant's caches, None where tenants share them.
    `digest`: that of the key that lets it in, None if none does.
    """

    client: Client
    address: str
    key: str | None
    key_error: UnauthorizedError | None
    salt: TenantSalt | None = None
    digest: bytes | None = None


class Peer(Protocol):
    """The connection of a request."""

    peer: Client
    peer_is_trusted: bool


class ClientIdentifier:
    """Finds the clients of requests. Each client that is returned is in use (`Clients.enter`) until the caller ends that."""

    def __init__(
        self, clients: Clients, keys: Keys, observers: Observers | None = None, tenants: Tenants | None = None
    ) -> None:
        self._clients = clients
        self._tenants = tenants or Tenants(clients, keys)
        self._keys = keys
        self._observers = observers or Observers(())

    def __call__(self, peer: Client, headers: Headers, *, peer_is_trusted: bool) -> Identified:
        """Return the client of a request on a connection of `peer`. A key that is required and not valid is reported.

        `peer_is_trusted`: the peer is a trusted proxy, which names its client.
        """
        address = self._address(peer, headers, peer_is_trusted=peer_is_trusted)
        if not self._keys.wanted:
            if peer_is_trusted:
                client, salt = self._tenants.enter(address, None, headers, may_name=True)
                return Identified(client, address, None, None, salt)
            return Identified(self._clients.enter(address), address, None, None, self._tenants.salt(address))
        try:
            # If a header came twice, the first one counts.
            digest = self._keys.verified(_first(headers, b"authorization"))
        except UnauthorizedError as error:
            drop_traceback(error)  # it refers to this frame, which refers to the error
            report_refusal(self._observers, error, address)
            return Identified(self._clients.enter(address), address, None, error)
        key = self._keys.name(digest)
        client, salt = self._tenants.enter(digest, key, headers, may_name=True)
        return Identified(client, address, key, None, salt, digest)

    def address(self, connection: Peer, headers: Headers) -> str:
        """Return the address of a request's client."""
        return self._address(connection.peer, headers, peer_is_trusted=connection.peer_is_trusted)

    def _address(self, peer: Client, headers: Headers, *, peer_is_trusted: bool) -> str:
        name = peer.name
        if peer_is_trusted:
            forwarded_for = (value for header, value in headers if header == b"x-forwarded-for")
            name = self._clients.name_behind(name, forwarded_for)
        return str(name)


def _first(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bytes | None:
    return next((value for name, value in headers if name == wanted), None)
