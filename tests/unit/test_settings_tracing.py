"""The settings of traces: what is wrong with them is one line, and exit code 2."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest

from pdproxy.cli.main import main
from pdproxy.observe.trace_headers import MAX_BYTES
from pdproxy.settings import tracing
from pdproxy.settings.tracing import Tracing

SERVE = ["serve", "--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:2"]
ENDPOINT = "http://127.0.0.1:4318"


def said(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The line that says what is wrong."""
    assert main([*SERVE, *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err.removeprefix("pdproxy serve: ").rstrip("\n")


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:4317", "ftp://a:1", "http://", "http://u:p@a:1", "http://a:x", "http://a/?k=v"],
)
def test_a_url_that_is_none(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the setting and the option."""
    words = "expected http://host:port or https://host:port, without a user and a query"
    error = said(capsys, "--otlp-traces-endpoint", url)
    assert error.startswith("observe.tracing.endpoint: ")
    assert error.endswith(f"{words} (--otlp-traces-endpoint)")


def test_settings_that_have_no_effect(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sets them wants traces."""
    monkeypatch.setenv("PDPROXY_OBSERVE__TRACING__SAMPLE_RATIO", "0.5")
    assert said(capsys).startswith("observe.tracing has no effect without observe.tracing.endpoint")


@pytest.mark.parametrize("missing", ["opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"])
def test_the_extra_is_not_installed(
    missing: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line says how to install it. The log is not begun, and nothing is served."""

    def find(name: str) -> ModuleSpec | None:
        if name == missing:
            raise ModuleNotFoundError(name)
        return find_spec(name)

    monkeypatch.setattr(tracing, "find_spec", find)
    assert said(capsys, "--otlp-traces-endpoint", ENDPOINT) == (
        "observe.tracing.endpoint needs OpenTelemetry's SDK and exporters: pip install "
        "'pdproxy[tracing]'"
    )


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (None, "can't be read: No such file or directory"),
        (b"a: b\nsecret", "line 2 is no header"),
        (os.mkfifo, "is a FIFO, not a regular file"),
        (os.mkdir, "is a directory, not a regular file"),
        (b"#" * (MAX_BYTES + 1), "is larger than"),
    ],
)
def test_a_file_of_headers_that_can_not_be_used(
    made: bytes | Callable[[Path], None] | None,
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The line names the file, and not what is in it."""
    path = tmp_path / "headers"
    if isinstance(made, bytes):
        path.write_bytes(made)
    elif made is not None:
        made(path)
    monkeypatch.setenv("PDPROXY_OBSERVE__TRACING__HEADERS_FILE", str(path))
    error = said(capsys, "--otlp-traces-endpoint", ENDPOINT)
    assert error.startswith("observe.tracing.headers_file: ")
    assert (str(path) in error, why in error, "secret" in error) == (True, True, False)


def test_the_url_that_is_sent_to() -> None:
    """Only over HTTP, and without a path of its own, it gets the usual one."""
    urls = {
        (one.protocol, one.endpoint): one.url
        for one in (
            Tracing(endpoint=ENDPOINT),
            Tracing(endpoint=f"{ENDPOINT}/"),
            Tracing(endpoint=f"{ENDPOINT}/mine"),
            Tracing(endpoint=ENDPOINT, protocol="grpc"),
        )
    }
    assert list(urls.values()) == [
        f"{ENDPOINT}/v1/traces",
        f"{ENDPOINT}/v1/traces",
        f"{ENDPOINT}/mine",
        ENDPOINT,
    ]
