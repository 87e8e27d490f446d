"""Traces: which spans a request has and what they hang on, what engines get of them, and which
traces are exported.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdproxy.app.compose import Proxy
from pdproxy.observe import trace_export
from pdproxy.observe.traces import decode_traces, encode_batch
from pdproxy.settings.schema import Settings
from pdproxy.settings.tracing import Tracing
from tests.fakes import scripts
from tests.fakes.collector import Span, collector, made_of
from tests.fakes.pool import pool
from tests.fakes.process import PATIENCE, served
from tests.fakes.tokenizer import Shelf, SimTokenizer
from tests.fakes.world import (
    CHAT,
    COMPLETIONS,
    PROMPT,
    TEXT,
    chat,
    completion,
    until,
    world,
)
from tests.proxy import test_connectors as connectors
from tests.proxy.test_continued import UNBROKEN, cut
from tests.proxy.test_tokenize import always, proven

NOBODY = "http://127.0.0.1:9"
"""No collector is there."""
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = (("traceparent", f"00-{TRACE}-{SPAN}-{flags}") for flags in ("01", "00"))


def traced(url: str = NOBODY, **values: object) -> Callable[[Settings], Settings]:
    """Settings with traces, all of which are sampled unless `values` says other."""

    def adjust(settings: Settings) -> Settings:
        tracing = Tracing(**{"endpoint": url, "sample_ratio": 1.0, **values})  # type: ignore[arg-type]
        observe = msgspec.structs.replace(settings.observe, tracing=tracing)
        return msgspec.structs.replace(settings, observe=observe)

    return adjust


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave traces in the queue."""
    monkeypatch.setattr(trace_export, "EVERY", 3600.0)


def traces(*proxies: Proxy) -> list[list[Span]]:
    """The spans of each trace that waits."""
    found = []
    for proxy in proxies:
        assert proxy.tracing is not None
        batch = proxy.tracing.export.queue.take()
        found += [made_of(one) for one in decode_traces(encode_batch(batch))]
    return found


def named(spans: Sequence[Span], name: str) -> list[Span]:
    """The spans of one name, in the order of their beginning."""
    return sorted((one for one in spans if one.name == name), key=lambda one: one.begin)


def sent(*engines: Any) -> list[str | None]:
    """The `traceparent` of each request of a client that engines have got."""
    return [one.header("traceparent") for engine in engines for one in engine.requests]


async def test_all_spans_of_a_split_stream_reach_the_collector() -> None:
    """Each hangs on the right one and lies within it in time; engines hang theirs on the legs, and
    the request hangs on the client's span.
    """
    async with collector() as c:

        def adjust(settings: Settings) -> Settings:
            return traced(c.url)(always()(settings))

        async with world(adjust=adjust, library=Shelf(model=SimTokenizer())) as w:
            await proven(w)
            headers = [SAMPLED, ("tracestate", "a=b"), ("baggage", "tenant=x")]
            assert (await w.ask(CHAT, chat(stream=True), headers)).status == 200
            await until(lambda: any(one.trace_id == TRACE for one in c.spans))
            spans = [one for one in c.spans if one.trace_id == TRACE]
            by_name = {one.name: one for one in spans}
            assert sorted(by_name) == sorted(
                ["chat tiny", "queue", "tokenize", "prefill", "decode", "kv_wait"]
            )
            assert len(spans) == len(by_name) == len({one.span_id for one in spans})
            root, prefill, decode = (by_name[name] for name in ("chat tiny", "prefill", "decode"))
            assert (root.kind, root.parent) == ("server", SPAN)
            assert (prefill.kind, decode.kind) == ("client", "client")
            parents = {name: one.parent for name, one in by_name.items() if one is not root}
            kv_wait = parents.pop("kv_wait")
            assert (set(parents.values()), kv_wait) == ({root.span_id}, decode.span_id)
            for one in spans:
                above = decode if one.name == "kv_wait" else root
                assert above.begin <= one.begin <= one.end <= above.end
            order = [by_name[name] for name in ("queue", "tokenize", "prefill", "decode")]
            assert all(one.end <= other.begin for one, other in pairwise(order))
            assert decode.events["first data"] == by_name["kv_wait"].end
            assert root.values["gen_ai.usage.output_tokens"] == 4
            assert root.values["gen_ai.request.model"] == "tiny"
            assert root.values["gen_ai.operation.name"] == "chat"
            assert decode.values["server.port"] == w.decode[0].port
            for engine, leg in ((w.prefill[0], prefill), (w.decode[0], decode)):
                request = engine.requests[-1]
                assert request.header("traceparent") == leg.as_parent
                assert request.header("tracestate") == "a=b"
                assert request.header("baggage") == "tenant=x"
            assert set(c.paths) == {"/v1/traces"}
            assert {one["service.name"] for one in c.services} == {"pdproxy"}
            await until(lambda: w.metric("pdproxy_traces_total", result="exported") >= 1)


@pytest.mark.usefixtures("kept")
async def test_each_attempt_is_a_span_and_failures_are_always_exported() -> None:
    """A request whose first prefill engine has failed is exported although nothing is sampled, with
    both attempts; each has got a `traceparent` of its own. One without a failure is not exported.
    """
    async with world(prefill=2, adjust=traced(sample_ratio=0.0)) as w:
        w.prefill[1].script(scripts.reset)
        for _ in range(2):
            assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        await w.ended(2)
        (spans,) = traces(*w.workers)
        failed, good = named(spans, "prefill")
        assert [one.values["pdproxy.attempt"] for one in (failed, good)] == [1, 2]
        assert failed.error is not None
        assert w.prefill[1].url in failed.error
        assert (good.error, named(spans, "text_completion tiny")[0].error) == (None, None)
        (decode,) = named(spans, "decode")
        for engine, leg in ((w.prefill[1], failed), (w.prefill[0], good), (w.decode[0], decode)):
            of_leg = [one for one in sent(engine) if leg.trace_id in str(one)]
            assert of_leg == [f"00-{leg.trace_id}-{leg.span_id}-00"], "not sampled"


@pytest.mark.usefixtures("kept")
async def test_which_traces_are_exported() -> None:
    """A client decides by its `traceparent`; errors are always exported, but not what is wrong with
    a request.
    """
    async with world(adjust=traced(sample_ratio=0.0)) as w:
        for headers in ([SAMPLED], [UNSAMPLED], []):
            await w.ask(COMPLETIONS, completion(), headers)
        await w.ask(COMPLETIONS, b"{", [])
        await w.ended(4)
        assert [one[0].trace_id for one in traces(*w.workers)] == [TRACE]
        for engine in w.decode:
            w.mark_down(engine, "test")
        assert (await w.ask(COMPLETIONS, completion(), [UNSAMPLED])).status == 503
        await w.ended(5)
        ((root, *_),) = traces(*w.workers)
        assert (root.error is not None, root.values["error.type"]) == (True, "no_engine")


@pytest.mark.usefixtures("kept")
async def test_slow_requests_are_always_exported() -> None:
    """Those that take as long as the setting says."""
    async with world(adjust=traced(sample_ratio=0.0, slow=1e-9)) as w:
        await w.ask(COMPLETIONS, completion())
        await w.ended()
        assert len(traces(*w.workers)) == 1


@pytest.mark.usefixtures("kept")
async def test_a_stream_that_goes_on_elsewhere() -> None:
    """The pause is a span, and both decode legs are."""
    async with world(decode=2, adjust=traced(), limits=UNBROKEN) as w:
        await cut(w, "eof@mid_stream:events=3", COMPLETIONS, completion(stream=True, max_tokens=16))
        (spans,) = [one for one in traces(*w.workers) if named(one, "continuation")]
        first, second = named(spans, "decode")
        (pause,) = named(spans, "continuation")
        assert first.begin < first.end <= second.begin < pause.end < second.end
        assert first.begin < pause.begin < pause.end
        assert (first.error is None, second.error) == (False, None)
        assert ("first data" in first.events, "first data" in second.events) == (True, False)
        assert pause.values["pdproxy.continuation.reason"] == "eof"
        root = named(spans, "text_completion tiny")[0]
        assert (root.values["pdproxy.continued"], root.error) == (1, None)


@pytest.mark.usefixtures("kept")
async def test_prompts_of_a_list_have_legs_of_their_own() -> None:
    """Each leg of a list has its own `traceparent`, though they run at the same time."""
    async with world(adjust=traced()) as w:
        await w.ask(COMPLETIONS, completion(prompt=[PROMPT, PROMPT + "x", PROMPT + "y"]))
        await w.ended()
        (spans,) = traces(*w.workers)
        for name, engine in (("prefill", w.prefill[0]), ("decode", w.decode[0])):
            legs = named(spans, name)
            assert len(legs) == 3
            assert sorted(sent(engine)) == sorted(leg.as_parent for leg in legs)  # type: ignore[type-var]


@pytest.mark.usefixtures("kept")
async def test_a_route_that_one_engine_serves_whole() -> None:
    """Its leg is a span, too."""
    async with world(adjust=traced()) as w:
        await w.ask("/v1/embeddings", {"model": "tiny", "input": "a"}, [SAMPLED])
        await w.ended()
        (spans,) = traces(*w.workers)
        (leg,) = named(spans, "alone")
        others = [one for engine in w.engines for one in engine.sim.journal.others]
        got = [one.header("traceparent") for one in others if one.path == "/v1/embeddings"]
        assert got == [leg.as_parent]
        assert leg.parent == named(spans, "embeddings tiny")[0].span_id


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("connector", ["nixl-push", "mooncake"])
async def test_legs_that_run_at_once(connector: str) -> None:
    """Both have their own `traceparent`, though both are open at the same time."""
    async with pool(connector, adjust=traced()) as pair:
        for _ in range(2):
            await pair.ask(connectors.COMPLETIONS, connectors.completion())
        spans = traces(*pair.world.workers)[-1]
        (prefill,), (decode,) = named(spans, "prefill"), named(spans, "decode")
        assert prefill.begin <= decode.begin <= prefill.end
        for engine, leg in ((pair.p, prefill), (pair.d, decode)):
            (got,) = [one for one in sent(engine) if leg.trace_id in str(one)]
            assert got == leg.as_parent


async def test_each_worker_exports_its_own_and_log_lines_show_ids(tmp_path: Path) -> None:
    """Two workers are two instances of the service. Access lines, and those of failed legs, have
    the ids of requests' spans.
    """
    path = tmp_path / "log"
    with path.open("wb") as log:
        async with (
            collector() as c,
            served(log, workers=2, log_format="json", collector=c.url) as proxy,
        ):
            proxy.prefill.script(scripts.reset)
            async with asyncio.timeout(PATIENCE):
                while len({one["service.instance.id"] for one in c.services}) < 2:
                    assert (await proxy.ask("POST", COMPLETIONS, completion())).status == 200
                    await asyncio.sleep(0.05)
            roots = {(one.trace_id, one.span_id) for one in c.spans if one.kind == "server"}
            assert roots
            await until(lambda: roots <= shown(path, "request"))
            (failed,) = shown(path, "leg failed")
            assert failed in shown(path, "request")


def shown(path: Path, message: str) -> set[tuple[str, str]]:
    """The ids that a log shows in lines of one message."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return {(one["trace_id"], one["span_id"]) for one in lines if one["message"] == message}


@pytest.mark.parametrize(
    "sent_value",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01 \xe9",
        "x" * 20_000,
    ],
)
@pytest.mark.usefixtures("kept")
async def test_a_header_that_is_not_valid_begins_a_trace(sent_value: str) -> None:
    """Nothing of it goes on, nor does the state that belongs to it."""
    async with world(adjust=traced()) as w:
        await w.ask(COMPLETIONS, completion(), [("traceparent", sent_value), ("tracestate", "a=b")])
        await w.ended()
        ((root, *_),) = traces(*w.workers)
        assert (root.parent, root.trace_id != TRACE) == ("", True)
        for engine in w.engines:
            (request,) = engine.requests
            assert re.fullmatch(
                rf"00-{root.trace_id}-[0-9a-f]{{16}}-01", request.header("traceparent") or ""
            )
            assert request.header("tracestate") is None


async def test_a_collector_that_is_away_costs_no_request_anything() -> None:
    """Nothing waits for it; traces that are not taken are counted."""
    async with world(adjust=traced()) as w:
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        await until(lambda: w.metric("pdproxy_traces_total", result="failed") == 1)
