"""The header `traceparent`, by which a trace goes on in the next service (W3C Trace Context,
https://www.w3.org/TR/trace-context-2/).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
SAMPLED, RANDOM = 0x01, 0x02
"""The flags that are known: whether the sender records the trace, and whether the trace's id is
random.
"""
_FIELDS = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-[^\0]*)?"
)


class TraceParent(msgspec.Struct, frozen=True):
    """Where a trace goes on: ids in lower-case hex digits, and the flags."""

    trace_id: str
    span_id: str
    flags: int

    @property
    def is_sampled(self) -> bool:
        """Whether the sender records the trace."""
        return bool(self.flags & SAMPLED)


def read_traceparent(lines: Iterable[tuple[bytes, bytes]]) -> TraceParent | None:
    """Return what a request's header lines say. None: there is no such header, there are several,
    or it is not valid.
    """
    values = [value for name, value in lines if name == TRACEPARENT]
    if len(values) != 1 or (found := _FIELDS.fullmatch(values[0])) is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == b"00" and rest is not None:
        return None
    return TraceParent(trace_id.decode(), span_id.decode(), int(flags, 16) & (SAMPLED | RANDOM))
