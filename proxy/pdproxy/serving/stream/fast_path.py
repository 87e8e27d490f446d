"""The fast path: it forwards nearly all reads of a stream to the client, past the HTTP parser and
the relay.

Such a read consists of whole chunks of plain data. Each chunk is an event of the form that was
learned from the stream (`wire.event_template`), and a few comparisons recognize it. The fast path
removes the ids that the client did not ask for, and forwards the rest. It leaves everything else to
the relay.

Most of the time per chunk goes to data that is not in the processor's caches, because other streams
and processes ran since the last chunk. So one object holds everything that a stream needs per
chunk, and streams share as much as they can.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from pdproxy.observe.events import ITL_BOUNDS
from pdproxy.wire import tokens, tool_calls
from pdproxy.wire.chunks import MAX_SIZE_LINE, PAYLOAD_SIZE, SIZE_LINE_OF_PAYLOAD
from pdproxy.wire.event_template import EventTemplate
from pdproxy.wire.sse import END

_MAX_UNPARSED = 32
"""Lists of ids that are kept as bytes before they are parsed together, which costs less than one by
one.
"""
_LEARN_INTERVAL = 8
"""Events between two attempts to learn, for streams whose events all differ (logprobs)."""

_DATA = b"data: {"
_PARAMS = b'_params":'
"""In front of a text: the field of a KV handle, perhaps, which no client may see
(`wire.inside`).
"""
_LF, _CR = b"\n\r"

MAX_SENT = 64 << 10
"""Bytes of the last event that a stream keeps, so that another engine can go on behind it. One of a
token has some hundreds.
"""


class Templates(Protocol):
    """The forms of plain events: `event_template.EventTemplates`, or those of named events."""

    def latest(self, *, takes_ids: bool) -> EventTemplate:
        """Return the form that a new stream begins with."""

    def learn(self, event: bytes, *, takes_ids: bool) -> EventTemplate | None:
        """Return the form of an event, None unless the event is plain."""


class FastPath:
    """The counts of one stream, and the way of its events past the relay.

    `enabled`: whether events go past the relay. The stream flows then, and the relay holds back
    nothing. `events`: the number of events that were forwarded. `last`: when the last event was
    forwarded, in seconds of the clock. `buckets`, `total`: as in `Gaps`. `templates`: the event
    templates of all streams. `takes_ids`: whether token ids are removed from the events and kept.
    `shows_ids`: whether token ids are kept, and also stay in the events for the client; then each
    event goes through the relay.
    `sent`: where token ids are kept, the last event of data with its ids, perhaps framed as a
    chunk; b"" before the first event of data, and behind an event of more than `MAX_SENT` bytes.
    `several`: pairs of numbers, one pair for each event that had several ids: the place of its
    first id in `ids`, and how many. `calls`: the ids of the stream's tool calls, None if the ids
    are not known.
    """

    __slots__ = (
        "_ids",
        "_learn_at",
        "_not_kept",
        "_template",
        "_templates",
        "_time",
        "_unparsed",
        "_write",
        "buckets",
        "calls",
        "enabled",
        "events",
        "keeps_ids",
        "last",
        "sent",
        "several",
        "takes_ids",
        "total",
    )

    def __init__(
        self,
        time: Callable[[], float],
        templates: Templates,
        *,
        takes_ids: bool,
        shows_ids: bool = False,
    ) -> None:
        self.enabled = False
        self.events = 0
        self.last = time()
        self.total = 0.0
        self.buckets = [0] * (len(ITL_BOUNDS) + 1)
        self._ids = tokens.new()
        self._unparsed: list[bytes] = []  # of chunks that matched `_template`: ids and its `last`
        self._not_kept = 0  # ids that were counted only
        self.takes_ids = takes_ids
        self.keeps_ids = takes_ids or shows_ids
        self.sent = b""
        self.several = tokens.new()
        self.calls: list[str] | None = []
        self._templates = templates
        self._template = templates.latest(takes_ids=takes_ids)
        self._learn_at = 0  # `events` from which on the next attempt is allowed
        self._time = time
        self._write: Callable[[bytes], None] = _no_writer

    def __repr__(self) -> str:
        return f"<FastPath {'enabled' if self.enabled else 'disabled'}, {self.events} events>"

    @property
    def ids(self) -> array[int]:
        """The token ids that were removed from events and kept."""
        if self._unparsed:
            self._parse_ids()
        return self._ids

    @property
    def tokens(self) -> int:
        """How many token ids were removed from events."""
        return len(self.ids) + self._not_kept

    def keep_ids(self, lists: Sequence[bytes]) -> None:
        """Keep the lists of ids, with commas between these, of events that the relay forwards."""
        if self._unparsed:
            self._parse_ids()  # those came earlier
        before = len(self._ids)
        self._not_kept += tokens.keep(b",".join(lists), self._ids)
        self._note_several(before, lists)

    def _note_several(self, at: int, lists: Sequence[bytes]) -> None:
        """Keep how many ids each event had, if that is not one. `at`: ids before them."""
        if len(self._ids) - at in (len(lists), 0):
            return  # one each, or no more are kept
        for listed in lists:
            if count := listed.count(b","):
                self.several.extend((at, count + 1))
            at += count + 1

    def _keep_calls(self, batch: bytes) -> None:
        found = tool_calls.ids_in(batch)
        if (
            found is None
            or self.calls is None
            or len(self.calls) + len(found) > tool_calls.MAX_CALLS
        ):
            self.calls = None
        else:
            self.calls += found

    def show_ids(self) -> None:
        """Keep the ids, and leave them in the events. Call it before the stream begins."""
        self.takes_ids, self.keeps_ids = False, True

    def written(self, batch: bytes) -> bytes:
        """Keep the ids of whole events that the relay forwards. Return what the client gets of
        them.

        If it has not asked for ids: the events without them, and without those that were sent only
        for their ids.
        """
        at = batch.rfind(END, 0, -len(END))
        last = batch if at < 0 else batch[at + len(END) :]
        if last.startswith(_DATA):
            self.sent = last if len(last) <= MAX_SENT else b""
        elif (at := batch.rfind(END + _DATA)) >= 0 or batch.startswith(_DATA):
            # a comment is behind it
            start = at + len(END) if at >= 0 else 0
            end = batch.find(END, start) + len(END)
            self.sent = batch[start:end] if end - start <= MAX_SENT else b""
        rest, listed = tokens.taken(batch)
        if listed:
            self.keep_ids(listed)
            if tool_calls.MARK in batch:
                self._keep_calls(batch)
        if not self.takes_ids:
            return batch
        return tokens.without_withheld(rest) if tokens.WITHHELD in rest else rest

    def write_to(self, write: Callable[[bytes], None]) -> None:
        """Have `forward` send whole HTTP chunks to the client by `write`. Call it before
        `forward`.
        """
        self._write = write

    def count(self, events: int, now: float) -> None:
        """Count events that are forwarded together."""
        if events <= 0:
            return
        if self.events:
            gap = now - self.last
            self.buckets[bisect_left(ITL_BOUNDS, gap)] += 1
            self.total += gap
        self.buckets[0] += events - 1
        self.events += events
        self.last = now

    def forward(self, data: bytes) -> int:
        """Forward the plain chunks at the beginning of a read, return their bytes. Most reads are
        one chunk with one event.
        """
        size = len(data)
        template = self._template
        opening = template.openings.get(size)
        if (
            opening is None
            or not data.startswith(opening)
            or not data.endswith(template.last)
            or not self.enabled
        ):
            return self._forward_several(data)
        if template.takes_ids:
            front, _, back = data.rpartition(b"[")
            body = front[len(opening) - template.opening_size :]
            ids = len(back) - len(template.last)
            if (
                not front.endswith(template.before_ids)
                or not 0 < ids <= tokens.DIGITS
                or _LF in body
                or _CR in body
                or body.find(_PARAMS) >= 0
            ):
                return self._forward_several(data)
            self._unparsed.append(back)
            if len(self._unparsed) >= _MAX_UNPARSED:
                self._parse_ids()
            self.sent = data
            # The payload is without the chunk's last two bytes, and `null` is two bytes longer than
            # the brackets.
            data = b"".join(
                (SIZE_LINE_OF_PAYLOAD[len(body) + len(template.tail) - 2], body, template.tail)
            )
        else:
            body = data[len(opening) : -len(template.last)]
            if _LF in body or _CR in body or body.find(_PARAMS) >= 0:
                return self._forward_several(data)
        now = self._time()
        gap = now - self.last
        self.last = now
        self.total += gap
        self.buckets[bisect_left(ITL_BOUNDS, gap)] += 1
        self.events += 1
        try:
            self._write(data)
        except RuntimeError:
            return size  # the client has just left, and the relay is informed soon
        return size

    def _forward_several(self, data: bytes, *, learns: bool = True) -> int:
        """Forward the plain chunks at the beginning of a read. Learn from the first other chunk, if
        an attempt is allowed.
        """
        if not self.enabled:
            return 0
        template = self._template
        last, takes_ids = template.last, template.takes_ids
        ids: list[bytes] = []
        out: list[bytes] = []
        at = count = size_of_last = 0
        for part in data.split(last):
            size = len(part) + len(last)
            opening = template.openings.get(size) or template.chunk_opening(size)
            if at + size > len(data) or opening is None or not part.startswith(opening):
                break
            if takes_ids:
                front, _, digits = part.rpartition(b"[")
                body = front[len(opening) - template.opening_size :]
                if (
                    not front.endswith(template.before_ids)
                    or len(digits) > tokens.DIGITS
                    or _is_odd(body, 0)
                ):
                    break
                if digits:  # an event may have a text and no ids
                    ids.append(digits)
                out += SIZE_LINE_OF_PAYLOAD[len(body) + len(template.tail) - 2], body, template.tail
            elif _is_odd(part, len(opening)):
                break
            at += size
            size_of_last = size
            count += 1
        if count:
            if ids:
                self._unparsed.append(last.join(ids) + last)
                if len(self._unparsed) >= _MAX_UNPARSED:
                    self._parse_ids()
            self.count(count, self._time())
            if takes_ids:
                self.sent = data[at - size_of_last : at]
            with suppress(RuntimeError):
                self._write(b"".join(out) if takes_ids else data[:at])
        if learns and at < len(data) and self.events >= self._learn_at and self._learned(data, at):
            at += self._forward_several(data[at:], learns=False)
        return at

    def _learned(self, data: bytes, at: int) -> bool:
        """Learn from the chunk at `at`. Return whether there is another template now."""
        line = data.find(b"\r\n", at, at + MAX_SIZE_LINE)
        size = PAYLOAD_SIZE.get(data[at:line]) if line > 0 else None
        if size is None or not data.startswith(b"\r\n", line + 2 + size):
            return False
        self._learn_at = self.events + _LEARN_INTERVAL
        found = self._templates.learn(data[line + 2 : line + 2 + size], takes_ids=self.takes_ids)
        if found is None or found is self._template:
            return False
        if self._unparsed:
            self._parse_ids()
        self._template = found
        return True

    def _parse_ids(self) -> None:
        last = self._template.last
        joined = b"".join(self._unparsed)
        self._unparsed.clear()
        before = len(self._ids)
        self._not_kept += tokens.keep(joined.replace(last, b",").rstrip(b","), self._ids)
        if len(self._ids) - before != joined.count(last):
            self._note_several(before, joined.split(last)[:-1])


def _is_odd(part: bytes, start: int) -> bool:
    """Return whether clients would find several events, or another event, where one is expected, or
    perhaps a KV handle.
    """
    return (
        part.find(b"\n", start) >= 0
        or part.find(b"\r", start) >= 0
        or part.find(_PARAMS, start) >= 0
    )


def _no_writer(data: bytes) -> None:
    raise RuntimeError("a fast path without a writer")
