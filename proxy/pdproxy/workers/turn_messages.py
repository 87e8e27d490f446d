"""What workers and the scheduler process tell each other of kept turns. Only data."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdproxy.deciding.kept_turns import Reuse
from pdproxy.transfer.kept_turn import KeptTurn, TurnRecord
from pdproxy.transfer.turns import DecodeHandle

LARGEST = 1 << 20
"""Bytes of a prompt's ids, or of a turn's ids and handle, that are sent."""
PAST_RUN = -1
"""The number of a run that is over. Others' numbers are each process's own, and are not told."""


class Kept(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """A turn has finished."""

    turn: KeptTurn


class Dropped(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """A turn is not kept. `handle`: of its KV, None if none has come."""

    record: TurnRecord
    handle: DecodeHandle | None
    reason: str


class Ended(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """What came of a turn that the worker got with a lease. `how`: the value of a `TurnEnd`, None:
    it was not taken.
    """

    lease: int
    how: str | None


class Freed(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """An engine has freed a turn's blocks. `name`: the prefill engine's id of it."""

    name: str
    reason: str


class Open(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """How many bytes the worker holds of turns whose answer or notice has not come."""

    size: int


News = Kept | Dropped | Ended | Freed | Open


class Given(msgspec.Struct, array_like=True, frozen=True):
    """A turn that the worker got with a lease."""

    lease: int
    reuse: Reuse


class TurnsHeld(msgspec.Struct, array_like=True, frozen=True):
    """What a worker tells a new scheduler process: the turns that it got, and what the one before
    may not have heard, each with its number.
    """

    given: Sequence[Given]
    told: Sequence[tuple[int, News]]
    worker: int
    open: int


class TurnLeft(msgspec.Struct, array_like=True, frozen=True):
    """What another process needs to release a turn."""

    record: TurnRecord
    handle: DecodeHandle


encode = msgspec.msgpack.Encoder().encode
decode_left = msgspec.msgpack.Decoder(TurnLeft).decode
