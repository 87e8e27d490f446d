"""Prometheus metrics of what happened (events) and of the present state (gauges that are read at scrape time).

Owns one registry. Counts are kept as plain numbers and become samples at a scrape, so that an event costs a few additions, and
no chunk costs a look-up of labels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pdproxy.observe.events import (
    ITL_BOUNDS,
    DeadlinePassed,
    Event,
    Evicted,
    HandleEnded,
    KvCounted,
    KvNoticed,
    KvShortfall,
    KvTransferred,
    KvWaited,
    LegFailed,
    LegTimes,
    LoopBeat,
    NodeChanged,
    PairEjected,
    RequestEnded,
    ServedAlone,
    Tokenized,
    TokenizerJudged,
)

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds in seconds for phases of a request."""
LATENESS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds in seconds for the event loop's delay."""
MAX_MODEL, MAX_MODELS = 256, 1000
"""Characters of a model's name that is a label, and the number of such names. All others are counted as "other"."""
MAX_RANKS = 64
"""Ranks of an engine that are labels."""


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

    def samples(self) -> list[tuple[str, float]]:
        """Return cumulative (upper bound, count) pairs, as Prometheus expects them."""
        found: list[tuple[str, float]] = []
        count = 0
        for bound, bucket in zip([*(f"{b:g}" for b in self.bounds), "+Inf"], self.buckets, strict=True):
            count += bucket
            found.append((bound, count))
        return found


@dataclass(frozen=True, slots=True)
class Gauge:
    """A gauge, or a counter that another object keeps. `read` is called at a scrape and yields (label values, value)."""

    name: str
    text: str
    labels: tuple[str, ...]
    read: Callable[[], Iterable[tuple[tuple[str, ...], float]]]
    counts: bool = False
    """Whether it is a counter."""


class Metrics:
    """An observer that counts, and the page that shows the counts. `lists` returns whether an engine lists a model."""

    def __init__(self, lists: Callable[[str], bool] = lambda _: True) -> None:
        """Make one that has counted nothing."""
        self._lists = lists
        self._registry = CollectorRegistry(auto_describe=False)
        self._counts: dict[str, Counter[tuple[str, ...]]] = {name: Counter() for name in _COUNTERS}
        self._histograms: dict[str, dict[str, _Histogram]] = {name: {} for name in _HISTOGRAMS}
        self._gauges: list[Gauge] = []
        self._models: set[str] = set()
        self._registry.register(self)

    def add_gauges(self, gauges: Iterable[Gauge]) -> None:
        """Show more gauges."""
        self._gauges += gauges

    def page(self) -> bytes:
        """Return the metrics in Prometheus text format."""
        return generate_latest(self._registry)

    def notify(self, event: Event) -> None:
        """Count an event."""
        match event:
            case RequestEnded():
                self._ended(event)
            case HandleEnded(end):
                self._count("pdproxy_kv_handles_ended", end)
            case ServedAlone(reason):
                self._count("pdproxy_alone", reason)
            case DeadlinePassed(wait):
                self._count("pdproxy_deadline", wait)
            case LegFailed(node=node, phase=phase):
                self._count("pdproxy_leg_failures", node, phase)
            case PairEjected():
                self._count("pdproxy_pairs_ejected")
            case KvCounted(moved=moved, missing=missing):
                self._count("pdproxy_kv_moved", "transferred", by=moved)
                self._count("pdproxy_kv_moved", "recomputed", by=missing)
            case KvNoticed(kind, result):
                self._count("pdproxy_kv_notices", kind, result)
            case KvTransferred(seconds, size):
                if seconds is not None:
                    self._histogram("pdproxy_kv_transfer_seconds", "", SECONDS).observe(seconds)
                if size is not None:
                    self._count("pdproxy_kv_transfer_bytes", by=size)
            case KvWaited(node, result, seconds, missing):
                self._histogram("pdproxy_kv_ready_wait_seconds", result, SECONDS).observe(seconds)
                for at, rank in enumerate(missing):
                    self._count("pdproxy_kv_silent_ranks", node, rank if at < MAX_RANKS else "more")
            case Tokenized():
                self._count("pdproxy_tokenize", event.source, event.result)
                self._histogram("pdproxy_tokenize_seconds", event.source, SECONDS).observe(event.seconds)
            case Evicted(what):
                self._count("pdproxy_evicted", what)
            case LoopBeat(late_s):
                self._histogram("pdproxy_loop_lateness_seconds", "", LATENESS).observe(late_s)
            case KvShortfall() | NodeChanged() | TokenizerJudged():
                pass  # logged, and shown by gauges

    def _ended(self, event: RequestEnded) -> None:
        model = event.model or ""
        if model not in self._models:
            # The client chooses the model's name: one that no engine serves must not make a time series. Some engines serve any
            # name, and an engine also chooses the names that it lists.
            is_label = event.outcome == "ok" and len(model) <= MAX_MODEL and (not model or self._lists(model))
            if is_label and len(self._models) < MAX_MODELS:
                self._models.add(model)
            else:
                model = "other"
        self._count("pdproxy_requests", model, event.endpoint, event.outcome)
        self._histogram("pdproxy_phase_seconds", "queue", SECONDS).observe(event.queue_s)
        self._histogram("pdproxy_phase_seconds", "total", SECONDS).observe(event.total_s)
        path = "alone"
        for leg in event.legs:
            if leg.prefill is not None:
                path = "split"
            self._leg(leg)
        if event.first_s is not None:
            self._histogram("pdproxy_ttft_seconds", path, SECONDS).observe(event.first_s)
        if any(event.gaps.buckets):
            self._histogram("pdproxy_itl_seconds", "", ITL_BOUNDS).add(event.gaps.buckets, event.gaps.total)
        if event.prompt_tokens is not None:
            self._count("pdproxy_tokens", "prompt", by=event.prompt_tokens)
        if event.completion_tokens is not None:
            self._count("pdproxy_tokens", "completion", by=event.completion_tokens)

    def _leg(self, leg: LegTimes) -> None:
        if leg.prefill_s is not None:
            self._histogram("pdproxy_phase_seconds", "prefill", SECONDS).observe(leg.prefill_s)
        if leg.kv_s is not None:
            phase = "kv" if leg.prefill is not None else "alone"
            self._histogram("pdproxy_phase_seconds", phase, SECONDS).observe(leg.kv_s)

    def _count(self, name: str, *labels: str, by: int = 1) -> None:
        self._counts[name][labels] += by

    def _histogram(self, name: str, label: str, bounds: Sequence[float]) -> _Histogram:
        found = self._histograms[name].get(label)
        if found is None:
            found = self._histograms[name][label] = _Histogram(bounds)
        return found

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. Called by the registry."""
        for name, (text, labels) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=labels)
            for values, count in self._counts[name].items():
                counter.add_metric(values, count)
            if not labels and not self._counts[name]:
                counter.add_metric((), 0)
            yield counter
        for name, (text, label) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, text, labels=[label] if label else [])
            for value, kept in self._histograms[name].items():
                histogram.add_metric([value] if label else [], kept.samples(), kept.total)
            yield histogram
        for gauge in self._gauges:
            kind = CounterMetricFamily if gauge.counts else GaugeMetricFamily
            family = kind(gauge.name, gauge.text, labels=gauge.labels)
            for values, number in gauge.read():
                family.add_metric(values, number)
            yield family


_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "pdproxy_requests": (
        "Requests that were sent to engines and have ended",
        ("model", "endpoint", "outcome"),
    ),
    "pdproxy_alone": ("Prompts served by one engine alone", ("reason",)),
    "pdproxy_deadline": ("Waits ended by their deadline", ("wait",)),
    "pdproxy_evicted": ("What was taken from clients that held more than their share while others waited", ("what",)),
    "pdproxy_kv_handles_ended": ("KV handles that have ended", ("end",)),
    "pdproxy_kv_moved": (
        "Prompt tokens sent by KV transfer, by result in the decode engines' counters",
        ("result",),
    ),
    "pdproxy_kv_notices": ("Notices of KV transfers, by result", ("event", "result")),
    "pdproxy_kv_silent_ranks": ("Ranks that sent no notice before the deadline", ("node", "rank")),
    "pdproxy_kv_transfer_bytes": ("Bytes of KV that decode engines reported as loaded", ()),
    "pdproxy_leg_failures": ("Legs that failed", ("node", "phase")),
    "pdproxy_pairs_ejected": ("Pairs ejected because they counted different prompt lengths", ()),
    "pdproxy_tokenize": ("Prompts whose token ids were requested before an engine gets them", ("source", "result")),
    "pdproxy_tokens": ("Tokens of answered requests", ("kind",)),
}
_HISTOGRAMS: dict[str, tuple[str, str]] = {
    "pdproxy_ttft_seconds": ("Seconds from the arrival of a request to its first data", "path"),
    "pdproxy_itl_seconds": ("Seconds between the events of a stream", ""),
    "pdproxy_phase_seconds": ("Seconds of each phase of a request", "phase"),
    "pdproxy_loop_lateness_seconds": ("Seconds by which the event loop called a timer late, measured every 0.1 s", ""),
    "pdproxy_kv_transfer_seconds": ("Seconds of KV transfers, as decode engines reported them", ""),
    "pdproxy_kv_ready_wait_seconds": (
        "Seconds from the prefill's answer to the notices that its KV is ready",
        "result",
    ),
    "pdproxy_tokenize_seconds": ("Seconds to get the token ids of a prompt", "source"),
}
