"""Cuts reads into whole events; the rest waits in a leg's share of the answer budget. And the
creation time of merged streams.
"""

from __future__ import annotations

from pdproxy.upstream.answer_budget import BudgetShare
from pdproxy.wire import sse

MAX_EVENT = 16 << 20
"""Bytes of a stream that are held: an event that is not whole, and what comes before the first
data. The ids of a prompt of a million tokens take half of it. An event of this size holds up the
event loop for 0.1 s.
"""


def limit_to_events(share: BudgetShare) -> None:
    """Set the limit of an empty share to that of a stream."""
    share.set_limit(MAX_EVENT, "the engine sent an event")


def whole_events(share: BudgetShare, read: bytes) -> bytes:
    """Return the events that are whole with this read, b"" if none is. The share keeps the rest.

    Raises:
        AnswerTooLargeError: the rest is too large.
    """
    if share.kept:
        if not sse.has_end(read) and not (read.startswith(b"\n") and share.ends_with(b"\n")):
            # not searched again before its event is whole: each byte of it is copied once
            share.add(read)
            return b""
        read = share.take(read)
    if read.endswith(sse.END):
        return read
    size = sse.whole_size(read)
    share.add(read[size:])
    return read[:size]


class CreationTime:
    """The time of creation that all streams of one list show to their client: that of the first
    event that was sent.
    """

    def __init__(self) -> None:
        self._created: bytes | None = None

    @property
    def created(self) -> bytes | None:
        """The time as JSON, None before the first event."""
        return self._created

    def put_into(self, event: bytes) -> bytes:
        """Return an event of any of the streams with the common time."""
        created = sse.created_of(event)
        if self._created is None:
            self._created = created
        elif self._created != created:
            event = sse.with_created(event, self._created)
        return event
