"""Which engines make requests slow although none fails, from the times of legs.

Owns the bounds. What is named stays named until it is clearly below its bound, so that a value near
the bound does not come and go. An engine that is an outlier is excluded, too, where the settings
say so: this only names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.observe.description import Samples
from pdproxy.observe.slow import PREFILL, Cause

WINDOW = 60.0
"""Seconds that are looked at, and at least half of them."""
FEW = 5
"""Fewer legs in the window say nothing."""
TIMES = 3.0
"""So many times as long as the fastest other one is slow."""
PREFILL_SECONDS = 1.0
"""A prompt that takes less is not slow."""
STAYS = 2 / 3
"""What is named stays so above this part of its bound."""


@dataclass(slots=True)
class _Sums:
    """How many legs, their seconds, and the bytes of their prompts."""

    count: int = 0
    seconds: float = 0.0
    size: int = 0

    def add(self, count: int, seconds: float, size: int) -> None:
        self.count += count
        self.seconds += seconds
        self.size += size


@dataclass(slots=True)
class _Recent:
    """The sums of the present half of the window, and of the one before."""

    half: int = 0
    now: _Sums = field(default_factory=_Sums)
    before: _Sums = field(default_factory=_Sums)

    def turn(self, at: float) -> None:
        half = int(2 * at / WINDOW)
        if half > self.half:
            self.before = self.now if half == self.half + 1 else _Sums()
            self.now, self.half = _Sums(), half

    def all(self, at: float) -> _Sums:
        self.turn(at)
        found = _Sums()
        for part in (self.before, self.now):
            found.add(part.count, part.seconds, part.size)
        return found


class SlowEngines:
    """Names the engines of a pool that make requests slow. `now`: monotonic seconds.

    A watcher of engines. It is fed in the process that chooses engines.
    """

    def __init__(self, engines: EngineRegistry, now: Callable[[], float]) -> None:
        self._engines = engines
        self._now = now
        self._prefills: dict[str, _Recent] = {}
        self._named: set[tuple[Cause, str]] = set()

    def added(self, engine: Engine) -> None:
        """Nothing is known of a new engine."""

    def removed(self, engine: Engine) -> None:
        """Forget an engine."""
        self._prefills.pop(engine.url, None)

    def prefilled(self, url: str, at: float, seconds: float, prompt_bytes: int) -> None:
        """Count a prompt that a prefill engine has computed, in so many seconds with its queue."""
        if url in self._engines:
            recent = self._prefills.setdefault(url, _Recent())
            recent.turn(at)
            recent.now.add(1, seconds, prompt_bytes)

    def found(self) -> dict[str, list[tuple[Cause, str]]]:
        """Return by URL what is slow now, each with a sentence."""
        at = self._now()
        every = list(self._slow_prefills(at))
        self._named = {(cause, url) for cause, url, _ in every}
        found: dict[str, list[tuple[Cause, str]]] = {}
        for cause, url, text in every:
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
        counts = {PREFILL: 0}
        for causes in self.found().values():
            for cause, _ in causes:
                counts[cause] += 1
        return [((cause.name,), count) for cause, count in counts.items()]

    def _bound(self, cause: Cause, url: str, bound: float) -> float:
        return bound * STAYS if (cause, url) in self._named else bound

    def _slow_prefills(self, at: float) -> Iterator[tuple[Cause, str, str]]:
        """Yield the prefill engines that take longer than others for a prompt, and for a byte: one
        that gets the short prompts takes more time for each byte.
        """
        sums: Mapping[str, _Sums] = {
            url: one
            for url, recent in self._prefills.items()
            if (one := recent.all(at)).count >= FEW and one.size
        }
        if len(sums) < 2:
            return
        fastest = min(one.seconds / one.size for one in sums.values())
        for url, one in sums.items():
            mean, pace = one.seconds / one.count, one.seconds / one.size
            if mean > self._bound(PREFILL, url, PREFILL_SECONDS) and pace > fastest * self._bound(
                PREFILL, url, TIMES
            ):
                times = f", {pace / fastest:.1f} times as long as on the fastest one"
                yield PREFILL, url, f"a prompt takes {mean:.1f} s there{times if fastest else ''}"
