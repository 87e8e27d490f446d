"""Traces of requests: what is noted of each while it is served, and which are exported.

Owns the notes, their bound, and the choice of traces. A trace is in the context of the task that
serves its request, where legs and observers find it. Ids of spans are made when legs are sent,
since engines get them; the spans themselves are made after the request's end, from times in seconds
of the proxy's clock (`observe.spans`). A process that exports no traces has none of this.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar

import msgspec

from pdproxy.kit.errors import Fault
from pdproxy.kit.text import MAX_LENGTH, truncate
from pdproxy.observe.events import (
    Event,
    KvWaited,
    LegFailed,
    RequestEnded,
    StreamContinued,
    Tokenized,
)
from pdproxy.observe.trace_context import (
    SAMPLED,
    TRACEPARENT,
    TRACESTATE,
    TraceParent,
    read_traceparent,
)

MAX_SPANS = 128
"""Spans of one request that are noted: a list of prompts may have thousands of legs."""
MAX_PROMPTS = 16
"""Prompts of one request whose times are exported."""
ERRORS = frozenset((Fault.ENGINE.value, Fault.CAPACITY.value, Fault.OURS.value))
"""Outcomes whose traces are always exported. What is wrong with a request is no failure of the
service, and its sender could fill the queue with it.
"""
_IDS = 1 << 64
_random = random.Random()
os.register_at_fork(after_in_child=_random.seed)  # else two workers would make the same ids
_draw = _random.getrandbits

Lines = tuple[tuple[bytes, bytes], ...]


class NotedSpan(msgspec.Struct, array_like=True, gc=False):
    """A part of a request: `begin` and `end` in seconds of the clock; `end` None: it was not over
    at the request's end.

    `name`: a leg's phase, as of `LegFailed`, or what was waited for. `node`: the engine's URL.
    `error`: why it failed. `values`: attributes, by their names.
    """

    span_id: str
    name: str
    begin: float
    end: float | None = None
    node: str | None = None
    error: str | None = None
    values: dict[str, str | int | float] | None = None


class EndedTrace(msgspec.Struct, array_like=True, gc=False):
    """What spans are made of. `parent_id`: the client's span, None if it has sent none. `unix`: the
    Unix time in seconds at `began`, which is of the clock.

    `left_out`: how many spans were more than `MAX_SPANS`.
    """

    trace_id: str
    span_id: str
    parent_id: str | None
    flags: int
    unix: float
    began: float
    spans: list[NotedSpan]
    left_out: int
    event: RequestEnded


class Trace:
    """The trace of one request, until the request's end. `parent`: where it goes on, None if it
    begins here; `ratio`: the share of those that begin here and are sampled.
    """

    __slots__ = (
        "began",
        "flags",
        "has_failed",
        "is_over",
        "left_out",
        "parent_id",
        "span_id",
        "spans",
        "trace_id",
        "unix",
    )

    def __init__(self, parent: TraceParent | None, ratio: float, began: float) -> None:
        number = _draw(192)
        ids = number.to_bytes(24).hex()  # a format costs ten times as much
        self.span_id = ids[:16]
        self.parent_id: str | None = None
        """The client's span, None if it has sent none."""
        if parent is None:
            self.trace_id = ids[16:]
            # As OpenTelemetry's samplers: all services choose the same traces.
            self.flags = SAMPLED if number % _IDS < ratio * _IDS else 0
        else:
            self.trace_id, self.flags = parent.trace_id, parent.flags
            self.parent_id = parent.span_id
        self.unix = time.time()
        self.began = began
        self.spans: list[NotedSpan] = []
        self.left_out = 0
        self.has_failed = False
        """Whether a leg has failed, also if the request was served then."""
        self.is_over = False

    def note(
        self,
        name: str,
        begin: float,
        end: float | None,
        node: str | None,
        values: dict[str, str | int | float] | None = None,
    ) -> NotedSpan:
        """Note a part of the request. The arguments are those of `NotedSpan`."""
        span = NotedSpan(_draw(64).to_bytes(8).hex(), name, begin, end, node, None, values)
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)
        else:
            self.left_out += 1
        return span

    def failed(self, event: LegFailed) -> None:
        """Note why a leg has failed: its span is the last one of that engine and phase."""
        self.has_failed = True
        for span in reversed(self.spans):
            if span.node == event.node and span.name == event.phase:
                span.error = span.error or truncate(event.error)
                return

    def ended(self, event: RequestEnded) -> EndedTrace:
        """Return what spans are made of."""
        if len(event.legs) > MAX_PROMPTS:
            event = msgspec.structs.replace(event, legs=event.legs[:MAX_PROMPTS])
        model, error = event.model or "", event.error or ""
        if len(model) > MAX_LENGTH or len(error) > MAX_LENGTH:
            event = msgspec.structs.replace(event, model=truncate(model), error=truncate(error))
        return EndedTrace(
            self.trace_id,
            self.span_id,
            self.parent_id,
            self.flags,
            self.unix,
            self.began,
            self.spans,
            self.left_out,
            event,
        )


TRACE: ContextVar[Trace | None] = ContextVar("trace", default=None)
"""The trace of the request that the running task serves."""
LEG: ContextVar[NotedSpan | None] = ContextVar("leg", default=None)
"""The last leg that the running task has worked for, None before there was one."""


def begin_trace(forward: Lines, ratio: float, now: float) -> Lines:
    """Begin the trace of the request that the running task serves. Return the client's header lines
    that go on to engines as they are: each leg has a `traceparent` of its own.

    `forward`: the client's. `ratio`: as of `Trace`. A `tracestate` belongs to a valid
    `traceparent`, and is dropped without one.
    """
    if not forward:
        TRACE.set(Trace(None, ratio, now))
        return forward
    parent = read_traceparent(forward)
    TRACE.set(Trace(parent, ratio, now))
    dropped = (TRACEPARENT,) if parent is not None else (TRACEPARENT, TRACESTATE)
    return tuple([line for line in forward if line[0] not in dropped])


def leg_lines(lines: Lines) -> Lines:
    """Return the header lines of a request to an engine, with the leg's own span as the parent of
    what the engine does, if a leg is under way.
    """
    trace, leg = TRACE.get(), LEG.get()
    if trace is None or leg is None or leg.end is not None:
        return lines
    # the known flags are one digit
    value = f"00-{trace.trace_id}-{leg.span_id}-0{trace.flags}".encode()
    return (*lines, (TRACEPARENT, value))


def begin_leg(phase: str, node: str, since: float) -> NotedSpan | None:
    """Note a leg of the running task's request, which begins. None: the task serves no request, or
    the request is over.
    """
    trace = TRACE.get()
    if trace is None or trace.is_over:
        return None
    leg = trace.note(phase, since, None, node)
    LEG.set(leg)
    return leg


def trace_ids() -> tuple[str | None, str | None]:
    """Return the ids of the trace and of the span of the request that the running task serves, for
    log lines.
    """
    trace = TRACE.get()
    return (None, None) if trace is None else (trace.trace_id, trace.span_id)


class TraceObserver:
    """Notes events of requests in their traces, and passes traces that are to be exported on to
    `take`, encoded.

    `slow`: seconds from which on a request is always exported; 0: it does not matter how long
    requests take. `now`: the clock's seconds.
    """

    only = (RequestEnded, LegFailed, Tokenized, KvWaited, StreamContinued)

    def __init__(
        self, slow: float, now: Callable[[], float], take: Callable[[bytes], None]
    ) -> None:
        self._slow = slow
        self._now = now
        self._take = take
        self._encoder = msgspec.msgpack.Encoder()

    def notify(self, event: Event) -> None:
        """Note an event."""
        trace = TRACE.get()
        if trace is None or trace.is_over:
            return
        match event:
            case RequestEnded():
                trace.is_over = True
                if trace.flags & SAMPLED or self._is_exported(trace, event):
                    self._take(self._encoder.encode(trace.ended(event)))
                trace.spans = []  # connections that the request has opened keep its context
            case LegFailed():
                trace.failed(event)
            case Tokenized(source, result, seconds, tokens):
                self._waited(
                    trace, "tokenize", seconds, {"source": source, "result": result}, tokens=tokens
                )
            case KvWaited(node, result, seconds):
                self._waited(trace, "kv_wait", seconds, {"result": result}, node=node)
            case StreamContinued(result, reason, seconds):
                self._waited(
                    trace, "continuation", seconds or 0.0, {"result": result, "reason": reason}
                )
            case _:
                pass

    def _is_exported(self, trace: Trace, event: RequestEnded) -> bool:
        """Return whether a trace is exported that is not sampled."""
        return trace.has_failed or event.outcome in ERRORS or 0 < self._slow <= event.total_s

    def _waited(
        self,
        trace: Trace,
        name: str,
        seconds: float,
        values: dict[str, str | int | float],
        *,
        node: str | None = None,
        tokens: int = 0,
    ) -> None:
        now = self._now()
        if tokens:
            values["tokens"] = tokens
        trace.note(name, now - seconds, now, node, values)


def decode_traces(data: bytes) -> Sequence[EndedTrace]:
    """Return the traces of a batch, each as `TraceObserver` has encoded it."""
    return [_decoder.decode(one) for one in _batches.decode(data)]


def encode_batch(traces: Sequence[bytes]) -> bytes:
    """Return encoded traces as one batch."""
    return msgspec.msgpack.encode(traces)


_decoder = msgspec.msgpack.Decoder(EndedTrace)
_batches = msgspec.msgpack.Decoder(list[bytes])
