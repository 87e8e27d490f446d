"""Prometheus metrics of what happened (events) and of the present state (gauges that are read at
scrape time).

Owns one registry. Counts are kept as plain numbers and become samples at a scrape, so that an event
costs a few additions, and no chunk costs a look-up of labels. The modules that count declare the
metrics (`observe.description`); those of a request's end are counted here. Series whose labels are
known in advance are there from the start, with 0: otherwise a rate over the first event of a kind
would miss it.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdproxy.observe import requests
from pdproxy.observe.description import (
    NODE,
    OTHER,
    REMOVED,
    Description,
    Label,
    MetricKind,
    Samples,
    declared,
)
from pdproxy.observe.events import Event, LegTimes, RequestEnded
from pdproxy.observe.label_values import LabelValues
from pdproxy.observe.page import AT_ONCE, Family, in_turns, whole
from pdproxy.observe.snapshot import (
    Buckets,
    Histograms,
    Series,
    Snapshot,
    family,
    family_of_process,
    of_process,
)

_OF_LEGS = (requests.NODE_LEGS, requests.NODE_SECONDS)


@dataclass(slots=True)
class _Histogram:
    bounds: Sequence[float]
    buckets: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.buckets = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, buckets: Sequence[int], total: float) -> None:
        self.buckets = [a + b for a, b in zip(self.buckets, buckets, strict=True)]
        self.total += total


class Metrics:
    """An observer that counts, and the page that shows the counts. `lists` returns whether an
    engine lists a model; `values`: those of labels that are shown, which several may share.
    """

    def __init__(
        self,
        lists: Callable[[str], bool] = lambda _: True,
        values: LabelValues | None = None,
    ) -> None:
        """Make one that has counted nothing."""
        self._lists = lists
        self._values = values or LabelValues()
        self._counts: dict[str, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[str, dict[tuple[str, ...], _Histogram]] = {}
        self._begun = 0
        """How many metrics were declared when it was last looked."""
        self._begin()
        self._phases = {
            labels[0]: kept for labels, kept in self._histograms[requests.PHASE.name].items()
        }
        self._legs: dict[tuple[str, str], list[float]] = {}
        """By engine and phase: how many legs, and their seconds."""
        self._reads: dict[str, list[Callable[[], Samples]]] = {}
        """What others keep, by the metric's name."""
        self._nodes: set[str] = set()

    def _begin(self) -> None:
        """Begin to count what is not counted yet. A plugin may be imported, and declare metrics,
        after this was made.
        """
        metrics = declared()
        if len(metrics) == self._begun:
            return
        self._begun = len(metrics)
        for one in metrics:
            if one.kind is MetricKind.HISTOGRAM:
                self._histograms.setdefault(
                    one.name, {labels: _Histogram(one.bounds) for labels in one.series}
                )
            elif one.kind is MetricKind.COUNTER and one not in _OF_LEGS:
                self._counts.setdefault(one.name, dict.fromkeys(one.series, 0))

    def show(self, metric: Description, read: Callable[[], Samples]) -> None:
        """Show a gauge, or a counter that another object keeps: what `read` yields at each scrape.

        Several may show one metric, such as those of several pools: values with the same labels
        become one by its rule `pools`.
        """
        self._reads.setdefault(metric.name, []).append(read)

    def count(self, metric: Description, *labels: str, by: float = 1) -> None:
        """Add to a counter, or observe a histogram's value. `labels`: the values of the metric's
        labels.
        """
        if metric.name not in self._counts and metric.name not in self._histograms:
            self._begin()
        values = self._bounded(metric, labels)
        if metric.kind is MetricKind.HISTOGRAM:
            self._histogram(metric, *values).observe(by)
        else:
            self._count(metric, *values, by=by)

    def add_node(self, url: str, role: str) -> None:
        """Count an engine by its URL from now on."""
        self._nodes.add(url)
        failures, phases = self._counts[requests.LEG_FAILURES.name], requests.phases_of(role)
        for phase in requests.failed_legs_of(role):
            failures.setdefault((url, phase), 0)
        for phase in phases:
            self._legs.setdefault((url, phase), [0, 0.0])

    def drop_node(self, url: str) -> None:
        """Drop the counts of an engine that was removed. What still ends there is counted as that
        of "removed".
        """
        self._nodes.discard(url)
        for key in [key for key in self._legs if key[0] == url]:
            del self._legs[key]
        for one in declared():
            if one.is_of_nodes:
                counts = self._counts.get(one.name, {})
                for labels in [labels for labels in counts if labels[0] == url]:
                    del counts[labels]

    def page(self) -> bytes:
        """Return the metrics in Prometheus text format."""
        return whole(self.collect())

    async def page_in_turns(self) -> bytes:
        """Return the same, made in many turns of the event loop: values of two metrics may be of
        two moments.
        """
        return await in_turns(self.collect())

    def notify(self, event: Event) -> None:
        """Count an event."""
        for count in self.counters_of(type(event)):
            count(event)

    def counters_of(self, kind: type[Event]) -> Sequence[Callable[[Any], None]]:
        """Return what counts events of a type, for who has many of them."""
        self._begin()
        found = [
            self._counter(one) for one in declared() if one.of is not None and one.of.event is kind
        ]
        return [self._ended, *found] if kind is RequestEnded else found

    def _counter(self, one: Description) -> Callable[[Any], None]:
        """Return what counts an event for a metric of it."""
        assert one.of is not None
        found = one.of.found
        if any(label is NODE or label.most is not None for label in one.labels):

            def count(event: Any) -> None:  # noqa: ANN401 - of the type that the metric says
                for labels, value in found(event):
                    self.count(one, *labels, by=value)

            return count
        if one.kind is MetricKind.HISTOGRAM:

            def observe(event: Any) -> None:  # noqa: ANN401
                for labels, value in found(event):
                    self._histogram(one, *labels).observe(value)

            return observe
        counts = self._counts[one.name]

        def add(event: Any) -> None:  # noqa: ANN401
            for labels, value in found(event):
                counts[labels] = counts.get(labels, 0) + value

        return add

    def _bounded(self, one: Description, labels: tuple[str, ...]) -> tuple[str, ...]:
        """Return the values that are shown: no label has more than it may, and no engine that is
        not in the pool.
        """
        return tuple(
            self._shown(label, value) for label, value in zip(one.labels, labels, strict=True)
        )

    def _shown(self, label: Label, value: str) -> str:
        if label is NODE:
            return self._node(value)
        return value if label.most is None else self._values.shown(label, value)

    def _overload(self, reason: str) -> None:
        self._count(requests.REFUSALS, reason, requests.STATUS_OF[reason])

    def _ended(self, event: RequestEnded) -> None:
        self._request(event)
        if event.reason is not None:
            self._overload(event.reason)
        self._phases["queue"].observe(event.queue_s)
        self._phases["total"].observe(event.total_s)
        path = "alone"
        for leg in event.legs:
            if leg.prefill is not None:
                path = "split"
            self._leg(leg)
        if event.first_s is not None:
            self._histogram(requests.TTFT, path).observe(event.first_s)
        if any(event.gaps.buckets):
            self._histogram(requests.ITL).add(event.gaps.buckets, event.gaps.total)
        if event.tenant is not None:
            tokens = (event.prompt_tokens or 0) + (event.completion_tokens or 0)
            tenant = self._values.shown(requests.TENANT, event.tenant)
            self._count(requests.TENANT_TOKENS, tenant, by=tokens)
        counts = self._counts[requests.TOKENS.name]
        counts["prompt",] += event.prompt_tokens or 0
        counts["completion",] += event.completion_tokens or 0

    def _request(self, event: RequestEnded) -> None:
        model = event.model or ""
        if not self._values.has(requests.MODEL, model):
            # The client chooses the model's name: one that no engine serves must not make a time
            # series. Some engines serve any name, and an engine also chooses the names that it
            # lists.
            is_served = event.outcome == "ok" and (not model or self._lists(model))
            model = self._values.shown(requests.MODEL, model) if is_served else OTHER
        counts = self._counts[requests.REQUESTS.name]
        if (model, event.endpoint, event.outcome) not in counts:
            for outcome, _ in requests.OUTCOMES:
                counts[model, event.endpoint, outcome] = 0
        counts[model, event.endpoint, event.outcome] += 1

    def _leg(self, leg: LegTimes) -> None:
        split = leg.prefill is not None
        if leg.encode_s is not None:
            self._phases["encode"].observe(leg.encode_s)
            for node, seconds in leg.encoders:
                self._node_leg("encode", node, seconds)
        if leg.prefill_s is not None:
            self._phase("prefill", leg.prefill, leg.prefill_s)
        if leg.first_s is not None:
            self._phase("kv" if split else "alone", leg.decode, leg.first_s)
        if leg.overlap_s is not None:
            self._histogram(requests.OVERLAP).observe(leg.overlap_s)
        if leg.decode_s is not None:
            self._phase("decode", leg.decode, leg.decode_s)
        if leg.whole_s is not None:
            self._phase("decode_whole" if split else "alone_whole", leg.decode, leg.whole_s)

    def _phase(self, phase: str, node: str | None, seconds: float) -> None:
        self._phases[phase].observe(seconds)
        self._node_leg(phase, node, seconds)

    def _node_leg(self, phase: str, node: str | None, seconds: float) -> None:
        legs = self._legs.get((node or REMOVED, phase))
        if legs is None:  # of a role that it had before, or of no engine here
            known = node if node in self._nodes else REMOVED
            legs = self._legs.setdefault((known, phase), [0, 0.0])
        legs[0] += 1
        legs[1] += seconds

    def _node(self, url: str) -> str:
        return url if url in self._nodes else REMOVED

    def _count(self, one: Description, *labels: str, by: float = 1) -> None:
        counts = self._counts[one.name]
        counts[labels] = counts.get(labels, 0) + by

    def _histogram(self, one: Description, *labels: str) -> _Histogram:
        found = self._histograms[one.name].get(labels)
        if found is None:
            found = self._histograms[one.name][labels] = _Histogram(one.bounds)
        return found

    def collect(self) -> Iterator[Family]:
        """Yield all metrics. Each is read when it is asked for."""
        self._begin()
        for one in declared():
            is_histogram = one.kind is MetricKind.HISTOGRAM
            yield family(one, self._buckets(one) if is_histogram else self._series(one))
        yield from map(family_of_process, of_process())

    def snapshot(self) -> Snapshot:
        """Return all metrics but the process's own, as they are now."""
        found = self.counts()
        found.values.update(self._gauges())
        return found

    def counts(self) -> Snapshot:
        """Return the counters and histograms, as they are now."""
        self._begin()
        found = Snapshot({}, {})
        for one in declared():
            if one.kind is MetricKind.HISTOGRAM:
                found.histograms[one.name] = self._buckets(one)
            elif one.kind is MetricKind.COUNTER:
                found.values[one.name] = self._series(one)
        return found

    async def gauges_in_turns(self) -> dict[str, Series]:
        """Return the gauges by their names. They are read in many turns of the event loop: two may
        be of two moments.
        """
        found: dict[str, Series] = {}
        read = 0
        for name, series in self._gauges():
            found[name] = series
            read += len(series)
            if read >= AT_ONCE:
                read = 0
                await asyncio.sleep(0)
        return found

    def _gauges(self) -> Iterator[tuple[str, Series]]:
        for one in declared():
            if one.kind is MetricKind.GAUGE:
                yield one.name, self._series(one)

    def _buckets(self, one: Description) -> Histograms:
        kept = self._histograms[one.name]
        return {labels: Buckets([*each.buckets], each.total) for labels, each in kept.items()}

    def _series(self, one: Description) -> Series:
        if one in _OF_LEGS:
            at = _OF_LEGS.index(one)
            return {key: each[at] for key, each in self._legs.items()}
        reads = self._reads.get(one.name)
        return dict(self._counts.get(one.name, {})) if reads is None else _read(one, reads)


def _read(one: Description, reads: Sequence[Callable[[], Samples]]) -> Series:
    found: Series = {}
    for read in reads:
        for labels, value in read():
            found[labels] = one.pools.of_two(found[labels], value) if labels in found else value
    return found
