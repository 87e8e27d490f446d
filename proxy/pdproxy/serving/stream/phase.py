"""How far an answer is that is relayed. See `stream.relay`."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """A phase of an answer."""

    HOLDING = "holding"
    PROVEN = "proven"
    FLOWING = "flowing"
    ENDED = "ended"


class StreamStarted:
    """The answer is a stream, and its first real data has come."""


STREAM_STARTED = StreamStarted()
