"""Classifies the events of a simulated engine's stream by patterns, for the moments of faults.
Pure.
"""

from __future__ import annotations

from enum import Enum, auto


class Event(Enum):
    """A kind of event."""

    ROLE = auto()
    """A chat's opening."""
    OUTPUT = auto()
    FINISH = auto()
    """The output that carries the finish reason."""
    DONE = auto()
    OTHER = auto()
    """Usage, errors."""


DONE = b"data: [DONE]\n\n"


def events_of(data: bytes) -> list[bytes]:
    """Return the whole events in a piece of a stream; an incomplete rest counts as one."""
    parts = data.split(b"\n\n")
    found = [part + b"\n\n" for part in parts[:-1]]
    return [*found, parts[-1]] if parts[-1] else found


def classify(event: bytes) -> Event:
    """Return the kind of an event. No text in JSON can match these patterns, since its quotes are
    escaped.
    """
    if event.startswith(b"data: [DONE]"):
        return Event.DONE
    if b'"choices":[{' not in event:
        return Event.OTHER
    if b'"delta":{"role":' in event:
        return Event.ROLE
    return Event.FINISH if b'"finish_reason":"' in event else Event.OUTPUT
