"""The figures of the live view, from the metrics of the proxy and its engines. Pure.

Owns which metric each figure is read from, and over how long a rate is taken.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pdproxy.observe.prompt_shares import PROMPT_TOKENS, PromptShare
from pdproxy.settings.engines import Role
from pdproxy_lab.demo import pages
from pdproxy_lab.demo.pages import Page, Reading
from pdproxy_lab.demo.tally import Tally

WINDOW = 10.0
"""Seconds over which rates and latencies are taken."""

PROXY_NAMES = (
    "pdproxy_node_up",
    "pdproxy_inflight",
    "pdproxy_queue",
    "pdproxy_requests_total",
    "pdproxy_ttft_seconds_bucket",
    "pdproxy_itl_seconds_bucket",
    "pdproxy_kv_moved_total",
    "pdproxy_continuations_total",
    "pdproxy_leg_failures_total",
    "pdproxy_exclusions_total",
    "pdproxy_decisions_total",
    PROMPT_TOKENS.name,
)
ENGINE_NAMES = (
    "vllm:num_requests_running{",
    "vllm:num_requests_waiting{",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:nixl_bytes_transferred_sum",
    "vllm:nixl_bytes_transferred_count",
    "vllm:nixl_num_failed_transfers_total",
    "vllm:nixl_num_kv_expired_reqs_total",
)


@dataclass(frozen=True, slots=True)
class ShownEngine:
    """An engine: its name in the view, its role, its URL."""

    name: str
    role: Role
    url: str


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One engine. None: unknown, because its metrics (or the proxy's) could not be read.

    `tokens_per_s` is prompt tokens for a prefill engine, generated ones for the others; `kv_usage`
    is 0 to 1.
    """

    place: ShownEngine
    up: bool | None
    running: int | None
    waiting: int | None
    kv_usage: float | None
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds; None if nothing was measured in the window."""

    p50: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class MovedKv:
    """KV moved since the engines' start, and its current rate. `recomputed`: prompt tokens whose KV
    should have moved.
    """

    count: int
    size: float
    bytes_per_s: float | None
    failed: int
    expired: int
    recomputed: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """What the proxy has done since its start. `continued`: streams that another engine went on
    with; `failed_legs`: also those of these streams; `exclusions`: by the engine's URL; `split` and
    `whole`: decisions of `auto`.
    """

    continued: int = 0
    failed_legs: int = 0
    exclusions: Mapping[str, int] = field(default_factory=dict)
    split: int = 0
    whole: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything that the view shows at one time. `answers`: whether the proxy's metrics could be
    read; `prompts`: how those of the last `WINDOW` seconds were served.
    """

    elapsed: float
    answers: bool
    engines: Sequence[EngineFigures]
    inflight: int
    queued: int
    outcomes: Mapping[str, int]
    requests_per_s: float | None
    ttft: Latency
    itl: Latency
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None
    transfers: MovedKv
    traffic: Tally | None
    prompts: PromptShare = field(default_factory=PromptShare)
    recovery: Recovery = field(default_factory=Recovery)


class History:
    """The pages of the last `WINDOW` seconds, for one proxy and its engines."""

    def __init__(self, places: Sequence[ShownEngine]) -> None:
        self.places = tuple(places)
        self._proxy: deque[Reading] = deque()
        self._engines: dict[str, deque[Reading]] = {place.url: deque() for place in places}
        self._begun: float | None = None

    def add(self, at: float, proxy: Page | None, engines: Mapping[str, Page | None]) -> None:
        """Add the pages read at a time, in seconds of a steady clock; None: there was no answer."""
        self._begun = at if self._begun is None else self._begun
        _keep(self._proxy, at, proxy)
        for url, readings in self._engines.items():
            _keep(readings, at, engines.get(url))

    def figures(self, now: float, traffic: Tally | None = None) -> Figures:
        """Return the figures as of the last pages."""
        proxy = list(self._proxy)
        page: Page = proxy[-1].page if proxy else {}
        answers = bool(proxy) and proxy[-1].at == now
        outcomes: Counter[str] = Counter()
        for labels, value in pages.values(page, "pdproxy_requests_total"):
            outcomes[labels["outcome"]] += int(value)
        up = (
            {labels["node"]: value > 0 for labels, value in pages.values(page, "pdproxy_node_up")}
            if answers
            else {}
        )
        nodes = [self._engine(place, now, up.get(place.url)) for place in self.places]
        return Figures(
            elapsed=now - (self._begun if self._begun is not None else now),
            answers=answers,
            engines=nodes,
            inflight=int(pages.total(page, "pdproxy_inflight")),
            queued=int(pages.total(page, "pdproxy_queue")),
            outcomes=dict(outcomes),
            requests_per_s=pages.rate(proxy, "pdproxy_requests_total"),
            ttft=_latency(proxy, "pdproxy_ttft_seconds"),
            itl=_latency(proxy, "pdproxy_itl_seconds"),
            prompt_tokens_per_s=_sum(
                engine.tokens_per_s for engine in nodes if engine.place.role == "prefill"
            ),
            output_tokens_per_s=_sum(
                engine.tokens_per_s for engine in nodes if engine.place.role != "prefill"
            ),
            transfers=self._transfers(page),
            # A copy: traffic goes on while figures are shown.
            traffic=traffic.copy() if traffic is not None else None,
            prompts=_prompts(proxy),
            recovery=_recovery(page),
        )

    def _engine(self, place: ShownEngine, now: float, up: bool | None) -> EngineFigures:
        readings = list(self._engines[place.url])
        if not readings or readings[-1].at != now:
            return EngineFigures(place, up, None, None, None, None)
        page = readings[-1].page
        usages = [value for _, value in pages.values(page, "vllm:kv_cache_usage_perc")]
        counter = (
            "vllm:prompt_tokens_total"
            if place.role == "prefill"
            else "vllm:generation_tokens_total"
        )
        return EngineFigures(
            place,
            up,
            int(pages.total(page, "vllm:num_requests_running")),
            int(pages.total(page, "vllm:num_requests_waiting")),
            sum(usages) / len(usages) if usages else None,
            pages.rate(readings, counter),
        )

    def _transfers(self, proxy: Page) -> MovedKv:
        engines = [list(readings) for readings in self._engines.values()]
        last = [readings[-1].page for readings in engines if readings]

        def count(name: str) -> int:
            return int(sum(pages.total(page, name) for page in last))

        rates = (pages.rate(readings, "vllm:nixl_bytes_transferred_sum") for readings in engines)
        return MovedKv(
            count=count("vllm:nixl_bytes_transferred_count"),
            size=sum(pages.total(page, "vllm:nixl_bytes_transferred_sum") for page in last),
            bytes_per_s=_sum(rates),
            failed=count("vllm:nixl_num_failed_transfers_total"),
            expired=count("vllm:nixl_num_kv_expired_reqs_total"),
            recomputed=int(pages.total(proxy, "pdproxy_kv_moved_total", result="recomputed")),
        )


def _keep(readings: deque[Reading], at: float, page: Page | None) -> None:
    if page is not None:
        readings.append(Reading(at, page))
    # One reading older than the window stays, so that a rate covers the whole window.
    while len(readings) > 1 and readings[1].at <= at - WINDOW:
        readings.popleft()


def _prompts(readings: Sequence[Reading]) -> PromptShare:
    found = PromptShare()
    for series, tokens in pages.increases(readings, PROMPT_TOKENS.name, {}).items():
        labels = dict(series)
        if labels["served"] == "split":
            found.split += int(tokens)
        elif tokens:
            by_reason = found.alone if labels["served"] == "alone" else found.beside_idle
            by_reason[labels["reason"]] = int(tokens)
    return found


def _recovery(page: Page) -> Recovery:
    return Recovery(
        continued=int(pages.total(page, "pdproxy_continuations_total", result="continued")),
        failed_legs=int(pages.total(page, "pdproxy_leg_failures_total")),
        exclusions={
            labels["node"]: int(value)
            for labels, value in pages.values(page, "pdproxy_exclusions_total")
        },
        split=int(pages.total(page, "pdproxy_decisions_total", choice="split")),
        whole=int(pages.total(page, "pdproxy_decisions_total", choice="whole")),
    )


def _latency(readings: Sequence[Reading], histogram: str) -> Latency:
    found = pages.buckets(readings, histogram)
    return Latency(pages.quantile(found, 0.5), pages.quantile(found, 0.99))


def _sum(rates: Iterable[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None
