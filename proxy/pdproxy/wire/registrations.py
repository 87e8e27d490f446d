"""Heartbeats by which engines register: where the clients and the other engines of an engine reach
it.

Owns the reading of vLLM's format, one msgpack map: `{"type": "P" | "D", "http_address",
"zmq_address"}`, to which MoRIIO adds `dp_size`, `tp_size` and `transfer_mode`. Source: vLLM 0.23
`p2p_nccl_engine.py`, vLLM 0.32.0 `moriio_connector.py`. Anybody who reaches the port can send any
bytes: everything else is not a heartbeat, and nothing here raises.
"""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from pdproxy.kit.addresses import usual_host
from pdproxy.wire.engine import UNREADABLE

MAX_BYTES = 4096
"""A longer message is no heartbeat. A real one has some 150 bytes."""

Address = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$")]
Size = Annotated[int, msgspec.Meta(ge=1, le=4096)]


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """One heartbeat. Unknown fields are ignored, and fields that its sender doesn't send are None.

    - `role`: "P" makes KV, "D" takes it.
    - `http_address`: where the engine's API listens, `host:port`, as the engine wrote it.
    - `zmq_address`: where other engines reach it, in its connector's form.
    - `dp_size`, `tp_size`: its data-parallel and tensor-parallel sizes.
    - `transfer_mode`: which side moves the KV.
    """

    role: Literal["P", "D"] = msgspec.field(name="type")
    http_address: Address
    zmq_address: Address
    dp_size: Size | None = None
    tp_size: Size | None = None
    transfer_mode: Literal["READ", "WRITE"] | None = None


_decoder = msgspec.msgpack.Decoder(Registration)


def decode(payload: bytes) -> Registration | None:
    """Read one message; None if it is not a heartbeat."""
    if len(payload) > MAX_BYTES:
        return None
    try:
        return _decoder.decode(payload)
    except UNREADABLE:
        return None


def place(address: str) -> str | None:
    """Return `host:port` of an HTTP address in its normal spelling, None if it names no place.

    A scheme, a path behind the port, and capital letters make no difference: some senders register
    a whole URL.
    """
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        host, port = usual_host(parts.hostname or ""), parts.port
    except ValueError:
        return None
    if (
        not host
        or (port is None and "://" not in address)
        or parts.netloc.partition("]")[2].partition(":")[0]
    ):
        return None
    if port is None:
        port = 443 if parts.scheme == "https" else 80
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
