"""OpenTelemetry's spans of one request, made of what was noted of it.

Attributes have the names of OpenTelemetry's semantic conventions, for generative AI
(https://github.com/open-telemetry/semantic-conventions-genai), HTTP and servers; what these have
no name for begins with `pdproxy.`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from pdproxy.observe.events import LegTimes, RequestEnded
from pdproxy.observe.traces import ERRORS, EndedTrace, NotedSpan

Values = Mapping[str, str | int | float | bool | None]
_NS = 1_000_000_000
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v2/chat": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""The conventions' names of operations, by routes. Other routes are their own operations."""
_LEGS = frozenset(("encode", "prefill", "decode", "alone"))
_ANSWERING = frozenset(("decode", "alone"))


class SpanMaker:
    """Makes the spans of one service. `version`: of pdproxy."""

    def __init__(self, resource: Resource, version: str) -> None:
        self._resource = resource
        self._scope = InstrumentationScope("pdproxy", version)

    def spans(self, trace: EndedTrace) -> list[ReadableSpan]:
        """Return the spans of a request: its own, and below that queue, waits and legs."""
        return [*self._made(trace)]

    def _made(self, trace: EndedTrace) -> Iterator[ReadableSpan]:
        event, end = trace.event, trace.began + trace.event.total_s
        operation = _OPERATIONS.get(event.endpoint, event.endpoint)
        name = operation if not event.model else f"{operation} {event.model}"
        has_failed = event.outcome in ERRORS
        yield self._span(
            trace,
            name,
            SpanKind.SERVER,
            trace.span_id,
            trace.parent_id,
            trace.began,
            end,
            _of_request(trace, operation),
            (event.error or event.outcome) if has_failed else None,
        )
        yield self._span(
            trace,
            "queue",
            SpanKind.INTERNAL,
            _next_id(trace.span_id, 1),
            trace.span_id,
            trace.began,
            trace.began + event.queue_s,
            {},
        )
        first = None if event.first_s is None else trace.began + event.first_s
        numbers: Counter[str] = Counter()
        for span in trace.spans:
            until = end if span.end is None else span.end
            values: dict[str, str | int | float | bool | None] = {
                f"pdproxy.{span.name}.{name}": value for name, value in (span.values or {}).items()
            }
            if span.name in _LEGS:
                numbers[span.name] += 1
                values["pdproxy.attempt"] = numbers[span.name]
                if span.error is not None:
                    values["error.type"] = "leg_failed"
            if span.node is not None:
                values |= _server(span.node)
            has_first = (
                span.name in _ANSWERING and first is not None and span.begin <= first <= until
            )
            yield self._span(
                trace,
                span.name,
                SpanKind.CLIENT if span.name in _LEGS else SpanKind.INTERNAL,
                span.span_id,
                trace.span_id,
                span.begin,
                until,
                values,
                span.error,
                first_data=first if has_first else None,
            )
            if has_first and first is not None and (wait := _kv_wait(event, span)) is not None:
                yield self._span(
                    trace,
                    "kv_wait",
                    SpanKind.INTERNAL,
                    _next_id(span.span_id, 1),
                    span.span_id,
                    first - wait,
                    first,
                    {"pdproxy.kv_wait.result": "loaded"},
                )

    def _span(
        self,
        trace: EndedTrace,
        name: str,
        kind: SpanKind,
        span_id: str,
        parent_id: str | None,
        begin: float,
        end: float,
        values: Values,
        error: str | None = None,
        *,
        first_data: float | None = None,
    ) -> ReadableSpan:
        """Return a span. `begin`, `end` and `first_data`: seconds of the clock. `error`: why it has
        failed.
        """
        trace_id, flags = int(trace.trace_id, 16), TraceFlags(trace.flags | TraceFlags.SAMPLED)
        is_remote = span_id == trace.span_id
        parent = None
        if parent_id is not None:
            parent = SpanContext(trace_id, int(parent_id, 16), is_remote, flags)
        events = []
        if first_data is not None:
            events.append(Event("first data", timestamp=_ns(trace, first_data)))
        return ReadableSpan(
            name,
            SpanContext(trace_id, int(span_id, 16), is_remote=False, trace_flags=flags),
            parent,
            self._resource,
            {key: value for key, value in values.items() if value is not None},
            events,
            kind=kind,
            status=Status() if error is None else Status(StatusCode.ERROR, error),
            start_time=_ns(trace, begin),
            end_time=_ns(trace, max(begin, end)),
            instrumentation_scope=self._scope,
        )


def _of_request(trace: EndedTrace, operation: str) -> Values:
    event = trace.event
    leg = event.legs[0] if len(event.legs) == 1 else LegTimes()
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": event.model or None,
        "gen_ai.usage.input_tokens": event.prompt_tokens,
        "gen_ai.usage.output_tokens": event.completion_tokens,
        "gen_ai.response.time_to_first_chunk": event.first_s,
        "http.request.method": event.method,
        "http.route": event.endpoint,
        "http.response.status_code": event.status or None,
        "error.type": None if event.outcome == "ok" else event.reason or event.outcome,
        "pdproxy.request_id": event.request_id,
        "pdproxy.outcome": event.outcome,
        "pdproxy.stream": event.stream,
        "pdproxy.prompts": len(event.legs),
        "pdproxy.why_alone": leg.why_alone,
        "pdproxy.decision": leg.decision,
        "pdproxy.continued": leg.continued or None,
        "pdproxy.spans_left_out": trace.left_out or None,
    }


def _server(url: str) -> Values:
    parts = urlsplit(url)
    return {"server.address": parts.hostname, "server.port": parts.port}


def _kv_wait(event: RequestEnded, span: NotedSpan) -> float | None:
    """Return for how many seconds a decode engine that has sent the first data has waited for KV,
    one step included. None: it computed the prompt itself, or that is not known.
    """
    leg = event.legs[0] if len(event.legs) == 1 else LegTimes()
    if leg.prefill is None or leg.decode != span.node or leg.continued:
        return None
    return leg.first_s


def _next_id(span_id: str, number: int) -> str:
    """Return the id of a span that nobody else names: made of that of the span above it."""
    return f"{(int(span_id, 16) + number) % (1 << 64) or 1:016x}"


def _ns(trace: EndedTrace, at: float) -> int:
    return int((trace.unix + at - trace.began) * _NS)
