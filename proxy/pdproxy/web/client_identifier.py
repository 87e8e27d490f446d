"""Finds the client of a request: by its key if keys are required, otherwise by its address; or the
tenant that it belongs to.

Owns that rule, and the report of a request without a valid key. The address is the peer's, or the
one that a trusted proxy names (`listen.trusted_proxies`); of an IPv6 address only the network (/64)
is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from pdproxy.kit.errors import ForbiddenError, PdproxyError, UnauthorizedError
from pdproxy.kit.frames import drop_traceback
from pdproxy.observe.events import Observers
from pdproxy.serving.access.clients import Client, Clients
from pdproxy.serving.access.keys import Keys, ValidKey
from pdproxy.serving.access.permits import check_route, check_tenant
from pdproxy.serving.access.routes import TABLE
from pdproxy.serving.access.tenants import Tenants
from pdproxy.settings.keys import KeyRights
from pdproxy.upstream.connection import Headers
from pdproxy.web.refusals import report_refusal
from pdproxy.web.wrong_keys import WrongKeys
from pdproxy.wire.api_errors import Dialect
from pdproxy.wire.cache_salt import TenantSalt

_OF_MESSAGES = frozenset(entry.path for entry in TABLE if entry.dialect is Dialect.MESSAGES)


class IdentifiedClient(NamedTuple):
    """Who sends a request. `key`: None without one; `error`: why the request is refused, None if it
    is not.
    """

    address: str
    key: ValidKey | None
    error: PdproxyError | None


class Identified(NamedTuple):
    """The client of one request; `salt`: of its tenant's caches, None where tenants share them. The
    rest is as in `IdentifiedClient`.
    """

    client: Client
    address: str
    key: ValidKey | None
    error: PdproxyError | None
    salt: TenantSalt | None = None


class IdentifiedConnection(Protocol):
    """The connection of a request."""

    peer: Client
    peer_is_trusted: bool


class ClientIdentifier:
    """Finds the clients of requests. Each client that is returned is in use (`Clients.enter`) until
    the caller ends that.
    """

    def __init__(
        self,
        clients: Clients,
        keys: Keys,
        observers: Observers | None = None,
        tenants: Tenants | None = None,
        wrong: WrongKeys | None = None,
    ) -> None:
        self._clients = clients
        self._tenants = tenants or Tenants(clients, keys)
        self._keys = keys
        self._observers = observers or Observers(())
        self._wrong = wrong

    def __call__(
        self, peer: Client, headers: Headers, path: str, *, peer_is_trusted: bool
    ) -> Identified:
        """Return the client of a request on a connection of `peer`. A request that is refused for
        its key is reported.

        `path`: the request's, in the table of routes. `peer_is_trusted`: the peer is a trusted
        proxy, which names its client.
        """
        address = self._address(peer, headers, peer_is_trusted=peer_is_trusted)
        if not self._keys.wanted:
            if peer_is_trusted:
                return self._without_keys(address, headers, peer_is_trusted=True)
            return Identified(
                self._clients.enter(address), address, None, None, self._tenants.salt(address)
            )
        return self._entered(self._found(address, headers, path), headers)

    def find(
        self, connection: IdentifiedConnection, headers: Headers, path: str
    ) -> IdentifiedClient:
        """Return who sends a request, before anything is held for its client. Arguments and reports
        as above.
        """
        address = self.address(connection, headers)
        return (
            self._found(address, headers, path)
            if self._keys.wanted
            else IdentifiedClient(address, None, None)
        )

    def enter(
        self, found: IdentifiedClient, connection: IdentifiedConnection, headers: Headers
    ) -> Identified:
        """Return the client of a request whose sender was found."""
        if not self._keys.wanted:
            return self._without_keys(
                found.address, headers, peer_is_trusted=connection.peer_is_trusted
            )
        return self._entered(found, headers)

    def refused(
        self, error: UnauthorizedError, connection: IdentifiedConnection, headers: Headers
    ) -> PdproxyError:
        """Report a request that another one has found to have no valid key. Return what it is
        answered with.
        """
        return self._refused(error, self.address(connection, headers))

    def note_wrong(
        self, error: UnauthorizedError, connection: IdentifiedConnection, headers: Headers
    ) -> None:
        """Report a request that has no key of operators, and is answered without one. A client's
        key is no guess.
        """
        if error.code is None:
            return  # its header holds no key
        try:
            self._keys.check(_first(headers, b"authorization"))
        except UnauthorizedError:
            known = False
        else:
            known = self._keys.wanted
        if not known:
            self.refused(error, connection, headers)

    def check_head(self, rights: KeyRights, headers: Headers, path: str) -> None:
        """Raise ForbiddenError unless a key with these rights is good for a request's route, and
        for the tenant that it names.
        """
        check_route(rights, path)
        check_tenant(rights, self._tenants.named(headers))

    def address(self, connection: IdentifiedConnection, headers: Headers) -> str:
        """Return the address of a request's client."""
        return self._address(connection.peer, headers, peer_is_trusted=connection.peer_is_trusted)

    def _without_keys(self, address: str, headers: Headers, *, peer_is_trusted: bool) -> Identified:
        if peer_is_trusted:
            client, salt = self._tenants.enter(address, None, headers, may_name=True)
            return Identified(client, address, None, None, salt)
        return Identified(
            self._clients.enter(address), address, None, None, self._tenants.salt(address)
        )

    def _found(self, address: str, headers: Headers, path: str) -> IdentifiedClient:
        try:
            key = self._keys.verified(_key_in(headers, path))
        except UnauthorizedError as error:
            drop_traceback(error)  # it refers to this frame, which refers to the error
            return IdentifiedClient(address, None, self._refused(error, address))
        if key.rights is not None:
            try:
                self.check_head(key.rights, headers, path)
            except ForbiddenError as error:
                drop_traceback(error)
                return IdentifiedClient(address, key, self._refused(error, address))
        return IdentifiedClient(address, key, None)

    def _refused(self, error: UnauthorizedError | ForbiddenError, address: str) -> PdproxyError:
        """Report a request that is refused for its key. Return what it is answered with."""
        answer: PdproxyError = error
        if self._wrong is not None and type(error) is UnauthorizedError:
            answer = self._wrong.answer(error, address)
        report_refusal(self._observers, answer, address)
        return answer

    def _entered(self, found: IdentifiedClient, headers: Headers) -> Identified:
        address, key, error = found
        if key is None or error is not None:
            return Identified(self._clients.enter(address), address, key, error)
        client, salt = self._tenants.enter(key.digest, key.name, headers, may_name=True)
        return Identified(client, address, key, None, salt)

    def _address(self, peer: Client, headers: Headers, *, peer_is_trusted: bool) -> str:
        name = peer.name
        if peer_is_trusted:
            forwarded_for = (value for header, value in headers if header == b"x-forwarded-for")
            name = self._clients.name_behind(name, forwarded_for)
        return str(name)


def _key_in(headers: Headers, path: str) -> bytes | None:
    """Return what has a request's key, as an `Authorization` header has it.

    If a header came twice, the first one counts. Clients of Anthropic's API send a key in a header
    of their own, and a token in `Authorization`.
    """
    found = _first(headers, b"authorization")
    if (
        found is None
        and path in _OF_MESSAGES
        and (key := _first(headers, b"x-api-key")) is not None
    ):
        return b"Bearer " + key
    return found


def _first(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bytes | None:
    return next((value for name, value in headers if name == wanted), None)
