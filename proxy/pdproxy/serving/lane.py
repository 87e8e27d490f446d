"""The lane: what takes nearly all reads of a stream past the parser and the relay's care, and on to the client.

A read in it is whole chunks of plain data, each an event that only differs from the one before in its text and ids. It is told by a
few compares with what was learned of the stream (`wire.template`), loses the ids that its client did not ask for, and goes on in
the frame it came in. Anything else, though it may be right, is left to the relay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from pdproxy.observe.events import ITL_BOUNDS
from pdproxy.upstream.connection import TakeRead
from pdproxy.wire import chunks
from pdproxy.wire.template import Template

if TYPE_CHECKING:
    from pdproxy.serving.relay import Relay

_NOTHING_YET = b"\n\n\n"
"""Stands between text and ids in no event."""
_ID_DIGITS = 9
_LESSON_EVERY = 8
"""Events. A stream whose events are all unlike each other (logprobs) is not studied in vain at each of them."""


def lane(relay: Relay, write: Callable[[bytes], None], *, takes_ids: bool) -> TakeRead:
    """Return what takes a stream's reads while `relay.plain`. `write` sends whole HTTP chunks to the client.

    One function for one event a read, and most of it calls into C: a proxy is paid for by the chunk.
    """
    heads, lines, sizes, longest = chunks.HEADS, chunks.LINES, chunks.SIZES, chunks.LONGEST
    ids, gaps, buckets, bounds, now = relay.ids, relay.gaps, relay.gaps.buckets, ITL_BOUNDS, relay.time
    prefix, middle, end = b"", _NOTHING_YET, b""
    before, between, tail, last = 0, 0, b"", b""
    lesson = 0

    def know(template: Template) -> None:
        nonlocal prefix, middle, end, before, between, tail, last
        prefix, middle, end = template.prefix, template.middle, template.end
        before, between = len(prefix), len(middle)
        last = (end if takes_ids else middle) + b"\r\n"
        tail = b"null" + last

    def take(data: bytes) -> int:
        size = len(data)
        if size >= longest:
            return several(data)
        head = heads[size]
        start = len(head)
        text = start + before
        quote = data.find(middle, text)
        if not (
            quote > 0
            and relay.plain
            and data.startswith(head)
            and data.startswith(prefix, start)
            and data.endswith(last)
            and data.find(b"\n", text) == size - 4
            and data.find(b"\r", text) == size - 2
        ):
            return several(data)
        if takes_ids:
            bracket = quote + between
            digits = data[bracket : -len(last)]
            if not digits.isdigit() or len(digits) > _ID_DIGITS:  # mostly it is one
                return several(data)
            ids.append(int(digits))
            # The payload's new size: less digits and brackets, and four for null; the two of the chunk's end don't count.
            data = lines[size - start - len(digits)] + data[start : bracket - 1] + tail
        time = now()
        gap = time - relay.last
        buckets[bisect_left(bounds, gap)] += 1
        gaps.total += gap
        relay.last = time
        relay.events += 1
        try:
            write(data)
        except RuntimeError:
            return size  # the client has just left: the notice of it is on its way
        return size

    def several(data: bytes) -> int:
        """Take the plain chunks that a read begins with. Learn from the first that is none, but not from each."""
        nonlocal lesson
        out: list[bytes] = []
        at = count = 0
        while relay.plain:
            line = data.find(b"\r\n", at, at + chunks.LONGEST_LINE)
            size = sizes.get(data[at:line]) if line > 0 else None
            if size is None or not data.startswith(b"\r\n", line + 2 + size):
                break
            start, stop = line + 2, line + 2 + size
            text, close = start + before, stop - len(end)
            quote = data.find(middle, text, stop)
            digits = data[quote + between : close] if takes_ids else b"0"
            if not (
                quote > 0
                and data.startswith(prefix, start)
                and (data.startswith(end, close) if takes_ids else quote + between == stop)
                and data.find(b"\n", text) == stop - 2
                and data.find(b"\r", text) == stop
                and digits.isdigit()
                and len(digits) <= _ID_DIGITS
            ):
                if relay.events >= lesson:
                    lesson = relay.events + _LESSON_EVERY
                    know(Template.learn(data[start:stop], takes_ids=takes_ids) or Template(prefix, middle, end))
                break
            if takes_ids:
                ids.append(int(digits))
                out += lines[size - len(digits) + 2], data[start : quote + between - 1], tail
            at = stop + 2
            count += 1
        if count:
            time = now()
            if relay.events:
                gap = time - relay.last
                buckets[bisect_left(bounds, gap)] += 1
                gaps.total += gap
                count -= 1
                relay.events += 1
            buckets[0] += count
            relay.last = time
            relay.events += count
            with suppress(RuntimeError):
                write(b"".join(out) if takes_ids else data[:at])
        return at

    return take
