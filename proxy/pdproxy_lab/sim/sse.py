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
    ENDING = auto()
    """The finish reason without an output: of Responses, the last event."""
    DONE = auto()
    """`[DONE]`, or `message_stop`."""
    OTHER = auto()
    """Usage, errors, what opens and closes an item or a block."""


DONE = b"data: [DONE]\n\n"
_NAMED = {
    b"response.output_text.delta": Event.OUTPUT,
    b"response.completed": Event.ENDING,
    b"response.incomplete": Event.ENDING,
    b"content_block_delta": Event.OUTPUT,
    b"message_delta": Event.ENDING,
    b"message_stop": Event.DONE,
}
"""By the names of events, which the streams of Responses and Messages have."""


def events_of(data: bytes) -> list[bytes]:
    """Return the whole events in a piece of a stream; an incomplete rest counts as one."""
    parts = data.split(b"\n\n")
    found = [part + b"\n\n" for part in parts[:-1]]
    return [*found, parts[-1]] if parts[-1] else found


def classify(event: bytes) -> Event:
    """Return the kind of an event. No text in JSON can match these patterns, since its quotes are
    escaped.
    """
    if event.startswith(b"event: "):
        return _NAMED.get(event[7 : event.find(b"\n")], Event.OTHER)
    if event.startswith(b"data: [DONE]"):
        return Event.DONE
    if event.endswith((b'"type":"content-delta"}\n\n', b'"type":"message-end"}\n\n')):
        return Event.OUTPUT if b'"type":"content-delta"}\n' in event else Event.ENDING
    if b'"choices":[{' not in event:
        return Event.OTHER
    if b'"delta":{"role":' in event:
        return Event.ROLE
    return Event.FINISH if b'"finish_reason":"' in event else Event.OUTPUT
