"""Metrics that Prometheus can read, and log lines that machines and people can."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pdproxy.kit.errors import Wait
from pdproxy.observe.events import (
    DeadlinePassed,
    Event,
    Gaps,
    HandleEnded,
    KvCounted,
    KvShortfall,
    LegFailed,
    LegTimes,
    NodeChanged,
    PairEjected,
    RequestEnded,
    ServedAlone,
)
from pdproxy.observe.formats import JsonFormatter, TextFormatter
from pdproxy.observe.logs import LogObserver
from pdproxy.observe.metrics import Gauge, Metrics


def ended(model: str | None = "m", outcome: str = "ok", **fields: object) -> RequestEnded:
    """A report."""
    legs = [LegTimes("p", "d", None, 0.1, 0.02)]
    gaps = Gaps()
    gaps.buckets[3], gaps.total = 4, 0.03
    values: dict[str, object] = {
        "request_id": "r", "endpoint": "/v1/completions", "model": model, "outcome": outcome, "status": 200, "legs": legs,
        "queue_s": 0.0, "first_s": 0.2, "total_s": 1.0, "prompt_tokens": 61, "completion_tokens": 5, "gaps": gaps, **fields,
    }  # fmt: skip
    return RequestEnded(**values)  # type: ignore[arg-type]


EVENTS: list[Event] = [
    ended(),
    ended(error='a "quoted" line\nand another'),
    ServedAlone("n"),
    *(DeadlinePassed(wait.value) for wait in Wait),
    HandleEnded("loaded", "p", 0.5),
    LegFailed("r", "http://p:1", "prefill", "it broke", will_retry=True),
    NodeChanged("http://p:1", "prefill", up=False, reason="x"),
    NodeChanged("http://p:1", "prefill", up=True, reason="x"),
    PairEjected("p", "d", 1, 2),
    KvShortfall("d", 5, 10),
    KvCounted("d", 5, 5),
]


def test_the_page_is_prometheus_text() -> None:
    """The official parser reads the page; counters end in _total, histograms are cumulative and add up."""
    metrics = Metrics()
    metrics.add_gauges([Gauge("pdproxy_x", "A \\ gauge\nof two lines", ("a",), lambda: [(('q"\\\n',), 1.5)])])
    for _ in range(3):
        for event in EVENTS:
            metrics.notify(event)
    families = {family.name: family for family in text_string_to_metric_families(metrics.page().decode())}
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value for f in families.values() for sample in f.samples
    }
    requests = ("pdproxy_requests_total", ("endpoint", "/v1/completions"), ("model", "m"), ("outcome", "ok"))
    assert values[requests] == 6
    for wait in Wait:
        assert values["pdproxy_deadline_total", ("wait", wait.value)] == 3
    assert values["pdproxy_kv_moved_total", ("result", "transferred")] == 15
    assert values["pdproxy_itl_seconds_count",] == 24
    assert values["pdproxy_itl_seconds_bucket", ("le", "+Inf")] == 24
    assert values["pdproxy_itl_seconds_bucket", ("le", "0.005")] == 0
    assert values["pdproxy_itl_seconds_bucket", ("le", "0.01")] == 24
    assert values["pdproxy_tokens_total", ("kind", "prompt")] == 6 * 61
    assert values["pdproxy_x", ("a", 'q"\\\n')] == 1.5


def test_an_empty_page_is_one_too() -> None:
    """Before the first event the page can be read."""
    names = [family.name for family in text_string_to_metric_families(Metrics().page().decode())]
    assert "pdproxy_requests" in names


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_every_event_makes_a_line_in_both_formats(event: Event, caplog: pytest.LogCaptureFixture) -> None:
    """A JSON line is one JSON object; a text line is one line."""
    caplog.set_level(logging.DEBUG, "pdproxy")
    LogObserver().notify(event)
    (record,) = caplog.records
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert {"time", "level", "logger", "message"} <= set(found)
    text = TextFormatter().format(record)
    assert "\n" not in text
    assert record.levelname in text


@given(st.text(), st.text())
def test_no_text_of_a_client_breaks_a_line(model: str, error: str) -> None:
    """Model names come from clients: none forges a line, a field or a terminal's escape."""
    record = logging.LogRecord("pdproxy.access", logging.INFO, "", 0, "request", (), None)
    record.fields = {"model": model, "error": error}
    text = TextFormatter().format(record)
    assert len(text.splitlines()) == 1
    assert text.isprintable()
    try:
        json.loads(JsonFormatter().format(record))
    except UnicodeEncodeError:  # half a surrogate pair, which no JSON body can bring
        assert any(0xD800 <= ord(c) < 0xE000 for c in model + error)


def test_an_exception_is_one_json_line() -> None:
    """Where it came from stays inside the object; its words, which may quote a prompt, are in neither format."""
    try:
        raise ValueError("boom")
    except ValueError:
        import sys

        record = logging.LogRecord("pdproxy", logging.ERROR, "", 0, "failed %s", ("here",), sys.exc_info())
    found = json.loads(JsonFormatter().format(record))
    assert found["message"] == "failed here"
    assert "ValueError at " in found["exception"]
    assert "test_observe.py" in found["exception"]
    text = TextFormatter().format(record)
    assert len(text.splitlines()) == 1
    assert "test_observe.py" in text
    assert "boom" not in text + str(found)
