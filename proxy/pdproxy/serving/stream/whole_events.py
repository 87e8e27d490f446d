"""Whole events out of reads: what is not whole waits in a leg's share of the room. And what the streams of one list share."""

from __future__ import annotations

from pdproxy.kit.errors import EngineError
from pdproxy.upstream.answer_budget import BudgetShare
from pdproxy.wire import sse

MAX_EVENT = 16 << 20
"""Bytes of a stream that are held: an event that is not whole, and what comes before the first data. The ids of a prompt of
a million tokens take half of it. An event of this size holds up the event loop for 0.1 s."""


def for_events(share: BudgetShare) -> None:
    """Make an empty share of a whole answer one of a stream."""
    share.limit(MAX_EVENT, "the engine sent an event")


def whole_events(share: BudgetShare, read: bytes) -> bytes:
    """Return the events that are whole with this read, b"" if none is; the rest is kept in the share.

    Raises:
        EngineError: the rest is too large.
    """
    if share.kept:
        if read.find(sse.END) < 0 and not (read.startswith(b"\n") and share.ends_with(b"\n")):
            share.add(read)  # not looked at again before its event is whole: each byte of it is copied once
            return b""
        read = share.taken() + read
    if read.endswith(sse.END):
        return read
    cut = read.rfind(sse.END) + len(sse.END)
    if cut < len(sse.END):
        share.add(read)
        return b""
    share.add(read[cut:])
    return read[:cut]


def crumbs() -> EngineError:
    """Return the error for a batch that `sse.is_crumbs`."""
    return EngineError("the engine sent many lines with next to nothing in them")


class Parts:
    """What is the same in the streams of one list: the time of creation of the first event that went out."""

    def __init__(self) -> None:
        self._created: bytes | None = None

    @property
    def created(self) -> bytes | None:
        """The time as JSON, None before the first event."""
        return self._created

    def joined(self, event: bytes) -> bytes:
        """Return an event of any of the streams with the time that all have."""
        created = sse.created_of(event)
        if self._created is None:
            self._created = created
        elif self._created != created:
            event = sse.with_created(event, self._created)
        return event
