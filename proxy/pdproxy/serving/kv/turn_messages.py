"""What workers tell each other of the turns that they keep, and what one leaves of them that is
killed. Only data.
"""

from __future__ import annotations

import msgspec

from pdproxy.serving.kv.kept_turns import TurnRecord
from pdproxy.transfer.turns import DecodeHandle

_TURN = b"turn"
"""Begins the records that are left of kept turns: no record of a handle does, which are arrays of
MessagePack.
"""


class KeptMessage(msgspec.Struct, array_like=True, frozen=True, tag="kept"):
    """A worker keeps a turn. Numbers of engines' runs are its own, times those of the machine's
    monotonic clock.
    """

    worker: int
    number: int
    record: TurnRecord
    handle: DecodeHandle
    key: bytes
    known: int
    received: float


class Gone(msgspec.Struct, array_like=True, frozen=True, tag="gone"):
    """It keeps it no longer."""

    worker: int
    number: int


class Claim(msgspec.Struct, array_like=True, frozen=True, tag="claim"):
    """A worker wants one. `claim`: its number of the question."""

    worker: int
    claim: int
    number: int


class ClaimAnswer(msgspec.Struct, array_like=True, frozen=True, tag="answer"):
    """Whether it is given: then it is the asker's to use or to release."""

    claim: int
    given: bool


class Began(msgspec.Struct, array_like=True, frozen=True, tag="began"):
    """A worker has started: it keeps nothing, and knows nothing."""

    worker: int


class Hung(msgspec.Struct, array_like=True, frozen=True, tag="hung"):
    """A prefill engine has not answered a prompt with such KV."""

    worker: int
    prefill: str


class TurnLeft(msgspec.Struct, array_like=True, frozen=True):
    """What another worker needs to release a turn. `pool`: the number of its pool."""

    pool: int
    record: TurnRecord
    handle: DecodeHandle


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(KeptMessage | Gone | Claim | ClaimAnswer | Began | Hung).decode
_decode_left = msgspec.msgpack.Decoder(TurnLeft).decode


def record_of(left: TurnLeft) -> bytes:
    """Return the record of a turn that is kept."""
    return _TURN + encode(left)


def left_in(record: bytes) -> TurnLeft:
    """Return what such a record says."""
    return _decode_left(record[len(_TURN) :])


def is_turn(record: bytes) -> bool:
    """Return whether what a worker has left is of a kept turn."""
    return record.startswith(_TURN)
