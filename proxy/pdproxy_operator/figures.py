"""What the proxies of a PDProxy say together, from their pages of metrics. Pure.

Each proxy sees the engines for itself: what is a number of requests is summed up, what is a fact is
counted. A page that can't be read is no answer.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pdproxy.upstream.metrics_lines import lines_of, read_line

MAX_LINES = 50_000
"""Lines of a page that are read: about 14 of each engine, for 3500 engines."""
_HALF = 0.5
"""What is so for at least half of a proxy's workers counts."""
_MOST = 1e9
"""No proxy has more of anything."""
_READ = (
    _INFO := b"pdproxy_node_info",
    _UP := b"pdproxy_node_up",
    _ENGINE_STATE := b"pdproxy_node_state",
    _INFLIGHT := b"pdproxy_node_inflight",
    _HANDLES := b"pdproxy_node_kv_handles",
    _RECOMPUTED := b"pdproxy_kv_recomputed_ratio",
    _DEMAND := b"pdproxy_demand_replicas",
    _SPLITS := b"pdproxy_pool_splits",
    _STATE := b"pdproxy_state",
    _REFUSED := b"pdproxy_settings_refused",
    _LEFT_OUT := b"pdproxy_source_left_out",
)
_FAILS = b'state="kv_failing"'


@dataclass(slots=True)
class EngineFigures:
    """What the proxies say of the engine of a pod. `known`, `up`: how many proxies list it, and how
    many find it up. `work`: requests in flight there and KV handles that have not ended, of all.

    `fails`: at how many proxies no prompt is split with it, since KV does not move to it or from
    it. `recomputed`: the part of the KV sent to it lately that it computed again, the most that a
    proxy has seen; None: none was sent.
    """

    pool: str
    role: str
    known: int = 0
    up: int = 0
    work: int = 0
    fails: int = 0
    recomputed: float | None = None


@dataclass(slots=True)
class Figures:
    """What all proxies of a PDProxy say together.

    `total`: its proxies; `answered`: those whose page could be read; `unreadable`: why others could
    not, a sentence each. `engines`: by the name of their pod. `demand`: engines that the load
    needs, by pool and role. `splits`: at how many proxies a pool can split prompts, and at how many
    it should, by pool. `serving`: proxies that serve requests. `refused`: the pods of proxies that
    could not use their settings. `left_out`: what sources found that is no engine, the most that a
    proxy has seen.
    """

    total: int = 0
    answered: int = 0
    unreadable: list[str] = field(default_factory=list)
    engines: dict[str, EngineFigures] = field(default_factory=dict)
    demand: dict[tuple[str, str], float] = field(default_factory=dict)
    splits: dict[str, tuple[int, int]] = field(default_factory=dict)
    serving: int = 0
    refused: list[str] = field(default_factory=list)
    left_out: int = 0

    @property
    def complete(self) -> bool:
        """Whether all proxies have answered."""
        return self.answered == self.total


def add_page(figures: Figures, pod: str, text: bytes | None) -> None:
    """Add what the page of one more proxy says. `pod`: its name; `text` None: it has not
    answered.
    """
    figures.total += 1
    if text is None:
        return
    try:
        page = _Page(text)
    except ValueError as error:
        bisect.insort(figures.unreadable, f"/metrics of {pod} has {error}")
        return
    figures.answered += 1
    _add(figures, pod, page)


def deletion_costs(figures: Mapping[str, EngineFigures]) -> dict[str, int]:
    """Return the order in which a scale-down should take engines, the lowest first, by pod: first
    those that no proxy finds up, then the idlest. Engines that are not here have the cost 0.
    """
    return {pod: min(one.work + (one.up > 0), 2**31 - 1) for pod, one in figures.items()}


class _Page:
    """The samples of a page. Raises ValueError if a line of those that are read is none."""

    def __init__(self, text: bytes) -> None:
        lines = lines_of(text, _READ, MAX_LINES)
        lines[_ENGINE_STATE] = [line for line in lines[_ENGINE_STATE] if _FAILS in line]
        self._samples = {name: [_sample(line) for line in of] for name, of in lines.items()}

    def by(self, name: bytes, *labels: str) -> Iterator[tuple[tuple[str, ...], float]]:
        """Yield the samples of a metric with the values of some of its labels."""
        for found, value in self._samples[name]:
            yield tuple(found.get(label, "") for label in labels), value

    def of_nodes(self, name: bytes) -> dict[str, float]:
        """Return the samples of a metric by the engine's URL."""
        return {found.get("node", ""): value for found, value in self._samples[name]}


def _sample(line: bytes) -> tuple[dict[str, str], float]:
    labels, value = read_line(line)
    return labels, min(max(value, 0.0), _MOST)


def _add(figures: Figures, proxy: str, page: _Page) -> None:
    """Add what one proxy says."""
    urls: dict[str, list[str]] = {}
    for (url, pod, pool, role), _ in page.by(_INFO, "node", "engine_pod", "pool", "role"):
        if pod:
            urls.setdefault(pod, []).append(url)
            figures.engines.setdefault(pod, EngineFigures(pool, role))
    up, fails, recomputed = map(page.of_nodes, (_UP, _ENGINE_STATE, _RECOMPUTED))
    legs, handles = map(page.of_nodes, (_INFLIGHT, _HANDLES))
    for pod, its in urls.items():
        engine = figures.engines[pod]
        engine.known += 1
        engine.up += all(up.get(url, 0) >= _HALF for url in its)
        engine.fails += any(fails.get(url, 0) >= _HALF for url in its)
        engine.work += round(sum(legs.get(url, 0) + handles.get(url, 0) for url in its))
        parts = [recomputed[url] for url in its if url in recomputed]
        if parts:
            engine.recomputed = max([*parts, engine.recomputed or 0.0])
    for (pool, role), value in page.by(_DEMAND, "pool", "role"):
        figures.demand[pool, role] = figures.demand.get((pool, role), 0.0) + value
    for (pool,), value in page.by(_SPLITS, "pool"):
        can, should = figures.splits.get(pool, (0, 0))
        figures.splits[pool] = can + (value >= _HALF), should + 1
    figures.serving += any(
        value >= _HALF for (state,), value in page.by(_STATE, "state") if state != "not_ready"
    )
    if any(value for _, value in page.by(_REFUSED)):
        bisect.insort(figures.refused, proxy)
    left_out = round(sum(value for _, value in page.by(_LEFT_OUT)))
    figures.left_out = max(figures.left_out, left_out)
