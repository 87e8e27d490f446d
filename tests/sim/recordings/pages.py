"""Metrics pages: what the simulator shows must be there on the recorded page, under the same names,
types and labels.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.sim.recordings.reading import read
from tests.sim.recordings.stage import Stage
from tests.sim.shape import Seen, differences, unlike

ROLES: dict[str, Literal["aggregated", "prefill", "decode"]] = {
    "agg_metrics": "aggregated",
    "misc_metrics_P": "prefill",
    "misc_metrics_D": "decode",
}
_OWN_LABELS = {
    "vllm:cache_config_info": ("block_size", "enable_prefix_caching", "engine", "num_gpu_blocks")
}
"""Metrics that the simulator shows with some of their labels."""

Labels = tuple[tuple[str, str], ...]


async def replay(stage: Stage, name: str) -> None:
    """Compare two pages in all but the order of the headers and the bounds of the buckets:
    `unlike_heads`, `unlike_bounds`.
    """
    wanted, got = await _pages(stage, name)
    found = differences(_in_order(replace(wanted, body=got.body)), _in_order(got), block_size=1)
    found += _unlike_families(wanted, got, _samples)
    assert not found, "\n".join(["unlike the recording:", *found])


async def unlike_heads(stage: Stage, name: str) -> list[str]:
    """Return how the heads of two pages differ."""
    wanted, got = await _pages(stage, name)
    return differences(replace(wanted, body=got.body), got, block_size=1)


async def unlike_bounds(stage: Stage, name: str) -> list[str]:
    """Return how the bounds of the histograms' buckets differ."""
    return _unlike_families(*await _pages(stage, name), _bounds)


async def _pages(stage: Stage, name: str) -> tuple[Seen, Seen]:
    recorded = read(name)
    assert recorded.answer is not None
    return recorded.answer, await stage.ask(await stage.engine(ROLES[name]), recorded.sent)


def _in_order(page: Seen) -> Seen:
    return replace(page, headers=dict(sorted((page.headers or {}).items())))


def _unlike_families(wanted: Seen, got: Seen, reading: Callable[[Metric], object]) -> list[str]:
    recorded, shown = _families(wanted), _families(got)
    found = [f"{name} is not on the recorded page" for name in shown if name not in recorded]
    for name in [name for name in shown if name in recorded]:
        found += unlike(recorded[name].type, shown[name].type, f"type of {name}")
        found += unlike(reading(recorded[name]), reading(shown[name]), name)
    return found


def _families(page: Seen) -> dict[str, Metric]:
    return {metric.name: metric for metric in text_string_to_metric_families(page.body.decode())}


def _samples(metric: Metric) -> list[tuple[str, Labels]]:
    """The names and labels of a metric's samples. When a counter began is no part of it."""
    kept = _OWN_LABELS.get(metric.name)
    found = set()
    for one in metric.samples:
        if not one.name.endswith("_created"):
            labels = {
                key: value for key, value in one.labels.items() if kept is None or key in kept
            }
            found.add(
                (
                    one.name,
                    tuple(sorted((labels | {"le": "any"} if "le" in labels else labels).items())),
                )
            )
    return sorted(found)


def _bounds(metric: Metric) -> list[float]:
    return sorted({float(one.labels["le"]) for one in metric.samples if "le" in one.labels})
