"""The table of metrics and the page agree, series are there from the start, and those of removed
engines go.
"""

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from pdproxy import __version__
from pdproxy.app.heartbeat import LOOP_LATENESS
from pdproxy.kit.errors import Fault, RefusalReason, Wait
from pdproxy.observe.description import REMOVED, MetricKind
from pdproxy.observe.events import ALONE, WAITS
from pdproxy.observe.requests import OUTCOMES, REASONS
from pdproxy.serving.kv.custodian import ENDS, KV_HANDLES
from pdproxy.serving.kv.custody import CustodyState, End
from pdproxy.serving.kv.ready import NOTICES
from pdproxy.wire.notices import NoticeEvent
from pdproxy.wire.route_form import Alone
from tests.fakes import answers, scripts
from tests.fakes.client import bearer
from tests.fakes.engine import Reply
from tests.fakes.world import COMPLETIONS, completion, until, world
from tests.proxy.test_engines_come_and_go import add
from tests.reference.metrics import METRICS


async def _rest(reply: Reply) -> None:
    await reply.pieces(answers.end())
    await reply.finish()


def test_the_tables_label_values_are_those_of_the_code() -> None:
    """What the code can count has its zero from the start, and nothing else."""

    def values(pairs: tuple[tuple[str, str], ...]) -> set[str]:
        return {value for value, _ in pairs}

    assert values(OUTCOMES) == {"ok", *(fault.value for fault in Fault)}
    assert {reason for reason, _, _ in REASONS} == set(RefusalReason)
    assert values(ALONE) == {one.value for one in Alone}
    assert values(WAITS) == {wait.value for wait in Wait}
    assert values(ENDS) == {end.value for end in End}
    assert set(NOTICES) == {event.value for event in NoticeEvent}
    assert values(KV_HANDLES.labels[0].values) == {state.value for state in CustodyState}


async def test_the_page_has_the_metrics_of_the_table_and_no_others() -> None:
    """After traffic of all sorts: names, types, labels, and the values of labels that are known."""
    async with world(auth={"api_keys": ("mine",)}) as w:
        for fields in ({"stream": True}, {}, {"n": 2, "temperature": 1}, {"model": "nope"}):
            await w.ask(COMPLETIONS, completion(**fields), bearer("mine"))
        await w.ask(COMPLETIONS, completion())
        await w.probe()
        families = {
            family.name: family
            for family in text_string_to_metric_families((await w.get("/metrics")).body.decode())
            if family.name.startswith("pdproxy_")
        }
    assert {one.name.removesuffix("_total") for one in METRICS} == set(families)
    for one in METRICS:
        family = families[one.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (one.kind.value, one.text)
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "le"}
            assert set(labels) == set(one.label_names), one.name
            for label in one.labels:
                assert not label.values or labels[label.name] in label.known, one.name


def test_the_table_describes_everything() -> None:
    """Each metric has a text, a unit, and labels with a meaning; names follow Prometheus' rules."""
    assert len({one.name for one in METRICS}) == len(METRICS)
    for one in METRICS:
        assert one.name.startswith("pdproxy_")
        assert one.text
        assert one.unit
        assert one.name.endswith("_total") == (one.kind is MetricKind.COUNTER), one.name
        assert bool(one.bounds) == (one.kind is MetricKind.HISTOGRAM), one.name
        for label in one.labels:
            assert bool(label.values) != bool(label.text), (one.name, label.name)


async def test_counters_begin_with_zero() -> None:
    """Before anything has happened, each series whose labels are known is there: a rate over its
    first event is right.
    """
    async with world() as w:
        page = (await w.get("/metrics")).body.decode()
        samples = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }
        for one in METRICS:
            for labels in one.series if one.kind is not MetricKind.GAUGE else ():
                name = one.name if one.kind is MetricKind.COUNTER else f"{one.name}_count"
                key = name, *sorted(zip(one.label_names, labels, strict=True))
                assert key in samples
                assert samples[key] == 0 or one is LOOP_LATENESS, key
        for engine, phase in ((w.prefill[0], "prefill"), (w.decode[0], "decode")):
            assert (
                samples["pdproxy_leg_failures_total", ("node", engine.url), ("phase", phase)] == 0
            )
            assert samples["pdproxy_node_legs_total", ("node", engine.url), ("phase", phase)] == 0
        await w.ask(COMPLETIONS, completion())
        await w.ended()
        page = w.page().decode()
        found = [line for line in page.splitlines() if line.startswith("pdproxy_requests_total{")]
        assert len(found) == len(OUTCOMES)
        assert sum(line.endswith(" 0.0") for line in found) == len(found) - 1


async def test_the_process_and_its_versions_are_on_the_page() -> None:
    """CPU time, memory and open files of the process; the version that runs."""
    async with world() as w:
        assert w.metric("process_cpu_seconds_total") > 0
        assert w.metric("process_resident_memory_bytes") > 0
        assert w.metric("process_open_fds") > 0
        assert w.metric("python_gc_collections_total", generation="2") >= 0
        assert w.metric("pdproxy_build_info", version=__version__, connector="nixl") == 1


async def test_series_of_a_removed_engine_are_dropped() -> None:
    """Engines come and go for ever; what still ends at one that has gone is counted under one
    name.
    """
    async with world() as w:
        other = await add(w)
        await until(lambda: w.proxy.engines[other.url].in_ledger.up)
        for _ in range(4):
            await w.ask(COMPLETIONS, completion(stream=True))
        await w.ended(4)
        page = w.page().decode()
        assert w.metric("pdproxy_node_legs_total", node=other.url, phase="decode") == 2
        go = asyncio.Event()
        for engine in w.decode:
            engine.script(scripts.after_word(go, _rest))
        clients = [await w.client() for _ in range(2)]
        for client in clients:
            client.post(COMPLETIONS, completion(stream=True))
        heads = [await client.head() for client in clients]
        w.proxy.setup.remove(other.url)
        go.set()
        for client, begun in zip(clients, heads, strict=True):
            await client.rest(begun)
        await w.quiet()
        page = w.page().decode()
        assert other.url not in page
        assert w.metric("pdproxy_node_legs_total", node=REMOVED, phase="decode") == 1
        assert w.metric("pdproxy_phase_seconds_count", phase="decode") == 6
