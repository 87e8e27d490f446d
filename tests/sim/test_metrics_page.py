"""The metrics page is written as prometheus-client writes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pdproxy_lab.sim.api.metrics import page
from pdproxy_lab.sim.engine import SimEngine
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.stats import Histogram

MODEL = 'a "model" \\ with\nall'
VALUES = (0.0004, 1, 3.5, 123_456, 2_000_000, 4e9, 1e22)


class Parsed:
    """What prometheus-client has read."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))

    def collect(self) -> Iterable[Metric]:
        return self.families


def written_again(text: bytes) -> bytes:
    registry = CollectorRegistry()
    registry.register(Parsed(text.decode()))
    return generate_latest(registry)


@pytest.mark.parametrize("work", ["none", "some"])
@pytest.mark.parametrize(
    "facts",
    [
        {"role": "prefill"},
        {"role": "decode", "data_parallel_size": 2},
        {"role": "aggregated"},
        {"role": "decode", "connector": "mooncake"},
    ],
)
def test_it_is_written_as_prometheus_client_writes_it(facts: dict[str, Any], work: str) -> None:
    engine = SimEngine(SimFacts(model=MODEL, **facts))
    for rank, stats in enumerate(engine.rank_stats) if work == "some" else ():
        for number, name in enumerate(stats.__dataclass_fields__):
            one = getattr(stats, name)
            if isinstance(one, Histogram):
                one.counts = [10**place for place in range(len(one.counts))]
                one.total = VALUES[number % len(VALUES)]
            elif isinstance(one, int | float):
                setattr(stats, name, VALUES[(number + rank) % len(VALUES)])
        stats.finished["stop"] = 7
    text = page(engine)
    assert written_again(text) == text
    families = {family.name: family for family in Parsed(text.decode()).families}
    assert {sample.labels["model_name"] for sample in families["vllm:prompt_tokens"].samples} == {
        MODEL
    }
    assert len(families["vllm:num_requests_running"].samples) == len(engine.rank_stats)


def test_buckets_are_cumulated() -> None:
    engine = SimEngine(SimFacts())
    engine.stats.queue.observe(0.4)
    engine.stats.queue.observe(1.2)
    engine.stats.queue.observe(1e6)
    family = next(
        one
        for one in Parsed(page(engine).decode()).families
        if one.name == "vllm:request_queue_time_seconds"
    )
    found = {
        sample.labels.get("le", sample.name.rpartition("_")[2]): sample.value
        for sample in family.samples
    }
    assert (
        found["0.3"],
        found["0.5"],
        found["1.0"],
        found["1.5"],
        found["7680.0"],
        found["+Inf"],
    ) == (
        0,
        1,
        1,
        2,
        2,
        3,
    )
    assert (found["count"], found["sum"]) == (3, 1e6 + 1.6)
