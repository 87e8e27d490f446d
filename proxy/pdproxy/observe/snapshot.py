"""All metrics of a process at one moment: as numbers that can be sent to another process, added up there, and shown as a page.

Owns how the numbers of several workers become one page: counters and histograms are sums; `RULES` says it for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import MappingProxyType

import msgspec
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pdproxy.observe.catalog import METRICS, REMOVED, TASK_RESTARTS
from pdproxy.observe.description import NODE, Kind

Series = dict[tuple[str, ...], float]
"""Values by those of their labels."""


class Rule(Enum):
    """How the numbers of several workers become one."""

    SUM = "sum"
    MOST = "most"
    LEAST = "least"
    MEAN = "mean"


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "pdproxy_body_readers": Rule.SUM,
        "pdproxy_build_info": Rule.MOST,
        "pdproxy_capacity": Rule.MOST,
        "pdproxy_connections": Rule.SUM,
        "pdproxy_dns_age_seconds": Rule.MOST,
        "pdproxy_dns_engines": Rule.MOST,
        "pdproxy_engines_kept_for_prefill": Rule.MOST,
        "pdproxy_held_bytes": Rule.SUM,
        "pdproxy_inflight": Rule.SUM,
        "pdproxy_kv_buffer_slots": Rule.SUM,
        "pdproxy_kv_event_age_seconds": Rule.MOST,
        "pdproxy_kv_event_backlog_bytes": Rule.SUM,
        "pdproxy_kv_event_sources": Rule.MOST,
        "pdproxy_kv_faults": Rule.MOST,  # what one finds all know
        "pdproxy_kv_handle_age_seconds": Rule.MOST,
        "pdproxy_kv_handles": Rule.SUM,
        "pdproxy_kv_missing_tokens": Rule.MOST,
        "pdproxy_kv_notices_kept": Rule.SUM,
        "pdproxy_kv_ready_waits": Rule.SUM,
        "pdproxy_kv_stuck": Rule.SUM,
        "pdproxy_kv_stuck_age_seconds": Rule.MOST,
        # Each worker follows the settings: one change is counted in all of them.
        "pdproxy_member_changes_total": Rule.MOST,
        "pdproxy_settings_reloads_total": Rule.MOST,
        "pdproxy_node_inflight": Rule.SUM,
        "pdproxy_node_info": Rule.MOST,
        "pdproxy_node_other_requests": Rule.MOST,
        # The part of the workers that see it so.
        "pdproxy_node_state": Rule.MEAN,
        "pdproxy_node_up": Rule.MEAN,
        "pdproxy_state": Rule.MEAN,
        "pdproxy_placement_shared_age_seconds": Rule.MOST,
        "pdproxy_places": Rule.LEAST,  # one number for all; the fewest are in force
        "pdproxy_prediction_error_ratio": Rule.MEAN,
        "pdproxy_prefix_blocks": Rule.MOST,  # each has what all were told
        "pdproxy_prefix_shared_age_seconds": Rule.MOST,
        "pdproxy_queue": Rule.SUM,
        "pdproxy_replicas": Rule.MOST,
        "pdproxy_retries": Rule.SUM,
        "pdproxy_source_age_seconds": Rule.MOST,
        "pdproxy_source_engines": Rule.MOST,
        "pdproxy_tasks": Rule.SUM,
        "pdproxy_suspected": Rule.SUM,
        "pdproxy_time_correction_ratio": Rule.MEAN,
        "pdproxy_tokenize_agrees": Rule.LEAST,
        "pdproxy_tokens_in_flight": Rule.SUM,
        "pdproxy_turn_blocks": Rule.SUM,
        "pdproxy_turn_bytes": Rule.SUM,
        "pdproxy_turns": Rule.SUM,
        "pdproxy_waiting_for_engines": Rule.SUM,
        "pdproxy_worker_restarts_total": Rule.MOST,
        "pdproxy_workers": Rule.SUM,
    }
)
"""Of each gauge, and of counters that are no sums."""
_OF_PROCESS = {
    "process_start_time_seconds": Rule.LEAST,
    "process_max_fds": Rule.LEAST,
    "python_info": Rule.MOST,
}
_DESCRIBED = {one.name: one for one in METRICS}
_OF_NODES = frozenset(one.name for one in METRICS if one.labels and one.labels[0] is NODE)
_PICK: Mapping[Rule, Callable[[float, float], float]] = {
    Rule.SUM: lambda one, other: one + other,
    Rule.MEAN: lambda one, other: one + other,  # divided at the end
    Rule.MOST: max,
    Rule.LEAST: min,
}


class Buckets(msgspec.Struct, array_like=True):
    """One series of a histogram: the counts between its bounds, and the sum of all values."""

    counts: list[int]
    total: float


class OfProcess(msgspec.Struct, array_like=True):
    """A metric of the process or of Python, as `prometheus_client` has it: (name of the sample, labels, value) each."""

    name: str
    kind: str
    text: str
    samples: list[tuple[str, dict[str, str], float]]


class Snapshot(msgspec.Struct, array_like=True):
    """All metrics by their names. `workers`: from how many processes they are."""

    values: dict[str, Series]
    histograms: dict[str, dict[tuple[str, ...], Buckets]]
    process: list[OfProcess] = []
    workers: int = 1

    def without_levels(self) -> Snapshot:
        """Return what counts on after the process is gone: sums of what has happened."""
        counters = {name: series for name, series in self.values.items() if _DESCRIBED[name].kind is Kind.COUNTER}
        cpu = [one for one in self.process if one.kind == "counter"]
        return Snapshot(counters, self.histograms, cpu, 0)

    def without_gone(self, present: Sequence[Snapshot]) -> Snapshot:
        """Return the same without the counts of engines that are in none of the `present` snapshots: they were removed."""
        gone = _nodes([self]) - _nodes(present) - {REMOVED}
        values = dict(self.values)
        for name in _OF_NODES & values.keys():
            values[name] = {labels: value for labels, value in values[name].items() if labels[0] not in gone}
        tasks = values.get(TASK_RESTARTS.name, {})  # tasks of an engine have its URL behind a blank
        values[TASK_RESTARTS.name] = {
            labels: value for labels, value in tasks.items() if labels[0].rpartition(" ")[2] not in gone
        }
        return msgspec.structs.replace(self, values=values)


def _nodes(snapshots: Iterable[Snapshot]) -> set[str]:
    return {labels[0] for one in snapshots for name in _OF_NODES for labels in one.values.get(name, ())}


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Snapshot).decode


def merged(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Return the metrics of several processes as those of one."""
    found = Snapshot({}, {}, [], 0)
    process: dict[str, OfProcess] = {}
    means: dict[str, dict[tuple[str, ...], int]] = {}
    for one in snapshots:
        found.workers += one.workers
        for name, series in one.values.items():
            rule = RULES.get(name, Rule.SUM)
            _merge_series(found.values.setdefault(name, {}), series, rule)
            if rule is Rule.MEAN:
                counts = means.setdefault(name, {})
                for labels in series:
                    counts[labels] = counts.get(labels, 0) + 1
        for name, histograms in one.histograms.items():
            mine = found.histograms.setdefault(name, {})
            for labels, buckets in histograms.items():
                had = mine.get(labels)
                counted = (
                    buckets.counts if had is None else [a + b for a, b in zip(had.counts, buckets.counts, strict=True)]
                )
                mine[labels] = Buckets(counted, buckets.total + (0.0 if had is None else had.total))
        for metric in one.process:
            _merge_process(process, metric)
    for name, counts in means.items():
        series = found.values[name]
        for labels, count in counts.items():
            series[labels] /= count
    found.process = list(process.values())
    return found


def _merge_series(mine: Series, series: Series, rule: Rule) -> None:
    pick = _PICK[rule]
    for labels, value in series.items():
        mine[labels] = pick(mine[labels], value) if labels in mine else value


def _merge_process(process: dict[str, OfProcess], metric: OfProcess) -> None:
    had = process.get(metric.name)
    if had is None:
        process[metric.name] = metric
        return
    pick = _PICK[_OF_PROCESS.get(metric.name, Rule.SUM)]
    samples = {(name, tuple(sorted(labels.items()))): value for name, labels, value in had.samples}
    for name, labels, value in metric.samples:
        key = name, tuple(sorted(labels.items()))
        samples[key] = pick(samples[key], value) if key in samples else value
    process[metric.name] = OfProcess(
        had.name, had.kind, had.text, [(name, dict(labels), value) for (name, labels), value in samples.items()]
    )


def of_process() -> list[OfProcess]:
    """Return this process's own metrics: CPU time, memory, open files; collections of garbage; versions."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in (ProcessCollector, GCCollector, PlatformCollector):
        collector(registry=registry)
    return [
        OfProcess(
            metric.name,
            metric.type,
            metric.documentation,
            [(sample.name, dict(sample.labels), sample.value) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield the metrics of pdproxy as `prometheus_client` shows them, in the order of their table."""
    for one in METRICS:
        names = one.label_names
        if one.kind is Kind.HISTOGRAM:
            histogram = HistogramMetricFamily(one.name, one.text, labels=names)
            for labels, buckets in snapshot.histograms.get(one.name, {}).items():
                histogram.add_metric(labels, _cumulative(one.bounds, buckets.counts), buckets.total)
            yield histogram
            continue
        kind = CounterMetricFamily if one.kind is Kind.COUNTER else GaugeMetricFamily
        family = kind(one.name, one.text, labels=names)
        for labels, number in snapshot.values.get(one.name, {}).items():
            family.add_metric(labels, number)
        yield family


def _cumulative(bounds: Iterable[float], counts: Iterable[int]) -> list[tuple[str, float]]:
    """Return (upper bound, count) pairs, as Prometheus expects them."""
    found: list[tuple[str, float]] = []
    count = 0
    for bound, bucket in zip([*(f"{b:g}" for b in bounds), "+Inf"], counts, strict=True):
        count += bucket
        found.append((bound, count))
    return found


class _Page(Collector):
    """What `generate_latest` asks for the metrics of a snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        yield from families(self._snapshot)
        for one in self._snapshot.process:
            metric = Metric(one.name, one.text, one.kind)
            for name, labels, value in one.samples:
                metric.add_sample(name, labels, value)
            yield metric


def page_of(snapshot: Snapshot) -> bytes:
    """Return a snapshot as a page in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(snapshot))
    return generate_latest(registry)
