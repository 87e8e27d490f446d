"""Traces: the section `observe.tracing`, and its checks."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from pdproxy.kit.regular_file import UnusableFileError
from pdproxy.observe.trace_headers import read_headers
from pdproxy.settings.errors import Mistakes, SettingsError, quote
from pdproxy.settings.section import File, OffOrSeconds, Option, Section, Text

Protocol = Literal["http/protobuf", "grpc"]
Ratio = Annotated[float, Meta(ge=0, le=1)]
HTTP: Literal["http/protobuf"] = "http/protobuf"
_PATH = "/v1/traces"
_EXPORTERS = {
    HTTP: "opentelemetry.exporter.otlp.proto.http",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
}
_ENDPOINT = ("observe", "tracing", "endpoint")


class Tracing(Section, frozen=True):
    """Traces for an OpenTelemetry collector. They need the extra `tracing`: pip install
    'pdproxy[tracing]'.
    """

    endpoint: Annotated[
        Text | None,
        Option(
            "OpenTelemetry collector that gets traces, such as http://localhost:4318 (default: "
            "none)",
            "URL",
            "--otlp-traces-endpoint",
        ),
    ] = None
    """The collector's URL, such as http://localhost:4318, or http://localhost:4317 for grpc. With
    http/protobuf and no path in it, /v1/traces is added. null: no traces.
    """

    protocol: Protocol = HTTP
    """http/protobuf or grpc."""

    sample_ratio: Ratio = 0.01
    """The share of the traces that begin here and are exported. A client's traceparent decides by
    itself. Requests that fail, or under which an engine fails, are always exported.
    """

    slow: OffOrSeconds = 30.0
    """Seconds from which on a request is always exported. 0: it does not matter how long requests
    take.
    """

    service_name: Text = "pdproxy"
    """The service's name in traces."""

    headers_file: File | None = None
    """Header lines that the collector gets, such as its key: `name: value` each. Read for each
    batch of traces. null: none.
    """

    @property
    def url(self) -> str:
        """The whole URL to which traces are sent."""
        url = self.endpoint or ""
        if self.protocol == HTTP and urlsplit(url).path in ("", "/"):
            return url.rstrip("/") + _PATH
        return url


def check_tracing(tracing: Tracing, found: Mistakes) -> None:
    """Check the collector's URL, and that settings have an effect. Mistakes are added to
    `found`.
    """
    where = found.source(_ENDPOINT)
    if tracing.endpoint is None:
        if tracing != Tracing():
            found.add(
                _ENDPOINT[:2],
                "observe.tracing has no effect without observe.tracing.endpoint"
                + found.source(_ENDPOINT[:2]),
            )
        return
    try:
        parts = urlsplit(tracing.endpoint)
        is_url = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if (
        not is_url
        or parts.scheme not in ("http", "https")
        or not tracing.endpoint.isprintable()
        or set(" @?#") & set(tracing.endpoint)
    ):
        words = "expected http://host:port or https://host:port, without a user and a query"
        found.add(_ENDPOINT, f"observe.tracing.endpoint: {quote(tracing.endpoint)}: {words}{where}")


def check_installed(tracing: Tracing) -> None:
    """Check that traces can be exported here.

    Raises:
        SettingsError: the extra is not installed, or the file of headers can't be used.
    """
    if tracing.endpoint is None:
        return
    for module in ("opentelemetry.sdk", _EXPORTERS[tracing.protocol]):
        if not _is_installed(module):
            raise SettingsError(
                "observe.tracing.endpoint needs OpenTelemetry's SDK and exporters: pip install "
                "'pdproxy[tracing]'"
            )
    if (path := tracing.headers_file) is not None:
        try:
            read_headers(path)
        except (UnusableFileError, ValueError) as error:
            raise SettingsError(f"observe.tracing.headers_file: {quote(path)}: {error}") from None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package around it
        return False
