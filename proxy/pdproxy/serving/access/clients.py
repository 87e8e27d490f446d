"""Clients, told apart by key or else by address, and what each of them holds of what all share.

Owns these counts. A share is an equal part of a bound for each client that holds something of it. It applies only while others
wait: one client alone may take nearly everything, and clients behind one balancer, who look like one, do not throttle each other.
What a client holds beyond its share is taken from it where nothing is lost by it: a place in the queue, a body that is not whole,
an idle connection, an answer that its client does not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Protocol

from pdproxy.kit.errors import PdproxyError

Network = IPv4Network | IPv6Network
_SUBNET = 64
"""Bits of an IPv6 address that name a client's network: it may use any of the addresses in it."""


class Holder(Protocol):
    """Something of a client's that can be taken from it."""

    def evict(self, error: PdproxyError) -> None:
        """End it now. What it held is given back before this returns, or soon after where its connection has to be lost first."""


class Client:
    """One client. `name` is of a key or an address. Known as long as it has a connection or a request."""

    __slots__ = ("bodies", "bytes", "name", "slow", "uses")

    def __init__(self, name: bytes | str) -> None:
        self.name = name
        self.uses = 0
        self.bytes = 0
        """Of bodies that are held."""
        self.bodies: dict[Holder, None] = {}
        """Connections with a body that is not whole, the one that has waited longest first."""
        self.slow: dict[Holder, None] = {}
        """Connections whose client reads its answers too slowly, in the order in which that was noticed."""

    def __repr__(self) -> str:
        return f"<Client {self.uses} uses, {self.bytes} bytes>"  # not its name: it may be of a key


class Clients:
    """All clients that are known now."""

    def __init__(self, trusted_proxies: Iterable[Network] = ()) -> None:
        self._trusted = tuple(trusted_proxies)
        self._known: dict[bytes | str, Client] = {}
        self.with_slow: dict[Client, None] = {}
        """Those that read an answer too slowly now."""

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
        """End a use of a client. It is forgotten with the last."""
        client.uses -= 1
        if not client.uses:
            self._known.pop(client.name, None)

    def reads_slowly(self, client: Client, connection: Holder) -> None:
        """Note that an answer on a connection is read too slowly."""
        client.slow[connection] = None
        self.with_slow[client] = None

    def reads_again(self, client: Client, connection: Holder) -> None:
        """Note that it is not so any more; it may not have been so before."""
        if client.slow and client.slow.pop(connection, connection) is None and not client.slow:
            del self.with_slow[client]

    def trusts(self, address: str) -> bool:
        """Tell whether a peer is a proxy that names the clients it speaks for."""
        return bool(self._trusted) and self._is_trusted(_parsed(address))

    def behind(self, proxy: bytes | str, forwarded_for: Iterable[bytes]) -> bytes | str:
        """Return the name of the client that a trusted proxy of that name speaks for; its own, where it says nothing of one.

        `forwarded_for`: the values of the headers `X-Forwarded-For` in their order. Each proxy adds the address that it
        was asked from at the end: the last one that is no trusted proxy's is the client's. Whatever stands before it
        anybody may have made up.
        """
        hops = b",".join(forwarded_for)[-_LONGEST_HOPS:].split(b",")
        for hop in reversed(hops):
            found = _parsed(hop.strip().decode("latin-1"))
            if found is None:
                break
            if not self._is_trusted(found):
                return _name(found)
        return proxy

    def _is_trusted(self, address: IPv4Address | IPv6Address | None) -> bool:
        return address is not None and any(address in network for network in self._trusted)


_LONGEST_HOPS = 1024
"""Bytes of `X-Forwarded-For` that are read, from its end."""


def address_name(address: str) -> str:
    """Return a client's name by its address; "" for a peer without one."""
    if ":" not in address:
        return address
    found = _parsed(address)
    return _name(found) if found is not None else address


def _name(address: IPv4Address | IPv6Address) -> str:
    if isinstance(address, IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Network((int(address) >> _SUBNET << _SUBNET, _SUBNET)))


def _parsed(address: str) -> IPv4Address | IPv6Address | None:
    """Read an address, also with a port behind it or in brackets, as some proxies write it; None if it is none."""
    text = address.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return ip_address(text.partition("%")[0])
    except ValueError:
        return None
