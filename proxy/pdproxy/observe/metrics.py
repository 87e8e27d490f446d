"""Prometheus metrics of what happened (events) and of the present state (gauges that are read at scrape time).

Owns one registry. Counts are kept as plain numbers and become samples at a scrape, so that an event costs a few additions, and
no chunk costs a look-up of labels. `observe.catalog` describes each metric. Series whose labels are known in advance are there
from the start, with 0: otherwise a rate over the first event of a kind would miss it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import add

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import Metric

from pdproxy.observe import (
    catalog,
    catalog_continuations,
    catalog_decisions,
    catalog_fleet,
    catalog_health,
    catalog_peers,
    catalog_refusals,
    catalog_turns,
)
from pdproxy.observe.catalog import METRICS, REMOVED
from pdproxy.observe.description import NODE, Description, Kind
from pdproxy.observe.events import (
    BootstrapAsked,
    DeadlinePassed,
    Decided,
    EngineLost,
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
    MemberChanged,
    NodeChanged,
    PairEjected,
    Refused,
    RegistrationSeen,
    RequestEnded,
    ServedAlone,
    SilenceAllowed,
    StreamContinued,
    Tokenized,
    TokenizerJudged,
    TransferFaultSeen,
    TurnClaimed,
    TurnDropped,
    TurnKept,
    TurnReleased,
    TurnReused,
)
from pdproxy.observe.snapshot import Buckets, Series, Snapshot, families

MAX_MODEL, MAX_MODELS = 256, 1000
"""Characters of a model's name that is a label, and the number of such names. All others are counted as "other"."""
MAX_TENANTS = 1000
"""Tenants whose names are labels. All others are counted as "other"."""
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


@dataclass(frozen=True, slots=True)
class Gauge:
    """A gauge, or a counter that another object keeps. `read` is called at a scrape and yields (label values, value).

    `together`: what becomes of two values with the same labels, of two pools.
    """

    description: Description
    read: Callable[[], Iterable[tuple[tuple[str, ...], float]]]
    together: Callable[[float, float], float] = add

    def and_also(self, other: Gauge) -> Gauge:
        """Return one for two pools."""

        def read() -> Iterable[tuple[tuple[str, ...], float]]:
            found: dict[tuple[str, ...], float] = {}
            for labels, value in (*self.read(), *other.read()):
                found[labels] = self.together(found[labels], value) if labels in found else value
            return found.items()

        return Gauge(self.description, read, self.together)


class Metrics:
    """An observer that counts, and the page that shows the counts. `lists` returns whether an engine lists a model."""

    def __init__(self, lists: Callable[[str], bool] = lambda _: True) -> None:
        """Make one that has counted nothing."""
        self._lists = lists
        self._registry = CollectorRegistry(auto_describe=False)
        self._counts: dict[str, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[str, dict[tuple[str, ...], _Histogram]] = {}
        for one in METRICS:
            if one.kind is Kind.HISTOGRAM:
                self._histograms[one.name] = {labels: _Histogram(one.bounds) for labels in one.series}
            elif one.kind is Kind.COUNTER and one not in _OF_LEGS:
                self._counts[one.name] = dict.fromkeys(one.series, 0)
        self._phases = {labels[0]: kept for labels, kept in self._histograms[catalog.PHASE.name].items()}
        self._legs: dict[tuple[str, str], list[float]] = {}
        """By engine and phase: how many legs, and their seconds."""
        self._gauges: dict[str, Gauge] = {}
        self._models: set[str] = set()
        self._tenants: set[str] = set()
        self._nodes: set[str] = set()
        self._reasons: set[str] = set()
        self._registry.register(self)
        # The process's own figures: CPU time, memory, open files; collections of garbage; versions.
        for collector in (ProcessCollector, GCCollector, PlatformCollector):
            collector(registry=self._registry)

    def add_gauges(self, gauges: Iterable[Gauge]) -> None:
        """Show more gauges, and counters that others keep. One that another pool shows already is shown of both together."""
        for gauge in gauges:
            known = self._gauges.get(gauge.description.name)
            self._gauges[gauge.description.name] = gauge if known is None else known.and_also(gauge)
            self._counts.pop(gauge.description.name, None)

    def add_node(self, url: str, role: str) -> None:
        """Count an engine by its URL from now on."""
        self._nodes.add(url)
        failures, phases = self._counts[catalog.LEG_FAILURES.name], catalog.phases_of(role)
        for phase, _ in catalog.FAILED_LEGS:
            if role == "any" or (phase == "prefill") == (role == "prefill"):
                failures.setdefault((url, phase), 0)
        for phase in phases:
            self._legs.setdefault((url, phase), [0, 0.0])

    def drop_node(self, url: str) -> None:
        """Drop the counts of an engine that was removed. What still ends there is counted as that of "removed"."""
        self._nodes.discard(url)
        for key in [key for key in self._legs if key[0] == url]:
            del self._legs[key]
        for one in _OF_NODES:
            counts = self._counts.get(one.name, {})  # none of those that another object keeps
            for labels in [labels for labels in counts if labels[0] == url]:
                del counts[labels]

    def page(self) -> bytes:
        """Return the metrics in Prometheus text format."""
        return generate_latest(self._registry)

    def notify(self, event: Event) -> None:
        """Count an event."""
        match event:
            case RequestEnded():
                self._ended(event)
            case HandleEnded(end):
                self._count(catalog.HANDLES_ENDED, end)
            case ServedAlone(reason):
                self._count(catalog.ALONES, reason)
            case Decided(choice, reason):
                self._decided(choice, reason)
            case DeadlinePassed(wait):
                self._count(catalog.DEADLINES, wait)
            case SilenceAllowed(wait):
                self._count(catalog.SILENCES_ALLOWED, wait)
            case LegFailed(node=node, phase=phase):
                self._count(catalog.LEG_FAILURES, self._node(node), phase)
            case EngineLost(several=several):
                self._count(catalog_health.ENGINES_LOST, "several" if several else "one")
            case MemberChanged(change=change):
                self._count(catalog_fleet.MEMBER_CHANGES, change)
            case PairEjected():
                self._count(catalog.PAIRS_EJECTED)
            case KvCounted(moved=moved, missing=missing):
                self._count(catalog.KV_MOVED, "transferred", by=moved)
                self._count(catalog.KV_MOVED, "recomputed", by=missing)
            case BootstrapAsked(node, result):
                self._count(catalog_peers.BOOTSTRAP_QUERIES, self._node(node), result)
            case KvNoticed(kind, result):
                self._count(catalog.KV_NOTICES, kind, result)
            case RegistrationSeen(result):
                self._count(catalog_peers.REGISTRATIONS, result)
            case KvTransferred(seconds, size):
                if seconds is not None:
                    self._histogram(catalog.KV_SECONDS).observe(seconds)
                if size is not None:
                    self._count(catalog.KV_BYTES, by=size)
            case KvWaited(node, result, seconds, missing):
                self._histogram(catalog.KV_READY_WAIT, result).observe(seconds)
                node = self._node(node)
                for at, rank in enumerate(missing):
                    self._count(catalog.SILENT_RANKS, node, rank if at < MAX_RANKS else "more")
            case Tokenized():
                self._count(catalog.TOKENIZED, event.source, event.result)
                self._histogram(catalog.TOKENIZE, event.source).observe(event.seconds)
            case Refused(reason):
                self._count(catalog_refusals.EARLY_REFUSALS, reason)
                if event.overload is not None:
                    self._overload(event.overload)
            case StreamContinued(result, reason, seconds):
                self._count(catalog_continuations.CONTINUATIONS, result, reason)
                if seconds is not None:
                    self._histogram(catalog_continuations.CONTINUATION_SECONDS).observe(seconds)
            case Evicted(what):
                self._count(catalog.EVICTIONS, what)
            case LoopBeat(late_s):
                self._histogram(catalog.LOOP_LATENESS).observe(late_s)
            case TurnKept():
                self._count(catalog_turns.TURNS_KEPT)
            case TurnReused(tokens, trimmed, seconds):
                self._count(catalog_turns.TURNS_REUSED, "trimmed" if trimmed else "whole")
                self._count(catalog_turns.TURN_TOKENS, by=tokens)
                self._count(catalog_turns.TURN_SECONDS, by=seconds)
            case TurnDropped(reason=reason):
                self._count(catalog_turns.TURNS_DROPPED, reason)
            case TurnClaimed(result):
                self._count(catalog_turns.TURN_CLAIMS, result)
            case TurnReleased(result):
                self._count(catalog_turns.TURN_RELEASES, result)
            case TransferFaultSeen(kind, over=over, elsewhere=elsewhere):
                if not over and not elsewhere:
                    self._count(catalog_health.TRANSFER_FAULTS_FOUND, kind)
            case KvShortfall() | NodeChanged() | TokenizerJudged():
                pass  # logged, and shown by gauges

    def _tenant(self, name: str) -> str:
        if name not in self._tenants:
            if len(self._tenants) >= MAX_TENANTS:
                return "other"
            self._tenants.add(name)
        return name

    def _overload(self, reason: str) -> None:
        self._count(catalog_refusals.REFUSALS, reason, catalog_refusals.STATUS_OF[reason])

    def _decided(self, choice: str, reason: str) -> None:
        if reason not in self._reasons:
            if len(self._reasons) < catalog_decisions.MAX_REASONS:
                self._reasons.add(reason)
            else:
                reason = "other"
        self._count(catalog_decisions.DECISIONS, choice, reason)

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
            self._histogram(catalog.TTFT, path).observe(event.first_s)
        if any(event.gaps.buckets):
            self._histogram(catalog.ITL).add(event.gaps.buckets, event.gaps.total)
        if event.tenant is not None:
            tokens = (event.prompt_tokens or 0) + (event.completion_tokens or 0)
            self._count(catalog_refusals.TENANT_TOKENS, self._tenant(event.tenant), by=tokens)
        counts = self._counts[catalog.TOKENS.name]
        counts["prompt",] += event.prompt_tokens or 0
        counts["completion",] += event.completion_tokens or 0

    def _request(self, event: RequestEnded) -> None:
        model = event.model or ""
        if model not in self._models:
            # The client chooses the model's name: one that no engine serves must not make a time series. Some engines serve any
            # name, and an engine also chooses the names that it lists.
            is_label = event.outcome == "ok" and len(model) <= MAX_MODEL and (not model or self._lists(model))
            if is_label and len(self._models) < MAX_MODELS:
                self._models.add(model)
            else:
                model = "other"
        counts = self._counts[catalog.REQUESTS.name]
        if (model, event.endpoint, event.outcome) not in counts:
            for outcome, _ in catalog.OUTCOMES:
                counts[model, event.endpoint, outcome] = 0
        counts[model, event.endpoint, event.outcome] += 1

    def _leg(self, leg: LegTimes) -> None:
        split = leg.prefill is not None
        if leg.prefill_s is not None:
            self._phase("prefill", leg.prefill, leg.prefill_s)
        if leg.first_s is not None:
            self._phase("kv" if split else "alone", leg.decode, leg.first_s)
        if leg.overlap_s is not None:
            self._histogram(catalog.OVERLAP).observe(leg.overlap_s)
        if leg.decode_s is not None:
            self._phase("decode", leg.decode, leg.decode_s)
        if leg.whole_s is not None:
            self._phase("decode_whole" if split else "alone_whole", leg.decode, leg.whole_s)

    def _phase(self, phase: str, node: str | None, seconds: float) -> None:
        self._phases[phase].observe(seconds)
        key = node if node in self._nodes else REMOVED, phase
        legs = self._legs.get(key)
        if legs is None:
            legs = self._legs[key] = [0, 0.0]
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

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. Called by the registry."""
        return families(self.snapshot())

    def snapshot(self) -> Snapshot:
        """Return all metrics but the process's own, as they are now."""
        values: dict[str, Series] = {}
        histograms: dict[str, dict[tuple[str, ...], Buckets]] = {}
        for one in METRICS:
            if (kept := self._histograms.get(one.name)) is not None:
                histograms[one.name] = {labels: Buckets(each.buckets, each.total) for labels, each in kept.items()}
            elif one in _OF_LEGS:
                at = _OF_LEGS.index(one)
                values[one.name] = {key: each[at] for key, each in self._legs.items()}
            else:
                gauge = self._gauges.get(one.name)
                values[one.name] = dict(self._counts.get(one.name, {}) if gauge is None else gauge.read())
        return Snapshot(values, histograms)


_OF_LEGS = (catalog.NODE_LEGS, catalog.NODE_SECONDS)
_OF_NODES = [
    one for one in METRICS if one.kind is Kind.COUNTER and one.labels and one.labels[0] is NODE and one not in _OF_LEGS
]
