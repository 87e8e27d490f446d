"""Traces on their way to the collector: what is sent and how, and what becomes of traces that the
collector does not take.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pdproxy.observe import trace_export
from pdproxy.observe.description import Description
from pdproxy.observe.events import Gaps, RequestEnded
from pdproxy.observe.trace_export import EXPORT_S, START_S, ExportTarget, TraceExport, TraceQueue
from pdproxy.observe.trace_process import answer
from pdproxy.observe.traces import (
    MAX_SPANS,
    TRACE,
    Trace,
    TraceObserver,
    begin_leg,
    begin_trace,
    decode_traces,
    encode_batch,
    leg_lines,
)
from tests.fakes.clock import ManualClock
from tests.fakes.collector import Collector, collector, grpc_collector
from tests.fakes.world import until


def ended(model: str = "tiny", error: str | None = None) -> RequestEnded:
    """The end of a request."""
    return RequestEnded(
        "id", "/v1/completions", model, "ok", 200, [], 0.1, None, 0.5, 3, 4, Gaps(), error
    )


def a_trace(event: RequestEnded | None = None, legs: int = 1) -> bytes:
    """A trace, encoded as the proxy does."""
    found: list[bytes] = []
    begin_trace((), 1.0, 10.0)
    for number in range(legs):
        begin_leg("prefill", f"http://p:{number + 1}", 10.1)
    TraceObserver(0.0, lambda: 10.5, found.append).notify(event or ended())
    TRACE.set(None)
    (one,) = found
    return one


def target(url: str, protocol: str = "http/protobuf", headers: Path | None = None) -> ExportTarget:
    """A target of exports that fail at once, where they fail."""
    file = None if headers is None else str(headers)
    return ExportTarget(url, protocol, "svc", file, "1.0", "here:1", 0.5)


class Counts:
    """What was counted of traces."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()

    def __call__(self, metric: Description, result: str, *, by: int) -> None:
        assert metric is trace_export.TRACES
        self.of[result] += by


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the process that sends traces find the package, and no proxy."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))


@pytest.fixture
def by_grpc() -> Iterator[Collector]:
    """A collector over gRPC."""
    with grpc_collector() as made:
        yield made


def test_by_grpc_with_headers(by_grpc: Collector, tmp_path: Path) -> None:
    """The collector gets the spans, and the lines of the file of headers as they are now."""
    headers = tmp_path / "headers"
    question = msgspec.json.encode(target(by_grpc.url, "grpc", headers))
    for key in ("one", "two"):
        headers.write_text(f"# the collector's\n\nX-Key: {key}\n")
        assert answer(question, encode_batch([a_trace()])) == b""
    assert [one["x-key"] for one in by_grpc.headers] == ["one", "two"]
    assert [one.name for one in by_grpc.spans[:3]] == ["text_completion tiny", "queue", "prefill"]
    assert by_grpc.services[0]["service.name"] == "svc"
    assert by_grpc.services[0]["service.instance.id"] == "here:1"


async def test_why_the_collector_has_not_taken_them(tmp_path: Path) -> None:
    """A status, a collector that is away, a file of headers that is wrong: without its content."""
    (bad := tmp_path / "bad").write_text("secret")
    async with collector() as c:
        c.status = 401
        said = [
            await asyncio.to_thread(answer, msgspec.json.encode(one), encode_batch([a_trace()]))
            for one in (
                target(f"{c.url}/v1/traces"),
                target("http://127.0.0.1:9/v1/traces"),
                target(c.url, headers=bad),
            )
        ]
    assert b"401" in said[0]
    assert said[1].startswith(b"Failed to export")
    assert said[2] == b"ValueError: line 1 is no header: expected name: value"


def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In traces and in bytes: what comes when it is full is dropped and counted."""
    counts = Counts()
    queue = TraceQueue(counts)
    monkeypatch.setattr(trace_export, "MAX_TRACES", 3)
    monkeypatch.setattr(trace_export, "MAX_BYTES", 100)
    for _ in range(5):
        queue.put(b"x" * 10)
    assert (len(queue), counts.of["dropped"]) == (3, 2)
    assert len(queue.take()) == 3
    queue.put(b"x" * 80)
    queue.put(b"x" * 80)
    assert (len(queue), counts.of["dropped"]) == (1, 3)


def test_a_trace_is_bounded() -> None:
    """However many legs a request has, and however long a model's name or an error is."""
    one = a_trace(ended("m" * 1_000_000, "e" * 1_000_000), legs=3 * MAX_SPANS)
    (trace,) = decode_traces(encode_batch([one]))
    assert (len(trace.spans), trace.left_out) == (MAX_SPANS, 2 * MAX_SPANS)
    assert len(one) < 32_768


def test_only_a_leg_that_is_under_way_has_requests() -> None:
    """What a task asks engines behind a leg's end is no part of the leg; behind the request's end
    nothing is noted, though connections keep its context.
    """
    found: list[bytes] = []
    line = (b"x-request-id", b"a")
    begin_trace((), 1.0, 10.0)
    leg = begin_leg("prefill", "http://p", 10.1)
    assert leg is not None
    assert leg_lines((line,))[0] == line
    assert leg.span_id.encode() in leg_lines((line,))[1][1]
    leg.end = 10.2
    assert leg_lines((line,)) == (line,)
    observer = TraceObserver(0.0, lambda: 10.5, found.append)
    for _ in range(2):
        observer.notify(ended())
    assert begin_leg("decode", "http://d", 10.6) is None
    assert (leg_lines((line,)), len(found)) == ((line,), 1)
    TRACE.set(None)


async def test_a_silent_collector_is_waited_for_no_longer_than_it_may_take(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Then its batch counts as late. Traces that come meanwhile wait or are dropped."""
    clock, counts = ManualClock(), Counts()
    queue = TraceQueue(counts)
    async with collector() as c:
        c.status = None
        export = TraceExport(queue, target(f"{c.url}/v1/traces"), clock)
        queue.put(a_trace())
        task = asyncio.create_task(export.run())
        await until(lambda: c.paths)
        with caplog.at_level(logging.WARNING):
            await clock.reach(target("").timeout + START_S)
            await until(lambda: counts.of["late"] == 1)
        assert "traces are not exported: no answer in" in caplog.text
        task.cancel()
        queue.put(a_trace())
        closing = asyncio.create_task(export.close())
        await clock.through(closing)
        assert counts.of == {"late": 2}
        assert len(queue) == 0


async def test_a_process_that_is_killed_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    """Its batch has failed; the next one is taken."""
    counts = Counts()
    queue = TraceQueue(counts)
    async with collector() as c:
        export = TraceExport(queue, target(f"{c.url}/v1/traces"), ManualClock())
        c.status = None
        queue.put(a_trace())
        sending = asyncio.create_task(export.close())
        await until(lambda: c.paths)
        for process in export._process._all:
            process.kill()
        await sending
        assert counts.of == {"failed": 1}
        c.status = 200
        queue.put(a_trace())
        await export.close()
        assert counts.of == {"failed": 1, "exported": 1}


def test_forked_workers_make_ids_of_their_own() -> None:
    """Two processes would otherwise draw the same numbers."""
    end, other = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(other, Trace(None, 1.0, 0.0).trace_id.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(end, 100).decode() != Trace(None, 1.0, 0.0).trace_id
    os.close(end)
    os.close(other)


def test_the_share_of_traces_that_are_sampled() -> None:
    """None, all, and about as many as the ratio says."""
    of = {
        ratio: sum(Trace(None, ratio, 0.0).flags for _ in range(2000)) for ratio in (0.0, 0.5, 1.0)
    }
    assert (of[0.0], of[1.0]) == (0, 2000)
    assert 800 < of[0.5] < 1200
    assert EXPORT_S > 0
