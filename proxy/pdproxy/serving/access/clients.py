"""Clients, identified by key or address, and what each of them holds of the shared limits.

Owns these counts. Each client that holds something of a limit has a share of it: an equal part.
Shares apply only while others wait: one client alone may take nearly everything, and so may all
clients behind one balancer, which look like one client. A client loses what it holds beyond its
share only where no work is lost: a place in the queue, a body that is not complete, an idle
connection, an answer that it does not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from ipaddress import IPv4Address, IPv6Network
from typing import Protocol

from pdproxy.kit.addresses import Address, Network, inside, read_address, read_place
from pdproxy.kit.errors import OverloadedError, PdproxyError, RefusalReason

_SUBNET = 64
"""Bits of an IPv6 address that identify a client's network: the client may use any address in
it.
"""


class Evictable(Protocol):
    """Something that a client holds and can lose."""

    def evict(self, error: PdproxyError) -> None:
        """End it. What it held is released before this returns, or soon after if its connection has
        to close first.
        """


class Client:
    """One client, while it has a connection or a request. `name` is the digest of a key, an
    address, or a tenant.

    `weight`: how much more of the places it may have than others, while all of them wait. `label`:
    its name in metrics, None if it has none (`access.tenants`).
    """

    __slots__ = ("bodies", "bytes", "label", "name", "slow", "uses", "weight")

    def __init__(self, name: bytes | str) -> None:
        self.name = name
        self.weight = 1.0
        self.label: str | None = None
        self.uses = 0
        self.bytes = 0
        """Bytes of its bodies that are held."""
        self.bodies: dict[Evictable, None] = {}
        """Connections with a body that is not complete, the one that has waited longest first."""
        self.slow: dict[Evictable, None] = {}
        """Connections whose client reads its answers too slowly, in the order in which that was
        noticed.
        """

    def __repr__(self) -> str:
        # not its name: it may be the digest of a key
        return f"<Client {self.uses} uses, {self.bytes} bytes>"


class Clients:
    """All clients that are known now."""

    def __init__(
        self, trusted_proxies: Iterable[Network] = (), *, trusts_unix: bool = False
    ) -> None:
        """Know none yet. `trusts_unix`: whoever connects to a Unix socket, and so has no address,
        is a trusted proxy.
        """
        self._trusted = tuple(trusted_proxies)
        self._trusts_unix = trusts_unix
        self._known: dict[bytes | str, Client] = {}
        self.with_slow: dict[Client, None] = {}
        """Those that read an answer too slowly now."""
        self.caught_up: Callable[[Client], None] = lambda _: None
        """Called with each client that reads no answer too slowly any more."""

    def __repr__(self) -> str:
        return f"<Clients {len(self._known)}>"

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Client]:
        return iter(self._known.values())

    def enter(self, name: bytes | str) -> Client:
        """Return the client of that name, to be used until `leave`."""
        client = self._known.get(name)
        if client is None:
            client = self._known[name] = Client(name)
        client.uses += 1
        return client

    def leave(self, client: Client) -> None:
        """End a use of a client. After the last use the client is forgotten."""
        client.uses -= 1
        if not client.uses:
            self._known.pop(client.name, None)

    def mark_slow(self, client: Client, connection: Evictable) -> None:
        """Note that an answer on a connection is read too slowly."""
        client.slow[connection] = None
        self.with_slow[client] = None

    def unmark_slow(self, client: Client, connection: Evictable) -> None:
        """Note that the answer is no longer read too slowly. Calling it for an unmarked connection
        changes nothing.
        """
        if client.slow and client.slow.pop(connection, connection) is None and not client.slow:
            del self.with_slow[client]
            self.caught_up(client)

    def trusts(self, address: str) -> bool:
        """Return whether a peer is a trusted proxy, which names its clients."""
        if not address:
            return self._trusts_unix
        return bool(self._trusted) and inside(read_address(address), self._trusted)

    def get(self, name: bytes | str) -> Client | None:
        """Return a client that is known now, None if none has that name."""
        return self._known.get(name)

    def evict_slow(self, client: object, over_share: Callable[[Client], bool]) -> None:
        """Drop one slow reader of another client that holds more than its share."""
        for other in self.with_slow:
            if other is not client and over_share(other):
                self.evict_reader(other)
                return

    @staticmethod
    def evict_reader(client: Client) -> None:
        """Drop one slow reader of a client, if the client has one."""
        for connection in client.slow:
            text = "others wait, and the client reads too slowly"
            connection.evict(OverloadedError(text, RefusalReason.SLOW_READER))
            return

    def name_behind(self, proxy: bytes | str, forwarded_for: Iterable[bytes]) -> bytes | str:
        """Return the name of the client behind a trusted proxy; the proxy's own name `proxy`, if it
        names no client.

        `forwarded_for`: the values of the headers `X-Forwarded-For` in their order. Each proxy adds
        the address of its own peer at the end: the last address that is not a trusted proxy's is
        the client's. Any sender may have invented those before it.
        """
        hops = b",".join(forwarded_for)[-_MAX_HOPS_BYTES:].split(b",")
        for hop in reversed(hops):
            found = _hop(hop.decode("latin-1"))
            if found is None:
                break
            if not inside(found, self._trusted):
                return _name(found)
        return proxy


_MAX_HOPS_BYTES = 1024
"""Bytes of `X-Forwarded-For` that are read, from its end."""


def address_name(address: str) -> str:
    """Return a client's name by its address; "" for a peer without one."""
    if ":" not in address:
        return address
    found = read_address(address)
    return _name(found) if found is not None else address


def _name(address: Address) -> str:
    if isinstance(address, IPv4Address):
        return str(address)
    return str(IPv6Network((int(address) >> _SUBNET << _SUBNET, _SUBNET)))


def _hop(text: str) -> Address | None:
    """Read an address, also with a port, in brackets or in quotes, as some proxies write it; None
    if it is not an address.
    """
    place = read_place(text.strip().strip('"'))
    return None if place is None else read_address(place.host)
