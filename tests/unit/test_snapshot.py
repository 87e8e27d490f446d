"""The metrics of several workers as one page: each by its rule, and exact."""

from __future__ import annotations

import random

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdproxy.app.gauges import CONNECTIONS, TASK_RESTARTS, WORKERS
from pdproxy.deciding.local_admission import PLACES
from pdproxy.fleet.gauges import NODE_UP
from pdproxy.observe.events import Evicted, LegFailed, LoopBeat
from pdproxy.observe.metrics import Metrics
from pdproxy.observe.snapshot import Snapshot, decode, encode, merged, of_process, page_of
from pdproxy.serving.kv.custodian import KV_HANDLE_AGE


def _samples(page: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def _counted(seed: int, count: int) -> list[object]:
    chance = random.Random(seed)
    return [
        chance.choice([Evicted("queue"), Evicted("body"), LoopBeat(chance.random(), False, 0.0)])
        for _ in range(count)
    ]


def test_counts_and_buckets_add_up_to_those_of_one_process() -> None:
    """Whatever was counted where, also where it was sent on the way."""
    one, parts = Metrics(), [Metrics() for _ in range(3)]
    for number, event in enumerate(_counted(3, 500)):
        one.notify(event)  # type: ignore[arg-type]
        parts[number % 3].notify(event)  # type: ignore[arg-type]
    together = merged(decode(encode(part.snapshot())) for part in parts)
    assert together.workers == 3
    wanted, found = _samples(page_of(one.snapshot())), _samples(page_of(together))
    assert found.keys() == wanted.keys()
    assert found == pytest.approx(wanted)


def test_what_dead_workers_have_counted_stays() -> None:
    """Their gauges do not."""
    part = Metrics()
    part.show(CONNECTIONS, lambda: [((), 7)])
    part.notify(Evicted("queue"))
    past = merged([part.snapshot().without_levels(), part.snapshot().without_levels()])
    page = _samples(page_of(merged([part.snapshot(), past])))
    assert page["pdproxy_evicted_total", (("what", "queue"),)] == 3
    assert page["pdproxy_connections", ()] == 7
    assert merged([part.snapshot(), past]).workers == 1


def test_what_dead_workers_have_counted_of_an_engine_goes_with_it() -> None:
    """Once no worker that lives has it. What they have counted of engines that were gone before
    stays.
    """
    dead, first, second = Metrics(), Metrics(), Metrics()
    for one in (dead, first, second):
        one.add_node("http://d:1", "decode")
    for engine in ("http://d:1", "http://gone:1"):
        dead.notify(LegFailed("id", engine, "kv", "no", will_retry=False))
    tasks = [(("heartbeat",), 2.0), (("probe http://d:1",), 1.0)]
    dead.show(TASK_RESTARTS, lambda: tasks)
    past = dead.snapshot().without_levels()

    def failures(engine: str) -> float | None:
        here = [first.snapshot(), second.snapshot()]
        page = _samples(page_of(merged([*here, past.without_gone(here)])))
        return page.get(("pdproxy_leg_failures_total", (("node", engine), ("phase", "kv"))))

    assert failures("http://d:1") == 1
    first.drop_node("http://d:1")
    assert failures("http://d:1") == 1
    second.drop_node("http://d:1")
    assert failures("http://d:1") is None
    assert failures("removed") == 1
    here = [first.snapshot(), second.snapshot()]
    page = page_of(merged([*here, past.without_gone(here)]))
    assert b"http://d:1" not in page
    assert b'task="heartbeat"} 2.0' in page
    assert past.without_gone(here).histograms == past.histograms


def test_each_gauge_by_its_rule() -> None:
    series = {
        CONNECTIONS.name: (3.0, 4.0, 7.0),
        KV_HANDLE_AGE.name: (3.0, 4.0, 4.0),
        PLACES.name: (3.0, 4.0, 3.0),
        NODE_UP.name: (1.0, 0.0, 0.5),
        WORKERS.name: (1.0, 1.0, 2.0),
    }
    both = [
        Snapshot({name: {("x",): values[at]} for name, values in series.items()}, {})
        for at in range(2)
    ]
    found = merged(both).values
    assert {name: one["x",] for name, one in found.items()} == {
        name: values[2] for name, values in series.items()
    }
    alone = Snapshot({NODE_UP.name: {("new",): 1.0}}, {})
    assert merged([*both, alone]).values[NODE_UP.name] == {("x",): 0.5, ("new",): 1.0}


def test_the_processes_own_metrics_add_up() -> None:
    """CPU time is a sum, a version is not."""
    own = of_process()
    found = {
        one.name: one for one in merged([Snapshot({}, {}, own), Snapshot({}, {}, own)]).process
    }
    before = {one.name: one for one in own}
    assert (
        found["process_cpu_seconds"].samples[0][2]
        == 2 * before["process_cpu_seconds"].samples[0][2]
    )
    assert found["python_info"].samples == before["python_info"].samples
    assert (
        found["process_start_time_seconds"].samples == before["process_start_time_seconds"].samples
    )
    page = page_of(Snapshot({}, {}, own)).decode()
    assert "process_cpu_seconds_total" in page


def test_a_metric_that_only_another_process_knows_stays() -> None:
    """A plugin that is imported late: its numbers add up, and no page of another process fails
    because of it.
    """
    one = Snapshot({"pdproxy_unknown_total": {("x",): 1.0}, WORKERS.name: {(): 1.0}}, {})
    assert merged([one, one]).values == {
        "pdproxy_unknown_total": {("x",): 2.0},
        WORKERS.name: {(): 2.0},
    }
    assert one.without_gone([one]).values == one.values
    assert one.without_levels().values == {}
    assert b"unknown" not in page_of(one)
