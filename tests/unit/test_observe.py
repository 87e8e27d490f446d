"""Metrics that Prometheus can read, and log lines that machines and people can."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from datetime import datetime
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pdproxy.app.prefixes import PREFIX_BLOCKS
from pdproxy.deciding.local_scheduler import DECISIONS, MAX_REASONS
from pdproxy.fleet.audit import KV_MISSING
from pdproxy.fleet.bootstrap import BOOTSTRAP_QUERIES
from pdproxy.kit.errors import Wait
from pdproxy.observe import description
from pdproxy.observe.description import Label, Samples, counter, declared
from pdproxy.observe.events import (
    BootstrapAsked,
    DeadlinePassed,
    Decided,
    Event,
    Gaps,
    HandleEnded,
    KvCounted,
    KvShortfall,
    KvWaited,
    LegFailed,
    LegTimes,
    NodeChanged,
    Observers,
    PairEjected,
    Refused,
    RequestEnded,
    ServedAlone,
)
from pdproxy.observe.formats import MAX_LINE, MAX_MESSAGE, MAX_VALUE, JsonFormatter, TextFormatter
from pdproxy.observe.label_values import MAX_LABEL
from pdproxy.observe.logs import ACCESS_FIELDS, LogObserver, access_fields, access_values
from pdproxy.observe.metrics import Metrics
from pdproxy.observe.requests import MODEL, OUTCOMES, TENANT
from pdproxy.serving.kv.custodian import KV_HANDLE_AGE
from pdproxy.serving.kv.ready import MAX_RANKS


def ended(model: str | None = "m", outcome: str = "ok", **fields: object) -> RequestEnded:
    """A report."""
    legs = [LegTimes("p", "d", None, 0.1, first_s=0.02, decode_s=0.7, attempts=1)]
    gaps = Gaps()
    gaps.buckets[3], gaps.total = 4, 0.03
    values: dict[str, object] = {
        "request_id": "r", "endpoint": "/v1/completions", "model": model, "outcome": outcome,
        "status": 200, "legs": legs,
        "queue_s": 0.0, "first_s": 0.2, "total_s": 1.0, "prompt_tokens": 61, "completion_tokens": 5,
        "gaps": gaps, **fields,
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
    Refused("wrong_key", "192.0.2.1"),
]


def test_the_page_is_prometheus_text() -> None:
    """The official parser reads the page; counters end in _total, histograms are cumulative and add
    up.
    """
    metrics = Metrics()
    metrics.show(KV_MISSING, lambda: [(('q"\\\n',), 1.5)])
    for _ in range(3):
        for event in EVENTS:
            metrics.notify(event)
    families = {
        family.name: family for family in text_string_to_metric_families(metrics.page().decode())
    }
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for f in families.values()
        for sample in f.samples
    }
    requests = (
        "pdproxy_requests_total",
        ("endpoint", "/v1/completions"),
        ("model", "m"),
        ("outcome", "ok"),
    )
    assert values[requests] == 6
    for wait in Wait:
        assert values["pdproxy_deadline_total", ("wait", wait.value)] == 3
    assert values["pdproxy_kv_moved_total", ("result", "transferred")] == 15
    assert values["pdproxy_itl_seconds_count",] == 24
    assert values["pdproxy_itl_seconds_bucket", ("le", "+Inf")] == 24
    assert values["pdproxy_itl_seconds_bucket", ("le", "0.005")] == 0
    assert values["pdproxy_itl_seconds_bucket", ("le", "0.01")] == 24
    assert values["pdproxy_tokens_total", ("kind", "prompt")] == 6 * 61
    assert values["pdproxy_kv_missing_tokens", ("node", 'q"\\\n')] == 1.5


def test_an_empty_page_is_one_too() -> None:
    """Before the first event the page can be read."""
    names = [family.name for family in text_string_to_metric_families(Metrics().page().decode())]
    assert "pdproxy_requests" in names


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_every_event_makes_a_line_in_both_formats(
    event: Event, caplog: pytest.LogCaptureFixture
) -> None:
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
    json.loads(JsonFormatter().format(record))


def test_an_exception_is_one_json_line() -> None:
    """Where it came from stays inside the object; its words, which may quote a prompt, are in
    neither format.
    """
    try:
        raise ValueError("boom")
    except ValueError:
        import sys

        record = logging.LogRecord(
            "pdproxy", logging.ERROR, "", 0, "failed %s", ("here",), sys.exc_info()
        )
    found = json.loads(JsonFormatter().format(record))
    assert found["message"] == "failed here"
    assert "ValueError at " in found["exception"]
    assert "test_observe.py" in found["exception"]
    text = TextFormatter().format(record)
    assert len(text.splitlines()) == 1
    assert "test_observe.py" in text
    assert "boom" not in text + str(found)


LONG = st.builds(lambda text, times: text * times, st.text(), st.sampled_from([1, 100, 5000]))
VALUES = st.one_of(
    LONG,
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(),
    st.integers(0, 30_000).map(lambda bits: 1 << bits),
    st.lists(LONG, max_size=80),
)


@given(LONG, st.dictionaries(st.text("abc", min_size=1, max_size=4), VALUES, max_size=30))
def test_every_line_is_bounded_and_can_be_read(message: str, fields: dict[str, object]) -> None:
    """Whatever a client or an engine says, of any length: one line of bounded length, and JSON is
    JSON.
    """
    record = logging.LogRecord("pdproxy.access", logging.INFO, "", 0, "%s", (message,), None)
    record.fields = fields
    text = TextFormatter().format(record)
    assert len(text) <= MAX_LINE
    assert text.isprintable()
    line = JsonFormatter().format(record)
    assert len(line) <= MAX_LINE
    assert "\n" not in line
    assert {"time", "level", "logger", "message"} <= set(json.loads(line))


def test_what_is_cut_shows_that_it_is() -> None:
    """A long value ends with its length; the values beside it are whole; a text at the bound is
    whole.
    """
    fields = {"id": "r", "model": "m" * 100_000, "whole": "w" * MAX_VALUE, "status": 404}
    text = TextFormatter().line(0, "INFO", "pdproxy.access", "request", fields)
    assert (
        f'model="{"m" * MAX_VALUE}... (100000 characters)" whole={"w" * MAX_VALUE} status=404'
        in text
    )
    line = json.loads(JsonFormatter().line(0, "INFO", "pdproxy.access", "x" * 20_000, fields))
    assert line["model"] == "m" * MAX_VALUE + "... (100000 characters)"
    assert (line["whole"], line["status"]) == ("w" * MAX_VALUE, 404)
    assert line["message"] == "x" * MAX_MESSAGE + "... (20000 characters)"


@pytest.mark.parametrize(
    ("zone", "created", "shown"),
    [
        ("UTC", 0.0, "1970-01-01T00:00:00.000+00:00"),
        ("UTC", 1_700_000_000.0625, "2023-11-14T22:13:20.062+00:00"),
        ("Asia/Kolkata", 1_700_000_000.999, "2023-11-15T03:43:20.999+05:30"),
        ("America/St_Johns", 1_700_000_000.5, "2023-11-14T18:43:20.500-03:30"),
    ],
)
def test_a_lines_time_has_milliseconds_and_a_zone(
    monkeypatch: pytest.MonkeyPatch, zone: str, created: float, shown: str
) -> None:
    """As RFC 3339 has it in JSON, with a space in text; also in a second whose lines came
    before.
    """
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        to_json, to_text = JsonFormatter(), TextFormatter()
        for _ in range(2):
            line = json.loads(to_json.line(created, "INFO", "x", "y", {}))
            assert line["time"] == shown
            assert datetime.fromisoformat(line["time"]).timestamp() == pytest.approx(
                created, abs=0.001
            )
            assert (
                to_text.line(created, "INFO", "x", "y", {}) == f"{shown.replace('T', ' ')} INFO x y"
            )
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_list_of_prompts_shows_all_engines_and_the_longest_phases() -> None:
    """Engines once each; of each phase the longest time, of the attempts the most."""
    legs = [
        LegTimes("p1", "d1", None, 0.1, first_s=0.2, decode_s=0.3, attempts=1),
        LegTimes("p2", "d1", None, 0.4, first_s=0.1, decode_s=0.2, attempts=2),
        LegTimes(None, "d2", "n", None, first_s=0.05, decode_s=0.1, attempts=1),
    ]
    found = access_fields(ended(legs=legs))
    expected = {
        "prefill": "p1,p2", "decode": "d1,d2", "why_alone": "n", "attempts": 2,
        "prefill_ms": 400.0, "kv_ms": 200.0, "decode_ms": 300.0,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


def test_an_access_line_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the long names of engines and models that a cluster has: each request writes
    one.
    """
    leg = LegTimes(
        "http://prefill-0.engines-of-a-model.the-namespace-of-it.svc.cluster.local:8200",
        "http://decode-12.engines-of-a-model.the-namespace-of-it.svc.cluster.local:8300",
        None,
        0.1234,
        first_s=0.0456,
        decode_s=3.21,
        attempts=1,
    )
    event = ended(
        "organization/Some-Model-70B-Instruct",
        legs=[leg],
        client="10.20.30.40",
        key="file:12",
        stream=True,
    )
    for formatter in (JsonFormatter(), TextFormatter()):
        made: list[str] = []
        line = formatter._line

        def counted(*given: Any, line: Any = line, made: list[str] = made) -> str:
            made.append(line(*given))
            return made[-1]

        expected = formatter.line(0, "INFO", "pdproxy.access", "request", access_fields(event))
        monkeypatch.setattr(formatter, "_line", counted)
        shown = formatter.own_line(
            0, "INFO", "pdproxy.access", "request", ACCESS_FIELDS, access_values(event)
        )
        assert made == ([shown] if isinstance(formatter, JsonFormatter) else [])
        assert shown == expected
        assert len(shown) > MAX_VALUE


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.text(max_size=1).map(lambda one: one * 600),
)


@given(lines=st.lists(st.tuples(*[_VALUES] * 4), min_size=1, max_size=4))
def test_an_own_line_is_the_same_as_any_line(lines: list[tuple[object, ...]]) -> None:
    """Whatever its values are, and whatever those of the lines before it were."""
    names = ("one", "two", "three", "four")
    for formatter in (JsonFormatter(), TextFormatter()):
        for at, values in enumerate(lines):
            formatter.show_always({"worker": at // 2, "100%s": "%d"})
            fields = {
                name: value for name, value in zip(names, values, strict=True) if value is not None
            }
            expected = formatter.line(0, "INFO", "pdproxy.access", "request", fields)
            assert (
                formatter.own_line(0, "INFO", "pdproxy.access", "request", names, values)
                == expected
            )


def test_an_unknown_engine_makes_no_series() -> None:
    """URLs of engines that are not in the pool are counted under one name."""
    metrics = Metrics()
    metrics.add_node("http://here:1", "prefill")
    for number in range(100):
        metrics.notify(ended(legs=[LegTimes(f"p{number}", f"d{number}", None, 0.1, first_s=0.1)]))
        metrics.notify(LegFailed("r", f"p{number}", "prefill", "it broke", will_retry=True))
    metrics.notify(LegFailed("r", "http://here:1", "prefill", "it broke", will_retry=True))
    page = metrics.page().decode()
    assert "p99" not in page
    assert 'pdproxy_leg_failures_total{node="removed",phase="prefill"} 100.0' in page
    assert 'pdproxy_leg_failures_total{node="http://here:1",phase="prefill"} 1.0' in page
    metrics.drop_node("http://here:1")
    assert "http://here:1" not in metrics.page().decode()


def test_what_a_formatter_keeps_is_bounded_in_bytes() -> None:
    """Words are kept since they may come again: not long ones, and not many."""
    formatter = TextFormatter()
    for number in range(2000):
        formatter.line(
            0, "INFO", "x", "request", {"model": f"- {number}" + "x" * 5000, "id": f"{number}-"}
        )
        formatter.line(0, "INFO", "x", "request", {"model": f"- {number}" + "x" * 400})
    kept = formatter._cached.cache_info()
    assert kept.currsize == kept.maxsize == 256
    assert kept.misses == 2000, "the long ones were not kept"


def test_labels_are_bounded_in_number_and_length() -> None:
    """Models that no engine lists, that are too long, or too many; ranks that an engine says it
    has.
    """
    metrics = Metrics(lambda model: model.startswith("listed"))
    assert MODEL.most is not None
    for number in range(MODEL.most + 100):
        metrics.notify(ended(f"listed-{number}"))
        metrics.notify(ended(f"mine-{number}"))
    metrics.notify(ended("listed" + "x" * MAX_LABEL))
    metrics.notify(KvWaited("p", "timeout", 1.0, [str(rank) for rank in range(10_000)]))
    page = metrics.page().decode()
    assert "mine" not in page
    assert page.count("pdproxy_requests_total{") == (MODEL.most + 1) * len(OUTCOMES)
    assert page.count("pdproxy_kv_silent_ranks_total{") == MAX_RANKS + 1
    assert max(map(len, page.splitlines())) < 1000


LIBRARIES = """
import asyncio, gc, logging, sys, threading
from pdproxy.app import uncaught
from pdproxy.observe.logs import configure
log = configure("info", sys.argv[1])
uncaught.install()

def fail(*_):
    raise ValueError("SECRET")

async def main():
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(uncaught.log_failure)
    loop.call_soon(fail, "SECRET")
    future = loop.create_future()
    future.set_exception(ValueError("SECRET"))
    del future
    task = asyncio.create_task(asyncio.sleep(0))
    await task
    gc.collect()
    await asyncio.sleep(0.01)

asyncio.run(main())
try:
    fail()
except ValueError:
    logging.getLogger("uvicorn.error").exception("Exception in ASGI application\\n")
    logging.getLogger("aiohttp.client").exception("a library's")
logging.getLogger("pdproxy").warning("no %d", "SECRET")
thread = threading.Thread(target=fail)
thread.start()
thread.join()

class Broken:
    def __del__(self):
        fail()

Broken()
log.close()
"""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_exceptions_words_reach_the_log(log_format: str) -> None:
    """Of libraries, callbacks, futures, threads and destructors: each makes one line, with its type
    and its place.
    """
    done = subprocess.run(
        [sys.executable, "-c", LIBRARIES, log_format],
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "SECRET" not in done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 7, done.stderr
    assert sum("ValueError at " in line for line in lines) == 6
    assert sum("TypeError at " in line for line in lines) == 1
    if log_format == "json":
        assert all(json.loads(line)["level"] for line in lines)


def test_tenants_are_labels_up_to_a_bound() -> None:
    """What no tenant uses is not counted; beyond the bound they are counted together."""
    metrics = Metrics()
    assert TENANT.most is not None
    for number in range(TENANT.most + 5):
        metrics.notify(ended(tenant=f"t{number}"))
    metrics.notify(ended())
    metrics.notify(ended(tenant="t0", prompt_tokens=None, completion_tokens=None))
    found = metrics._counts["pdproxy_tenant_tokens_total"]
    assert len(found) == TENANT.most + 1
    assert (found["t0",], found["other",]) == (66, 5 * 66)


def test_a_placements_reasons_are_labels_up_to_a_bound() -> None:
    """They are words of a plugin's. Those that were counted before are counted on."""
    metrics = Metrics()
    for reason in (*(f"r{number}" for number in range(MAX_REASONS + 5)), "r0"):
        metrics.notify(Decided("split", reason))
    found = {labels[1]: count for labels, count in metrics._counts[DECISIONS.name].items() if count}
    assert found == {**{f"r{number}": 1 for number in range(MAX_REASONS)}, "r0": 2, "other": 5}


def test_what_is_counted_of_an_engine_is_dropped_with_it() -> None:
    """Whoever counts it, and whether by an event or not: with an engine that is not known as that
    of "removed".
    """
    metrics = Metrics()
    observers = Observers([metrics])
    for url in ("http://here:1", "http://gone:1"):
        metrics.add_node("http://here:1", "prefill")
        observers.count(BOOTSTRAP_QUERIES, url, "failed", by=2)
        observers.notify(BootstrapAsked(url, "failed"))
    counts = metrics._counts[BOOTSTRAP_QUERIES.name]
    assert counts == {("http://here:1", "failed"): 3, ("removed", "failed"): 3}
    metrics.drop_node("http://here:1")
    assert counts == {("removed", "failed"): 3}


def test_a_declaration_that_cannot_count_is_refused() -> None:
    """When its module is imported: no request has to come for that."""
    with pytest.raises(ValueError, match="there is a metric pdproxy_decisions_total already"):
        counter(DECISIONS.name, "decisions", "again")
    with pytest.raises(ValueError, match="Decided has no choices"):
        counter("pdproxy_toys_total", "toys", "toys", Label("choices", text="a choice"), of=Decided)
    with pytest.raises(ValueError, match="Decided has no seconds"):
        counter("pdproxy_toys_total", "toys", "toys", of=Decided, by="seconds")
    assert "pdproxy_toys_total" not in {one.name for one in declared()}


def test_numbers_of_several_pools_become_one_by_their_rule() -> None:
    """Ages do not add up; what has other labels stays apart."""
    metrics = Metrics()
    for of, number in (("events", 3.0), ("routing", 5.0), ("events", 4.0)):
        ages: Samples = [(("held",), number)]
        blocks: Samples = [((of,), number)]
        metrics.show(KV_HANDLE_AGE, partial(iter, ages))
        metrics.show(PREFIX_BLOCKS, partial(iter, blocks))
    found = metrics.snapshot().values
    assert found[KV_HANDLE_AGE.name] == {("held",): 5.0}
    assert found[PREFIX_BLOCKS.name] == {("events",): 7.0, ("routing",): 5.0}


def test_a_metric_that_is_declared_later_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module may be imported while the proxy runs, a plugin's for example."""
    metrics = Metrics()
    monkeypatch.setattr(description, "_declared", {**description._declared})
    toys = counter(
        "pdproxy_toys_total",
        "toys",
        "toys",
        Label("choice", (("split", "a"), ("whole", "b"))),
        of=Decided,
    )
    others = counter("pdproxy_other_toys_total", "toys", "toys")
    metrics.count(others)
    answers = counter("pdproxy_toy_answers_total", "answers", "toys", of=RequestEnded, by="status")
    metrics.notify(ended())
    metrics.notify(Decided("split", "x"))
    found = metrics.snapshot().values
    assert found[toys.name] == {("split",): 1, ("whole",): 0}
    assert found[others.name] == {(): 1}
    assert found[answers.name] == {(): 200}
    assert found["pdproxy_requests_total"]["m", "/v1/completions", "ok"] == 1
