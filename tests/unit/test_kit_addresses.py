"""Addresses are compared by what they mean: no spelling of one makes another of it, and no other
text passes for one.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.kit.addresses import (
    HostPort,
    goes_to,
    inside,
    is_any,
    is_loopback,
    isatap,
    reachable,
    read_address,
    read_network,
    read_place,
    usual_host,
)

V4 = st.integers(0, 2**32 - 1).map(IPv4Address)
V6 = st.integers(0, 2**128 - 1).map(IPv6Address).filter(lambda one: one.ipv4_mapped is None)
EITHER = V4 | V6
PORT = st.integers(0, 65_535)


def spellings(address: IPv4Address | IPv6Address) -> list[str]:
    """An address as systems, proxies and clients write it."""
    if isinstance(address, IPv6Address):
        found = [str(address), address.exploded, str(address).upper(), f"{address}%eth0"]
    else:
        number = int(address)
        found = [
            f"::ffff:{address}",
            f"::FFFF:{number >> 16:x}:{number & 0xFFFF:x}",
            f"0:0:0:0:0:ffff:{address}",
        ]
    return [
        *found,
        *(f"[{one}]" for one in found),
        *([str(address)] if isinstance(address, IPv4Address) else []),
    ]


@given(EITHER)
def test_every_spelling_is_the_same_address(address: IPv4Address | IPv6Address) -> None:
    for text in spellings(address):
        assert read_address(text) == address, text
        assert usual_host(text) == str(address), text
        assert is_loopback(text) == address.is_loopback
        assert is_any(text) == address.is_unspecified


@given(EITHER, PORT)
def test_a_place_is_its_host_and_its_port(address: IPv4Address | IPv6Address, port: int) -> None:
    for text in spellings(address):
        assert read_place(text) == HostPort(str(address), None), text
        if text.startswith("[") or ":" not in text:
            assert read_place(f"{text}:{port}") == HostPort(str(address), port), text


@given(st.text(max_size=40) | st.from_regex(r"\[[0-9a-f:.]{1,20}\][a-z0-9.:]{0,9}", fullmatch=True))
def test_what_is_read_can_be_written_again(text: str) -> None:
    """Nothing raises; a place that is read is the whole text, and reads the same once it is in its
    usual spelling.
    """
    place = read_place(text)
    if place is not None:
        shown = f"[{place.host}]" if ":" in place.host else place.host
        assert read_place(shown if place.port is None else f"{shown}:{place.port}") == place
        assert not set(place.host) & set("[]/@ "), "a host has no such characters"
    if (address := read_address(text)) is not None:
        assert read_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "[::1].evil",
        "[::1]evil",
        "[::1]:80.evil",
        "[::1]:",
        "[::1",
        "::1]",
        "[127.0.0.1]",
        "127.0.0.1:80:80",
        "127.0.0.1:99999",
        "127.0.0.1:+80",
        "localhost@evil",
        "127.0.0.1%lo",
        "::1%",
        "",
        ":80",
        "[]",
        "a b",
    ],
)
def test_what_is_no_place(text: str) -> None:
    assert read_place(text) is None
    assert not is_loopback(text)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("LOCALHOST", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("::ffff:127.0.0.1", True),
        ("localhost.evil", False),
        ("127.0.0.1.evil", False),
        ("127.1", False),  # no two programs read this alike
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("::", False),
    ],
)
def test_which_hosts_are_the_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


@given(V4, st.integers(0, 32))
def test_a_network_has_its_members_in_each_spelling(address: IPv4Address, length: int) -> None:
    """Whether the network or the member is written as IPv6 makes no difference."""
    plain = read_network(f"{address}/{length}")
    mapped = read_network(f"::ffff:{address}/{96 + length}")
    assert plain == mapped == IPv4Network(f"{address}/{length}", strict=False)
    for text in spellings(address):
        assert inside(read_address(text), [plain])
    if length:
        other = IPv4Address(int(address) ^ (1 << 31))
        assert not inside(read_address(f"::ffff:{other}"), [plain])


def test_nothing_is_inside_without_an_address() -> None:
    assert not inside(None, [read_network("0.0.0.0/0")])


@given(V4)
def test_where_packets_end(address: IPv4Address) -> None:
    """Translators and tunnels take an IPv4 address out of an IPv6 one."""
    number = int(address)
    for carrier in (
        f"64:ff9b::{address}",
        f"2002:{number >> 16:x}:{number & 0xFFFF:x}::1",
        f"::ffff:{address}",
        f"::ffff:0:{address}",
        f"2001:0:a00:1:0:ffff:{(number >> 16) ^ 0xFFFF:x}:{(number & 0xFFFF) ^ 0xFFFF:x}",
    ):
        assert goes_to(ip_address(carrier)) == (address,)
    assert goes_to(address) == (address,)
    if number > 1:
        assert goes_to(IPv6Address(number)) == (address,), "the old form"


@given(V4, st.sampled_from([48, 56, 64, 96]))
def test_where_packets_end_behind_a_prefix_of_unknown_length(
    address: IPv4Address, length: int
) -> None:
    """RFC 8215: each network chooses its prefix there. The place of the IPv4 address is that of RFC
    6052.
    """
    prefix, four = IPv6Address("64:ff9b:1::").packed[: length // 8], address.packed
    if length < 96:
        four = four[: 8 - length // 8] + b"\0" + four[8 - length // 8 :]
    ends = goes_to(IPv6Address((prefix + four).ljust(16, b"\0")))
    assert address in ends or address in IPv4Network("0.0.0.0/8")


@given(V4, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_where_a_tunnel_of_isatap_ends(address: IPv4Address, network: int, middle: int) -> None:
    for mark in (0x5EFE, 0x0200_5EFE):
        assert isatap(IPv6Address(network << 64 | mark << 32 | int(address))) == address
    other = IPv6Address(network << 64 | middle << 32 | int(address))
    assert (isatap(other) == address) == (middle in {0x5EFE, 0x0200_5EFE})
    assert isatap(address) is None


def test_addresses_of_ipv6_itself_go_nowhere_else() -> None:
    for text in ("::", "::1", "fd00:ec2::254", "2001:db8::1"):
        assert goes_to(ip_address(text)) == (ip_address(text),)


@pytest.mark.parametrize(
    ("host", "at"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("::", "::1"),
        ("0::0", "::1"),
        ("::ffff:0.0.0.0", "127.0.0.1"),
        ("10.0.0.1", "10.0.0.1"),
        ("gateway", "gateway"),
    ],
)
def test_where_a_server_on_this_machine_is_reached(host: str, at: str) -> None:
    assert reachable(host) == at
