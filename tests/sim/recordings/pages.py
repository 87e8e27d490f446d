"""Metrics pages: what the simulator shows must be there on the recorded page, under the same names, types and labels."""

from dataclasses import replace
from typing import Literal

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.sim.recordings.reading import read
from tests.sim.recordings.stage import Stage
from tests.sim.shape import Seen, differences, unlike

_OWN_LABELS = {"vllm:cache_config_info": ("block_size", "enable_prefix_caching", "engine", "num_gpu_blocks")}
"""Metrics that the simulator shows with some of their labels."""


async def replay(stage: Stage, name: str, *, role: Literal["aggregated", "prefill", "decode"]) -> None:
    """Compare two pages."""
    recorded = read(name)
    assert recorded.answer is not None
    got = await stage.ask(await stage.engine(role), recorded.sent)
    found = differences(replace(recorded.answer, body=got.body), got, block_size=1)
    wanted, shown = _families(recorded.answer), _families(got)
    found += [f"{name} is not on the recorded page" for name in shown if name not in wanted]
    for name in shown.keys() & wanted.keys():
        found += unlike(wanted[name].type, shown[name].type, f"type of {name}")
        one, two = _samples(wanted[name]), _samples(shown[name])
        found += [f"{name}: {sorted(two - one)} beyond the recorded, lacks {sorted(one - two)}"] if one != two else []
    assert not found, "\n".join(["unlike the recording:", *found])


def _families(page: Seen) -> dict[str, Metric]:
    return {metric.name: metric for metric in text_string_to_metric_families(page.body.decode())}


def _samples(metric: Metric) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    """The names and labels of a metric's samples. When a counter began is no part of it."""
    kept = _OWN_LABELS.get(metric.name)
    return {
        (one.name, tuple(sorted((key, value) for key, value in one.labels.items() if kept is None or key in kept)))
        for one in metric.samples
        if not one.name.endswith("_created")
    }
