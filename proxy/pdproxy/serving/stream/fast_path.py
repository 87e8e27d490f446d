"""The lane: what takes nearly all reads of a stream past the parser and the relay's care, and on to the client.

A read in it is whole chunks of plain data, each an event of the form that was learned of the stream (`wire.event_template`).
It is told by a few compares, loses the ids that its client did not ask for, and goes on. Anything else, though it may be right,
is left to the relay.

What a chunk costs is mostly what of it is not in the processor's caches: other streams, and other processes, had their turn since
the one before. So what every chunk of a stream needs stands together in one object, and all that can be is shared by streams.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress

from pdproxy.observe.events import ITL_BOUNDS
from pdproxy.wire import tokens
from pdproxy.wire.chunks import LINES, LONGEST_LINE, SIZES
from pdproxy.wire.event_template import guess, learn

_MANY = 32
"""Ids that are kept as they came before they are made numbers together, which costs less than one by one."""
_LESSON_EVERY = 8
"""Events. A stream whose events are all unlike each other (logprobs) is not studied in vain at each of them."""


class FastPath:
    """One stream's counts, and the way past its relay while `plain`: it flows, and nothing of it is kept back.

    `events` that went on, `last` when (the clock's time, s), `buckets` and `total` as in `Gaps`.
    """

    __slots__ = (
        "_fresh",
        "_ids",
        "_lesson",
        "_more",
        "_template",
        "_time",
        "_write",
        "buckets",
        "events",
        "last",
        "plain",
        "takes_ids",
        "total",
    )

    def __init__(self, time: Callable[[], float], *, takes_ids: bool) -> None:
        self.plain = False
        self.events = 0
        self.last = time()
        self.total = 0.0
        self.buckets = [0] * (len(ITL_BOUNDS) + 1)
        self._ids = tokens.new()
        self._fresh: list[bytes] = []  # of chunks that were told by `_template`: ids and its `last`
        self._more = 0  # ids beyond those that are kept
        self.takes_ids = takes_ids
        self._template = guess(takes_ids=takes_ids)
        self._lesson = 0
        self._time = time
        self._write: Callable[[bytes], None] = _nowhere

    def __repr__(self) -> str:
        return f"<FastPath {'plain' if self.plain else 'closed'}, {self.events} events>"

    @property
    def ids(self) -> array[int]:
        """The token ids that were taken, as many as are kept."""
        if self._fresh:
            self._convert()
        return self._ids

    @property
    def tokens(self) -> int:
        """How many token ids were taken."""
        return len(self.ids) + self._more

    def keep(self, listed: bytes) -> None:
        """Take ids, with commas between them, that did not pass here."""
        if self._fresh:
            self._convert()  # which came before
        self._more += tokens.keep(listed, self._ids)

    def open(self, write: Callable[[bytes], None]) -> None:
        """From now on `take` passes reads on. `write` sends whole HTTP chunks to the client."""
        self._write = write

    def count(self, events: int, now: float) -> None:
        """Count events that go on together."""
        if events <= 0:
            return
        if self.events:
            gap = now - self.last
            self.buckets[bisect_left(ITL_BOUNDS, gap)] += 1
            self.total += gap
        self.buckets[0] += events - 1
        self.events += events
        self.last = now

    def take(self, data: bytes) -> int:
        """Pass on the plain chunks that a read begins with, return their bytes. Most reads are one chunk with one event."""
        size = len(data)
        template = self._template
        opening = template.openings.get(size)
        if opening is None or not data.startswith(opening) or not data.endswith(template.last) or not self.plain:
            return self._several(data)
        if template.takes_ids:
            front, _, back = data.rpartition(b"[")
            body = front[len(opening) - template.width :]
            ids = len(back) - len(template.last)
            if (
                not front.endswith(template.before_ids)
                or not 0 < ids <= tokens.DIGITS
                or body.find(b"\n") >= 0
                or body.find(b"\r") >= 0
            ):
                return self._several(data)
            self._fresh.append(back)
            if len(self._fresh) >= _MANY:
                self._convert()
            # The payload: its chunk's two last bytes don't count; null is two longer than its brackets.
            data = b"".join((LINES[len(body) + len(template.tail) - 2], body, template.tail))
        elif data.find(b"\n", len(opening)) != size - 4 or data.find(b"\r", len(opening)) != size - 2:
            return self._several(data)
        now = self._time()
        gap = now - self.last
        self.last = now
        self.total += gap
        self.buckets[bisect_left(ITL_BOUNDS, gap)] += 1
        self.events += 1
        try:
            self._write(data)
        except RuntimeError:
            return size  # the client has just left: the notice of it is on its way
        return size

    def _several(self, data: bytes, *, learns: bool = True) -> int:
        """Take the plain chunks that a read begins with. Learn from the first that is none, but not from each."""
        if not self.plain:
            return 0
        template = self._template
        last, takes_ids = template.last, template.takes_ids
        ids: list[bytes] = []
        out: list[bytes] = []
        at = count = 0
        for part in data.split(last):
            size = len(part) + len(last)
            opening = template.openings.get(size) or template.opened(size)
            if at + size > len(data) or opening is None or not part.startswith(opening):
                break
            if takes_ids:
                front, _, digits = part.rpartition(b"[")
                body = front[len(opening) - template.width :]
                if not front.endswith(template.before_ids) or len(digits) > tokens.DIGITS or _has_line_end(body, 0):
                    break
                if digits:  # a text may come without any
                    ids.append(digits)
                out += LINES[len(body) + len(template.tail) - 2], body, template.tail
            elif _has_line_end(part, len(opening)):
                break
            at += size
            count += 1
        if count:
            if ids:
                self._fresh.append(last.join(ids) + last)
                if len(self._fresh) >= _MANY:
                    self._convert()
            self.count(count, self._time())
            with suppress(RuntimeError):
                self._write(b"".join(out) if takes_ids else data[:at])
        if learns and at < len(data) and self.events >= self._lesson and self._learned(data, at):
            at += self._several(data[at:], learns=False)
        return at

    def _learned(self, data: bytes, at: int) -> bool:
        line = data.find(b"\r\n", at, at + LONGEST_LINE)
        size = SIZES.get(data[at:line]) if line > 0 else None
        if size is None or not data.startswith(b"\r\n", line + 2 + size):
            return False
        self._lesson = self.events + _LESSON_EVERY
        found = learn(data[line + 2 : line + 2 + size], takes_ids=self.takes_ids)
        if found is None or found is self._template:
            return False
        if self._fresh:
            self._convert()
        self._template = found
        return True

    def _convert(self) -> None:
        last = self._template.last
        listed = b"".join(self._fresh).replace(last, b",").rstrip(b",")
        self._fresh.clear()
        self._more += tokens.keep(listed, self._ids)


def _has_line_end(part: bytes, start: int) -> bool:
    """Tell whether clients would read more than one event, or another one, in what is to be one."""
    return part.find(b"\n", start) >= 0 or part.find(b"\r", start) >= 0


def _nowhere(data: bytes) -> None:
    raise RuntimeError("a lane that was not opened")
