"""The process that makes spans of traces and sends them to the collector, by OpenTelemetry's SDK
and exporters. Only `observe.trace_export` starts it.

A question is an `ExportTarget` with the traces of a batch. The answer is empty, or says why the
collector has not taken them.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from pdproxy.kit.pool_process import work
from pdproxy.observe.spans import SpanMaker
from pdproxy.observe.trace_export import ExportTarget
from pdproxy.observe.trace_headers import read_headers
from pdproxy.observe.traces import decode_traces

_target = msgspec.json.Decoder(ExportTarget)


class _FirstLine(logging.Handler):
    """Keeps the first line that OpenTelemetry logs: exporters say there why they fail."""

    line = ""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self.line = self.line or record.getMessage()


def answer(question: bytes, data: bytes) -> bytes:
    """Send a batch. Return b"", or why the collector has not taken it."""
    said = _FirstLine()
    logger = logging.getLogger("opentelemetry")
    logger.handlers, logger.propagate = [said], False
    try:
        target = _target.decode(question)
        headers = () if target.headers_file is None else read_headers(target.headers_file)
        maker = _maker(target)
        spans = [span for trace in decode_traces(data) for span in maker.spans(trace)]
        result = _exporter(target, headers).export(spans)
    except Exception as error:
        return f"{type(error).__name__}: {error}".encode()
    if result is SpanExportResult.SUCCESS:
        return b""
    return (said.line or "the collector has not taken them").encode()


@lru_cache(1)
def _maker(target: ExportTarget) -> SpanMaker:
    resource = Resource.create(
        {
            "service.name": target.service_name,
            "service.version": target.version,
            "service.instance.id": target.instance,
        }
    )
    return SpanMaker(resource, target.version)


@lru_cache(1)  # it keeps its connection
def _exporter(target: ExportTarget, headers: tuple[tuple[str, str], ...]) -> SpanExporter:
    if target.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as ByGrpc

        return ByGrpc(
            target.endpoint,
            insecure=target.endpoint.startswith("http:"),
            headers=headers,
            timeout=target.timeout,
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as ByHttp

    return ByHttp(target.endpoint, headers=dict(headers), timeout=target.timeout)


if __name__ == "__main__":
    work(answer)
