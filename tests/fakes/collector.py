"""A collector of OpenTelemetry traces at a port of this machine: it decodes what exporters send,
and keeps the spans.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from pdproxy.observe.spans import SpanMaker
from pdproxy.observe.traces import EndedTrace

KINDS = {1: "internal", 2: "server", 3: "client"}


@dataclass(frozen=True)
class Span:
    """A span as the collector has got it. Ids in hex digits; `parent`: "" if there is none; times
    in seconds.
    """

    name: str
    trace_id: str
    span_id: str
    parent: str
    kind: str
    begin: float
    end: float
    values: dict[str, Any]
    events: dict[str, float]
    error: str | None

    @property
    def as_parent(self) -> str:
        """The `traceparent` of what this span has asked for, if the trace is sampled."""
        return f"00-{self.trace_id}-{self.span_id}-01"


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


def spans_of(request: Any) -> Iterator[tuple[dict[str, Any], Span]]:
    """Each span of a request of an exporter, with the attributes of its service."""
    for resource in request.resource_spans:
        service = {one.key: _value(one.value) for one in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield (
                    service,
                    Span(
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        KINDS[span.kind],
                        span.start_time_unix_nano / 1e9,
                        span.end_time_unix_nano / 1e9,
                        {one.key: _value(one.value) for one in span.attributes},
                        {one.name: one.time_unix_nano / 1e9 for one in span.events},
                        span.status.message if span.status.code == 2 else None,
                    ),
                )


def made_of(trace: EndedTrace) -> list[Span]:
    """The spans of a trace as a collector gets them, without any exporter."""
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.resources import Resource

    made = SpanMaker(Resource.create({}), "1").spans(trace)
    return [span for _, span in spans_of(encode_spans(made))]


class Collector:
    """What has come so far. `status`: what is answered; None: nothing."""

    def __init__(self) -> None:
        self.url = ""
        self.status: int | None = 200
        self.spans: list[Span] = []
        self.services: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self._connections: dict[asyncio.Task[None] | None, asyncio.StreamWriter] = {}

    def take(self, body: bytes) -> None:
        """Decode the body of a request."""
        for service, span in spans_of(ExportTraceServiceRequest.FromString(body)):
            self.services.append(service)
            self.spans.append(span)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection over HTTP."""
        self._connections[asyncio.current_task()] = writer
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                lines = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(lines["content-length"]))
                self.paths.append(head[0].split()[1])
                self.headers.append(lines)
                if (status := self.status) is None:
                    await reader.read()  # until the exporter gives up
                    return
                if status == 200:
                    self.take(body)
                answer = ExportTraceServiceResponse().SerializeToString()
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(answer)))
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            del self._connections[asyncio.current_task()]

    async def close(self) -> None:
        """Close all connections."""
        connections = dict(self._connections)
        for writer in connections.values():
            writer.transport.abort()
        await asyncio.gather(*(task for task in connections if task is not None))


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    """Run a collector over HTTP."""
    made = Collector()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        await made.close()


class _Servicer(TraceServiceServicer):
    def __init__(self, take: Callable[[bytes], None], headers: list[dict[str, str]]) -> None:
        self._take, self._headers = take, headers

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._headers.append({one.key: one.value for one in context.invocation_metadata()})
        self._take(request.SerializeToString())
        return ExportTraceServiceResponse()


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    """Run a collector over gRPC, in threads."""
    made = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(_Servicer(made.take, made.headers), server)
    made.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield made
    finally:
        server.stop(None)
