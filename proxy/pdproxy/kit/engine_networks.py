"""Which addresses engines may have (`engines.networks`): what the proxy connects to, and what KV
handles may name.

By default all but those at which no engine is, and something else may be that trusts the machine of
the proxy: the services of clouds that hand out credentials, the other ends of a link, groups.
Loopback and private networks are where engines are.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, ip_network

from pdproxy.kit.addresses import Address, Network, goes_to, inside, isatap, read_address

_FORBIDDEN: tuple[tuple[str, str], ...] = (
    ("0.0.0.0/8", "no address to connect to"),
    ("::/128", "no address to connect to"),
    ("fe80::/10", "link-local"),
    ("169.254.0.0/16", "link-local, where clouds have their metadata"),
    ("fd00:ec2::/32", "the metadata of a cloud"),
    ("fd20:ce::254/128", "the metadata of a cloud"),
    ("100.100.100.200/32", "the metadata of a cloud"),
    ("168.63.129.16/32", "the metadata of a cloud"),
    ("192.0.0.0/24", "reserved"),
    ("240.0.0.0/4", "reserved"),
    ("224.0.0.0/4", "multicast"),
    ("ff00::/8", "multicast"),
)
FORBIDDEN: tuple[tuple[Network, str], ...] = tuple(
    (ip_network(text), why) for text, why in _FORBIDDEN
)
"""Where no engine may be unless the setting names it, and what is there."""
_LOCALHOST = IPv4Address("127.0.0.1")
_NAME = re.compile(r"[\w.-]+")
"""The characters of names. Others are part of no name, and mean more to some who connect: brackets
around an address, and what ZMQ has before a semicolon.
"""


class EngineNetworks:
    """The networks of the setting; none: all addresses but the forbidden ones."""

    def __init__(self, networks: Sequence[Network] = ()) -> None:
        self._networks = tuple(networks)

    def __repr__(self) -> str:
        return (
            f"<EngineNetworks "
            f"{', '.join(map(str, self._networks)) or 'all but the forbidden ones'}>"
        )

    @property
    def are_named(self) -> bool:
        """Whether the setting names networks."""
        return bool(self._networks)

    def why_not(self, host: str) -> str | None:
        """Return why no engine may be at an address, as what follows it in a sentence; None if one
        may be, or for a name.
        """
        address = _address(host)
        return _why_no_name(host) if address is None else self._why_not(address)

    def why_not_named(self, host: str) -> str | None:
        """Return the same for a host that somebody else resolves: where networks are named, no name
        is known to be in them.
        """
        address = _LOCALHOST if host.lower().removesuffix(".") == "localhost" else _address(host)
        if address is not None:
            return self._why_not(address)
        if self._networks:
            return "a name, of which nobody knows whether it is in engines.networks"
        return _why_no_name(host)

    def _why_not(self, address: Address) -> str | None:
        tunnelled = isatap(address)
        if tunnelled is not None and (why := self._why_not(tunnelled)) is not None:
            return why  # else it counts by itself, too: the network before it can be anybody's
        ends = goes_to(address)
        if self._networks:
            is_one = inside(address, self._networks) or all(
                inside(end, self._networks) for end in ends
            )
            return None if is_one else "not in engines.networks"
        found = (why for end in ends for network, why in FORBIDDEN if end in network)
        return next((f"{why}: engines.networks can allow it" for why in found), None)


USUAL = EngineNetworks()
"""Without the setting."""


def _why_no_name(host: str) -> str | None:
    return None if _NAME.fullmatch(host) else "neither an address nor a name"


def _address(host: str) -> Address | None:
    """Return the address that a host is, also in the forms that only the system reads: 127.1,
    0x7f000001, 2130706433.

    And in those that resolvers make one of: with a dot at its end, and with digits and dots of
    other scripts.
    """
    host = host.removesuffix(".")
    if not host.isascii():
        try:
            host = host.encode("idna").decode()
        except UnicodeError:
            return None
    found = read_address(host)
    if found is None:
        try:
            # `inet_aton` ignores what is behind white space.
            found = (
                IPv4Address(socket.inet_aton(host))
                if host[:1].isdigit() and _NAME.fullmatch(host)
                else None
            )
        except (OSError, ValueError):  # it holds a NUL
            return None
    return found
