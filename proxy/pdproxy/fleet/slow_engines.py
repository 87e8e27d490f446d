"""Which engines make requests slow although none fails, from the times of legs and from what
engines report.

Owns the bounds. What is named stays named until it is clearly below its bound, so that a value near
the bound does not come and go. An engine that is an outlier is excluded, too, where the settings
say so: this only names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeVar

from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.observe.description import Samples
from pdproxy.observe.slow import FULL, LINK, PREFILL, QUEUE, RECOMPUTED, Cause
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.upstream.metrics_page import Scrape

WINDOW = 60.0
"""Seconds that are looked at, and at least half of them."""
FEW = 5
"""Fewer legs in the window say nothing."""
TIMES = 3.0
"""So many times as long as the fastest other one is slow."""
PREFILL_SECONDS = 1.0
"""A prompt that takes less is not slow."""
LINK_SECONDS, LINK_ALWAYS = 0.5, 2.0
"""With KV, first data that takes less is not slow; what takes longer is slow without any
comparison."""
FULL_USAGE = 0.9
"""A request that waits behind so large a part of the KV blocks waits for blocks."""
REPORTS = 3
"""So many reports in a row show that a queue stays, or is gone."""
STAYS = 2 / 3
"""What is named stays so above this part of its bound."""


class _Sums(NamedTuple):
    """How many legs, their seconds, and the bytes of their prompts."""

    legs: int = 0
    seconds: float = 0.0
    size: int = 0

    @property
    def mean(self) -> float:
        """Seconds of a leg."""
        return self.seconds / self.legs

    @property
    def pace(self) -> float:
        """Seconds of a byte."""
        return self.seconds / self.size


_NONE = _Sums()


@dataclass(slots=True)
class _Recent:
    """The sums of the present half of the window, and of the one before."""

    half: int = 0
    now: _Sums = _NONE
    before: _Sums = _NONE

    def turn(self, half: int) -> None:
        """Begin another half, if it is over."""
        if half > self.half:
            self.before = self.now if half == self.half + 1 else _NONE
            self.now, self.half = _NONE, half

    def add(self, at: float, seconds: float, size: int = 0) -> None:
        """Add a leg."""
        self.turn(_half(at))
        now = self.now
        self.now = _Sums(now.legs + 1, now.seconds + seconds, now.size + size)


def _half(at: float) -> int:
    return int(2 * at / WINDOW)


@dataclass(slots=True)
class _Queue:
    """How many requests wait for a place in an engine, as it has reported last.

    `seen`: when some did; `same`: how many reports in a row say the contrary of `stays`.
    """

    length: float = 0.0
    seen: float = -math.inf
    stays: bool = False
    same: int = 0

    def reported(self, length: float, at: float) -> None:
        if length:
            self.length, self.seen = length, at
        self.same = 0 if bool(length) is self.stays else self.same + 1
        if self.same == REPORTS:
            self.stays, self.same = not self.stays, 0


class SlowEngines:
    """Names the engines of a pool that make requests slow. `now`: monotonic seconds. `late`: how
    many times as long as its placement predicts prompts take, by URL; a placement sends engines
    different prompts, so their times can't be compared.

    A watcher of engines. It is fed in the process that chooses engines.
    """

    def __init__(
        self,
        engines: EngineRegistry,
        now: Callable[[], float],
        late: Callable[[], Mapping[str, float]],
    ) -> None:
        self._engines = engines
        self._now = now
        self._late = late
        self._prefills: dict[str, _Recent] = {}
        self._pairs: dict[tuple[str, str], _Recent] = {}
        self._queues: dict[str, _Queue] = {}
        """By URL. Those are not there that do not report their queue."""
        self._named: set[tuple[Cause, str]] = set()
        self._before: set[tuple[Cause, str]] = set()

    def added(self, engine: Engine) -> None:
        """Nothing is known of a new engine."""

    def removed(self, engine: Engine) -> None:
        """Forget an engine."""
        self._prefills.pop(engine.url, None)
        self._queues.pop(engine.url, None)
        for pair in [pair for pair in self._pairs if engine.url in pair]:
            del self._pairs[pair]

    def prefilled(self, url: str, at: float, seconds: float, prompt_bytes: int) -> None:
        """Count a prompt that a prefill engine has computed, in so many seconds with its queue."""
        if url in self._engines:
            self._prefills.setdefault(url, _Recent()).add(at, seconds, prompt_bytes)

    def kv_took(self, prefill: str, decode: str, at: float, seconds: float) -> None:
        """Count the seconds from asking a decode engine to its first data for a prompt whose KV it
        loads from a prefill engine.
        """
        if prefill in self._engines and decode in self._engines:
            self._pairs.setdefault((prefill, decode), _Recent()).add(at, seconds)

    def scraped(self, engine: Engine, metrics: Scrape) -> None:
        """Take what an engine has just reported."""
        if metrics.queued is None or Role.DECODE not in engine.in_ledger.uses:
            self._queues.pop(engine.url, None)
        else:
            queue = self._queues.setdefault(engine.url, _Queue())
            queue.reported(metrics.queued, self._now())

    def found(self) -> dict[str, list[tuple[Cause, str]]]:
        """Return by URL what is slow now, each with a sentence."""
        at = self._now()
        self._before, self._named = self._named, set()
        found: dict[str, list[tuple[Cause, str]]] = {}
        causes = chain(
            self._slow_prefills(at),
            self._late_prefills(),
            self._slow_links(at),
            self._long_queues(),
            self._recomputing(),
        )
        for cause, url, text in causes:
            found.setdefault(url, []).append((cause, f"{cause.words}: {text}"))
        return found

    def texts(self) -> dict[str, list[str]]:
        """Return the sentences by URL."""
        return {url: [text for _, text in causes] for url, causes in self.found().items()}

    def shortcomings(self) -> list[str]:
        """Return what an operator must know, a sentence each."""
        return [
            f"{self._engines[url].in_ledger.role.value} {url}: {text}"
            for url, texts in self.texts().items()
            for text in texts
        ]

    def samples(self) -> Samples:
        """Return how many problems of each cause there are."""
        counts = dict.fromkeys((PREFILL, LINK, QUEUE, FULL, RECOMPUTED), 0)
        for causes in self.found().values():
            for cause, _ in causes:
                counts[cause] += 1
        return [((cause.name,), count) for cause, count in counts.items()]

    def _is_named(self, cause: Cause, key: str, *bounds: tuple[float, float]) -> bool:
        """Return whether each value is above its bound."""
        part = STAYS if (cause, key) in self._before else 1.0
        if any(value <= part * bound for value, bound in bounds):
            return False
        self._named.add((cause, key))
        return True

    def _slow_prefills(self, at: float) -> Iterator[tuple[Cause, str, str]]:
        """Yield the prefill engines that take longer than others for a prompt, and for a byte: one
        that gets the short prompts takes more time for each byte.
        """
        sums = {url: one for url, one in _known(self._prefills, at) if one.size}
        fastest = min((one.pace for one in sums.values()), default=0.0)
        for url, one in sums.items():
            if self._is_named(
                PREFILL, url, (one.mean, PREFILL_SECONDS), (one.pace, TIMES * fastest)
            ):
                text = f"a prompt takes {one.mean:.1f} s there"
                if fastest:
                    text += f", {one.pace / fastest:.1f} times as long as on the fastest one"
                yield (
                    PREFILL,
                    url,
                    text,
                )

    def _late_prefills(self) -> Iterator[tuple[Cause, str, str]]:
        """Yield the prefill engines whose prompts take longer than was predicted, compared with
        others'.
        """
        late = {
            url: times
            for url, times in self._late().items()
            if url in self._engines and Role.PREFILL in self._engines[url].in_ledger.uses
        }
        least = min(late.values(), default=1.0)
        for url, times in late.items():
            if self._is_named(PREFILL, url, (times, TIMES * least)):
                text = (
                    f"a prompt takes {times:.1f} times as long there as predicted, "
                    f"{times / least:.1f} times as long as on the fastest one"
                )
                yield PREFILL, url, text

    def _slow_links(self, at: float) -> Iterator[tuple[Cause, str, str]]:
        """Yield the decode engines that wait for KV, a sentence each. Where requests wait for a
        place, the time is that of the queue.
        """
        means = [(one.mean, pair) for pair, one in _known(self._pairs, at)]
        fastest = min(means, key=lambda one: one[0])[0] if means else 0.0
        bound = min(LINK_ALWAYS, max(LINK_SECONDS, TIMES * fastest))
        slow: dict[str, list[tuple[float, str]]] = {}
        for mean, (prefill, decode) in means:
            if mean <= STAYS * bound:
                continue  # most are: there may be 10,000 pairs
            queue = self._queues.get(decode)
            if queue is None or queue.seen > at - WINDOW:
                continue
            if self._is_named(LINK, f"{prefill} {decode}", (mean, bound)):
                slow.setdefault(decode, []).append((mean, prefill))
        for decode, links in slow.items():
            mean, prefill = max(links)
            others = f" and {len(links) - 1} more" if len(links) > 1 else ""
            text = (
                f"with KV from {prefill}{others} the first data takes {mean:.1f} s, and no request "
            )
            yield LINK, decode, text + "waits for a place"

    def _long_queues(self) -> Iterator[tuple[Cause, str, str]]:
        """Yield the decode engines at which requests wait for a place all the time: in the batch,
        or for KV blocks.
        """
        for url, queue in self._queues.items():
            engine = self._engines.get(url)
            if not queue.stays or engine is None or not engine.in_ledger.up:
                continue
            usage = engine.kv_usage or 0.0
            if self._is_named(FULL, url, (usage, FULL_USAGE)):
                text = f"{usage:.0%} of its KV blocks are in use, and requests wait there for some"
                yield FULL, url, f"{text} ({queue.length:.0f})"
            else:
                yield QUEUE, url, f"requests wait there for a place ({queue.length:.0f})"

    def _recomputing(self) -> Iterator[tuple[Cause, str, str]]:
        """Yield the decode engines that did not get KV that they were sent, as the audit counts."""
        for url, engine in self._engines.items():
            if (account := engine.audit.account) is not None and account.missing:
                text = (
                    f"{account.missing} of {account.settled} prompt tokens never arrived by KV "
                    f"transfer since its start (is its --kv-transfer-config right, can it reach "
                    f"the prefill engine's side channel?)"
                )
                yield RECOMPUTED, url, text


_K = TypeVar("_K")


def _known(recents: Mapping[_K, _Recent], at: float) -> Iterator[tuple[_K, _Sums]]:
    """Yield the sums of those that have enough legs."""
    half = _half(at)
    for key, recent in recents.items():
        recent.turn(half)
        now, before = recent.now, recent.before
        if now[0] + before[0] >= FEW:
            yield key, _Sums(now[0] + before[0], now[1] + before[1], now[2] + before[2])
