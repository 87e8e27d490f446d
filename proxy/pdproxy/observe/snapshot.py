"""All metrics of a process at one moment: as numbers that can be sent to another process, added up
there, and shown as a page.

Owns how the numbers of several workers become one page: histograms are sums, all others follow the
rule of their description.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.samples import Sample

from pdproxy.observe.description import (
    REMOVED,
    TASK,
    Description,
    MergeRule,
    MetricKind,
    declared,
    described,
)
from pdproxy.observe.page import Family, whole

Series = dict[tuple[str, ...], float]
"""Values by those of their labels."""

_OF_PROCESS = {
    "process_start_time_seconds": MergeRule.LEAST,
    "process_max_fds": MergeRule.LEAST,
    "python_info": MergeRule.MOST,
}


class Buckets(msgspec.Struct, array_like=True):
    """One series of a histogram: the counts between its bounds, and the sum of all values."""

    counts: list[int]
    total: float


Histograms = dict[tuple[str, ...], Buckets]
"""Those of one metric, by the values of their labels."""


class OfProcess(msgspec.Struct, array_like=True):
    """A metric of the process or of Python, as `prometheus_client` has it: (name of the sample,
    labels, value) each.
    """

    name: str
    kind: str
    text: str
    samples: list[tuple[str, dict[str, str], float]]


class Snapshot(msgspec.Struct, array_like=True):
    """All metrics by their names. `workers`: from how many processes they are."""

    values: dict[str, Series]
    histograms: dict[str, Histograms]
    process: list[OfProcess] = []
    workers: int = 1

    def without_levels(self) -> Snapshot:
        """Return what counts on after the process is gone: sums of what has happened."""
        counters = {
            one.name: self.values[one.name]
            for one in _of(self.values)
            if one.kind is MetricKind.COUNTER
        }
        cpu = [one for one in self.process if one.kind == "counter"]
        return Snapshot(counters, self.histograms, cpu, 0)

    def without_gone(self, present: Sequence[Snapshot]) -> Snapshot:
        """Return the same without the counts of engines that are in none of the `present`
        snapshots: they were removed.
        """
        gone = _nodes([self]) - _nodes(present) - {REMOVED}
        values = dict(self.values)
        for one in _of(self.values):
            series = self.values[one.name]
            if one.is_of_nodes:
                values[one.name] = {
                    labels: value for labels, value in series.items() if labels[0] not in gone
                }
            elif one.labels[:1] == (TASK,):
                left = {
                    labels: value
                    for labels, value in series.items()
                    if labels[0].rpartition(" ")[2] not in gone
                }
                values[one.name] = left
        return msgspec.structs.replace(self, values=values)


def _nodes(snapshots: Iterable[Snapshot]) -> set[str]:
    series = [
        one.values[metric.name]
        for one in snapshots
        for metric in _of(one.values)
        if metric.is_of_nodes
    ]
    return {labels[0] for one in series for labels in one}


def _of(values: Iterable[str]) -> list[Description]:
    """Return the metrics of these names that are known here."""
    return [one for name in values if (one := described(name)) is not None]


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Snapshot).decode


class Merging:
    """The metrics of several processes as those of one, added process by process."""

    def __init__(self) -> None:
        """Make one without processes."""
        self._found = Snapshot({}, {}, [], 0)
        self._process: dict[str, OfProcess] = {}
        self._means: dict[str, dict[tuple[str, ...], int]] = {}

    def add(self, one: Snapshot) -> None:
        """Add the metrics of one process."""
        found = self._found
        found.workers += one.workers
        for name, series in one.values.items():
            known = described(name)
            rule = MergeRule.SUM if known is None else known.workers
            _merge_series(found.values.setdefault(name, {}), series, rule)
            if rule is MergeRule.MEAN:
                counts = self._means.setdefault(name, {})
                for labels in series:
                    counts[labels] = counts.get(labels, 0) + 1
        for name, histograms in one.histograms.items():
            mine = found.histograms.setdefault(name, {})
            for labels, buckets in histograms.items():
                had = mine.get(labels)
                counted = (
                    buckets.counts
                    if had is None
                    else [a + b for a, b in zip(had.counts, buckets.counts, strict=True)]
                )
                mine[labels] = Buckets(counted, buckets.total + (0.0 if had is None else had.total))
        for metric in one.process:
            _merge_process(self._process, metric)

    def add_gone(self, one: Snapshot) -> None:
        """Add what is left of a process that has ended, without engines that no process has that
        was added before: they were removed.
        """
        self.add(one.without_gone([self._found]))

    def whole(self) -> Snapshot:
        """Return the sum. Nothing is added to it any more."""
        for name, counts in self._means.items():
            series = self._found.values[name]
            for labels, count in counts.items():
                series[labels] /= count
        self._found.process = list(self._process.values())
        return self._found


def merged(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Return the metrics of several processes as those of one."""
    found = Merging()
    for one in snapshots:
        found.add(one)
    return found.whole()


def _merge_series(mine: Series, series: Series, rule: MergeRule) -> None:
    pick = rule.of_two
    for labels, value in series.items():
        mine[labels] = pick(mine[labels], value) if labels in mine else value


def _merge_process(process: dict[str, OfProcess], metric: OfProcess) -> None:
    had = process.get(metric.name)
    if had is None:
        process[metric.name] = metric
        return
    pick = _OF_PROCESS.get(metric.name, MergeRule.SUM).of_two
    samples = {(name, tuple(sorted(labels.items()))): value for name, labels, value in had.samples}
    for name, labels, value in metric.samples:
        key = name, tuple(sorted(labels.items()))
        samples[key] = pick(samples[key], value) if key in samples else value
    process[metric.name] = OfProcess(
        had.name,
        had.kind,
        had.text,
        [(name, dict(labels), value) for (name, labels), value in samples.items()],
    )


def of_process() -> list[OfProcess]:
    """Return this process's own metrics: CPU time, memory, open files; collections of garbage;
    versions.
    """
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


def families(snapshot: Snapshot) -> Iterator[Family]:
    """Yield the metrics of a snapshot as a page shows them."""
    for one in declared():
        kept = snapshot.histograms if one.kind is MetricKind.HISTOGRAM else snapshot.values
        yield family(one, kept.get(one.name, {}))
    yield from map(family_of_process, snapshot.process)


def family(one: Description, series: Series | Histograms) -> Family:
    """Return a metric of pdproxy as a page shows it."""
    return Family(one.name, one.kind.value, one.text, _samples(one, series))


def family_of_process(one: OfProcess) -> Family:
    """Return a metric of the process as a page shows it."""
    name = f"{one.name}_total" if one.kind == "counter" else one.name
    return Family(name, one.kind, one.text, [Sample(*sample) for sample in one.samples])


def _samples(one: Description, series: Series | Histograms) -> Iterator[Sample]:
    bounds = [*(f"{bound:g}" for bound in one.bounds), "+Inf"]
    for values, value in series.items():
        labels = dict(zip(one.label_names, values, strict=False))
        if not isinstance(value, Buckets):
            yield Sample(one.name, labels, value)
            continue
        count = 0
        for bound, bucket in zip(bounds, value.counts, strict=True):
            count += bucket
            yield Sample(f"{one.name}_bucket", {**labels, "le": bound}, count)
        yield Sample(f"{one.name}_count", labels, count)
        yield Sample(f"{one.name}_sum", labels, value.total)


def page_of(snapshot: Snapshot) -> bytes:
    """Return a snapshot as a page in Prometheus' text format."""
    return whole(families(snapshot))
