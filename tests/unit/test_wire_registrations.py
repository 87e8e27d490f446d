"""Heartbeats: vLLM's own are read, anything else is not one, and nothing raises."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.wire.registrations import MAX_BYTES, Registration, decode, place

P2P = {"type": "P", "http_address": "10.0.0.1:20001", "zmq_address": "10.0.0.1:21001"}
MORIIO = {
    "type": "D",
    "http_address": "10.0.0.2:40005",
    "zmq_address": "host:10.0.0.2,handshake:6301,notify:61005",
    "dp_size": 2,
    "tp_size": 8,
    "transfer_mode": "READ",
}


def packed(message: Any) -> bytes:
    """Encode a message."""
    return msgspec.msgpack.encode(message)


def test_vllms_own_heartbeats() -> None:
    assert decode(packed(P2P)) == Registration(
        role="P", http_address="10.0.0.1:20001", zmq_address="10.0.0.1:21001"
    )
    found = decode(packed(MORIIO | {"new_field": [1]}))
    assert found is not None
    assert (found.dp_size, found.tp_size, found.transfer_mode) == (2, 8, "READ")


@pytest.mark.parametrize(
    "change",
    [
        {"type": "HELLO"},
        {"type": None},
        {"http_address": ""},
        {"http_address": 8000},
        {"zmq_address": "a b:1"},
        {"zmq_address": "a:1\r\nx-evil: 1"},
        {"zmq_address": "ä:1"},
        {"zmq_address": "a" * 257},
        {"dp_size": 0},
        {"dp_size": 1 << 40},
        {"tp_size": "8"},
        {"transfer_mode": "PUSH"},
    ],
)
def test_what_is_no_heartbeat(change: dict[str, Any]) -> None:
    assert decode(packed(MORIIO | change)) is None


def test_missing_fields_and_other_messages() -> None:
    for name in P2P:
        assert decode(packed({key: value for key, value in P2P.items() if key != name})) is None
    others: tuple[Any, ...] = (None, [], "P", 1, {}, {"type": "P"})
    for other in others:
        assert decode(packed(other)) is None
    assert decode(packed(P2P | {"padding": "x" * MAX_BYTES})) is None
    assert decode(b"\x81" * 1000) is None


@given(st.binary(max_size=300))
def test_any_bytes_are_read_without_an_error(payload: bytes) -> None:
    found = decode(payload)
    assert found is None or found.role in ("P", "D")


_VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=300)
    | st.binary(max_size=9)
)


@given(st.dictionaries(st.sampled_from([*MORIIO, "x"]), _VALUES))
def test_an_accepted_address_can_stand_in_a_header(message: dict[str, Any]) -> None:
    found = decode(packed(MORIIO | message))
    if found is not None:
        for address in (found.http_address, found.zmq_address):
            assert 0 < len(address) <= 256
            assert address.isascii()
            assert not any(character <= " " or character == "\x7f" for character in address)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.1:8000", "10.0.0.1:8000"),
        ("Host.Example:8000/v1/completions", "host.example:8000"),
        ("http://10.0.0.1:8000/v1", "10.0.0.1:8000"),
        ("https://engine", "engine:443"),
        ("[::1]:8000", "[::1]:8000"),
        ("engine", None),
        (":8000", None),
        ("a:b:c", None),
        ("a:99999", None),
        ("[::1:8000", None),
    ],
)
def test_the_place_of_an_http_address(address: str, expected: str | None) -> None:
    assert place(address) == expected


@given(st.text(max_size=80))
def test_no_address_raises(address: str) -> None:
    found = place(address)
    assert found is None or ":" in found
