"""Comments in a stream that sends nothing for a while, so that nobody on the way takes its silence
for its end.

Load balancers and clients close connections that are silent for a minute. A comment (`: ...`) is no
event: clients skip it.
"""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.kit.clock import Clock, Timer
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.upstream.connection import Headers

COMMENT = b": the engine is at work\n\n"


def write_comment(writer: ResponseWriter, headers: Headers, comment: bytes) -> None:
    """Write a comment. The first bytes of an answer send its status and `headers`: what fails
    behind it is an event.
    """
    if not writer.begun:
        writer.begin(headers)
    if not writer.paused:
        writer.write(comment)


class Comments:
    """Has `comment` called for each `seconds` in which `sent` stays the same: after twice that time
    of silence at most.

    `sent` returns a number that changes with each event. Runs from its making until it is stopped;
    0 seconds: never.
    """

    __slots__ = ("_clock", "_comment", "_seconds", "_sent", "_sent_before", "_timer")

    def __init__(
        self,
        clock: Clock,
        seconds: float,
        sent: Callable[[], int],
        comment: Callable[[bytes], None],
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._sent = sent
        self._sent_before = 0
        self._comment = comment
        self._timer: Timer | None = clock.after(seconds, self._tick) if seconds else None

    def __repr__(self) -> str:
        return f"<Comments each {self._seconds:g} s>"

    def stop(self) -> None:
        """Send no more. Stopping again changes nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        sent = self._sent()
        self._timer = self._clock.after(self._seconds, self._tick)
        if sent == self._sent_before:
            self._comment(COMMENT)
        self._sent_before = sent
