"""IP addresses, and hosts with ports, compared by what they mean and not by how they are written.

Owns the reading of addresses: IPv6 in brackets, zones (fe80::1%eth0), ports, and IPv4 addresses
inside IPv6 ones (::ffff:10.0.0.1 is 10.0.0.1: a socket that listens on :: shows clients so). What
is not exactly an address is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_MAPPED = IPv6Network("::ffff:0:0/96")
_TRANSLATED = IPv6Network("64:ff9b::/96"), IPv6Network("::ffff:0:0:0/96")
"""IPv4 behind a translator (NAT64, RFC 6052; SIIT, RFC 2765)."""
_LOCAL_TRANSLATED = IPv6Network("64:ff9b:1::/48")
"""The same, with prefixes that each network chooses, of 48, 56, 64 or 96 bits (RFC 8215)."""
_NOWHERE = IPv4Network("0.0.0.0/8")
"""No IPv4 address to which a translator sends: the zeros of a longer prefix, or behind a shorter
one.
"""
_ISATAP = 0x5EFE, 0x0200_5EFE
"""Bits 64 to 95 of IPv6 addresses behind which there is an IPv4 one, whatever network comes before
(RFC 5214, 6.1).
"""
_COMPATIBLE = IPv6Network("::/96")
"""An old form of IPv4 addresses in IPv6 ones (RFC 4291, 2.5.5.1)."""
_UNICAST = _COMPATIBLE[0], _COMPATIBLE[1]
"""Addresses in that network that are IPv6's own: unspecified and loopback."""


class HostPort(NamedTuple):
    """A host, without brackets and in small letters, and its port; None: no port is named."""

    host: str
    port: int | None


def read_address(text: str) -> Address | None:
    """Return the address that a text is, None if the text is something else. Brackets around IPv6
    and a zone may be there.

    An IPv4 address that is written as an IPv6 one is returned as IPv4. A zone says through which
    interface an address is reached: it is no part of what is compared.
    """
    inner = text
    if text.startswith("["):
        if not text.endswith("]"):
            return None
        inner = text[1:-1]
    inner, percent, zone = inner.partition("%")
    if percent and not zone:
        return None
    try:
        found = ip_address(inner)
    except ValueError:
        return None
    if isinstance(found, IPv4Address):
        return None if percent or inner is not text else found
    return found.ipv4_mapped or found


def read_place(text: str) -> HostPort | None:
    """Return the host and the port of `HOST`, `HOST:PORT`, `[IPV6]`, `[IPV6]:PORT` or a bare IPv6
    address; None for others.

    An address gets its usual spelling. A name is not looked up.
    """
    host, port = text, ""
    has_port = False
    if text.startswith("["):
        host, end, rest = text.partition("]")
        if not end or (rest and not rest.startswith(":")):
            return None
        host, port, has_port = host + end, rest[1:], bool(rest)
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
        has_port = True
    address = read_address(host)
    if address is None and (not host or set(host) & set("[]:%/@ ")):
        return None
    if has_port and not (
        port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 1 << 16
    ):
        return None
    return HostPort(
        str(address) if address is not None else host.lower(), int(port) if has_port else None
    )


def usual_host(host: str) -> str:
    """Return a host in its usual spelling: an address as the system writes it, a name in small
    letters.
    """
    address = read_address(host)
    return str(address) if address is not None else host.lower()


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine, as far as its name shows. Brackets around IPv6 may be
    there.
    """
    if host.lower() == "localhost":
        return True
    address = read_address(host)
    return address is not None and address.is_loopback


def is_any(host: str) -> bool:
    """Return whether a server that listens on a host listens on all addresses of its machine."""
    address = read_address(host)
    return address is not None and address.is_unspecified


def reachable(host: str) -> str:
    """Return where a client on the same machine reaches a server that listens on a host: for all
    addresses, the loopback.
    """
    if not is_any(host):
        return host
    return "::1" if ":" in host and "." not in host else "127.0.0.1"


def read_network(text: str) -> Network:
    """Return the network that a text names; an address is a network of one. Networks of mapped
    addresses become IPv4's.

    Raises:
        ValueError: it names none.
    """
    found = ip_network(text, strict=False)
    if isinstance(found, IPv6Network) and found.subnet_of(_MAPPED):
        return IPv4Network((int(found.network_address) & 0xFFFF_FFFF, found.prefixlen - 96))
    return found


def inside(address: Address | None, networks: Iterable[Network]) -> bool:
    """Return whether an address of `read_address` lies in one of these networks."""
    return address is not None and any(address in network for network in networks)


def overlap(one: Network, other: Network) -> bool:
    """Return whether two networks have an address in common."""
    if isinstance(one, IPv4Network):
        return isinstance(other, IPv4Network) and one.overlaps(other)
    return isinstance(other, IPv6Network) and one.overlaps(other)


def goes_to(address: Address) -> tuple[Address, ...]:
    """Return where packets for an address end: at an IPv4 address, if translators or tunnels take
    that out of an IPv6 one.

    There are several where it depends on the length of a prefix that nobody knows here.
    """
    if isinstance(address, IPv4Address):
        return (address,)
    if address.ipv4_mapped is not None:
        return (address.ipv4_mapped,)
    if address.sixtofour is not None:
        return (address.sixtofour,)
    if address.teredo is not None:
        return (address.teredo[1],)  # the client's; the first one is a server on the way
    number = int(address)
    last = IPv4Address(number & 0xFFFF_FFFF)
    if address in _LOCAL_TRANSLATED:
        return tuple(one for one in (*_embedded(number), last) if one not in _NOWHERE) or (last,)
    if inside(address, _TRANSLATED) or (address in _COMPATIBLE and address not in _UNICAST):
        return (last,)
    return (address,)


def isatap(address: Address) -> IPv4Address | None:
    """Return where an ISATAP tunnel, if there is one, takes packets for an address; None: no such
    tunnel takes them.
    """
    number = int(address)
    is_one = isinstance(address, IPv6Address) and number >> 32 & 0xFFFF_FFFF in _ISATAP
    return IPv4Address(number & 0xFFFF_FFFF) if is_one else None


def _embedded(number: int) -> Iterator[IPv4Address]:
    """Return the IPv4 addresses behind prefixes of 48, 56 and 64 bits. Bits 64 to 71 are part of
    none (RFC 6052, 2.2).
    """
    bits = number.to_bytes(16, "big")
    joined = bits[:8] + bits[9:]
    for at in (6, 7, 8):
        yield IPv4Address(joined[at : at + 4])
