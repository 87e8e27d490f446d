"""The page of metrics: prometheus-client's text, made in many turns of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from pdproxy.app.heartbeat import LOOP_LATENESS
from pdproxy.app.shown import Shown
from pdproxy.observe.description import Description, Label, MetricKind
from pdproxy.observe.events import LoopBeat
from pdproxy.observe.metrics import Metrics
from pdproxy.observe.page import AT_ONCE, Family, portions, whole
from pdproxy.observe.snapshot import Buckets, Histograms, families, family, of_process, page_of

VALUES = st.floats() | st.integers(-(10**20), 10**20)
WORDS = st.text(st.sampled_from('ab"\\\né{},= ') | st.characters(exclude_categories=["Cs"]))


class Given(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self.metrics = metrics

    def collect(self) -> list[Metric]:
        return self.metrics


def by_library(families: Iterable[Family]) -> bytes:
    metrics = []
    for one in families:
        metrics.append(Metric(one.name.removesuffix("_total"), one.text, one.kind))
        metrics[-1].samples = list(one.samples)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Given(metrics))
    return generate_latest(registry)


@given(WORDS, st.dictionaries(st.tuples(WORDS, WORDS), VALUES))
def test_it_is_the_librarys_text(words: str, values: dict[tuple[str, str], float]) -> None:
    found = [
        Family(name, kind, words, [Sample(name, {"z": z, "a": a}, values[z, a]) for z, a in values])
        for name, kind in (("bananas_total", "counter"), ("ripe", "gauge"))
    ]
    assert whole(found) == by_library(found)


def test_all_metrics_are_the_librarys_text() -> None:
    """Also the library's own histogram of what a histogram of pdproxy has counted."""
    metrics = Metrics()
    metrics.notify(LoopBeat(0.3, False, 0.0))
    snapshot = metrics.snapshot()
    snapshot.process = of_process()
    assert page_of(snapshot) == by_library(families(snapshot))
    text = "Lateness"
    mine = Description(
        "seconds", MetricKind.HISTOGRAM, text, "seconds", (Label("of", (), "x"),), (0.5, 2.0)
    )
    series: Histograms = {("x",): Buckets([1, 3, 5], 7.5)}
    library = HistogramMetricFamily("seconds", text, labels=("of",))
    library.add_metric(("x",), [("0.5", 1), ("2", 4), ("+Inf", 9)], 7.5)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Given([library]))
    assert whole([family(mine, series)]) == generate_latest(registry)


def test_a_histogram_is_of_the_moment_in_which_it_is_asked_for() -> None:
    metrics = Metrics()
    metrics.notify(LoopBeat(0.3, False, 0.0))
    (found,) = (one for one in metrics.collect() if one.name == LOOP_LATENESS.name)
    metrics.notify(LoopBeat(0.3, False, 0.0))
    counts = {sample.value for sample in found.samples if sample.name.endswith("_count")}
    assert counts == {1}


async def test_a_long_page_leaves_turns_to_others() -> None:
    metrics, turns = Metrics(), 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    samples = [Sample("bananas", {"of": str(number)}, number) for number in range(20 * AT_ONCE)]
    many = [Family("bananas", "gauge", "Bananas", samples) for _ in range(2)]
    metrics.collect = lambda: iter(many)  # type: ignore[method-assign]
    counting = asyncio.create_task(count())
    nothing = cast("Any", None)
    page = await Shown(nothing, nothing, metrics, nothing).metrics()
    counting.cancel()
    assert page.count(b"\nbananas{") == 40 * AT_ONCE
    assert turns >= 40
    assert max(portion.count("\n") for portion in portions(many)) <= AT_ONCE + 1
