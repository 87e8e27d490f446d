"""How fast each engine was, and how often it failed, by the requests that the admin API shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from pdproxy.observe.recent import KEPT, RecentPrompt, RecentRequest

WINDOW = 60.0
"""Seconds back from now: older requests do not count."""


@dataclass(slots=True)
class EngineFigures:
    """Figures of one engine.

    - `firsts`: seconds from asking the engine for a prompt's KV to its answer, or for a stream to
      its first data; one for each prompt.
    - `wholes`: seconds from asking it for an answer that is not streamed to all of that.
    - `tokens`: of answers that have ended, and of the prompts whose KV it made.
    - `failures`: its legs that failed.
    """

    firsts: list[float] = field(default_factory=list)
    wholes: list[float] = field(default_factory=list)
    tokens: float = 0.0
    failures: int = 0

    @property
    def latency(self) -> float | None:
        """The median of `firsts` in seconds, without these that of `wholes`; None without both."""
        values = self.firsts or self.wholes
        return median(values) if values else None


def figures(
    requests: Sequence[RecentRequest], window: float = WINDOW
) -> tuple[float, Mapping[str, EngineFigures]]:
    """Return how many seconds the requests cover, up to `window`, and the figures of each engine in
    these seconds, by its URL.
    """
    ages = [one.ended_s for one in requests if one.ended_s is not None]
    # More have ended before the oldest one, and are not kept.
    covered = min(window, max(ages)) if len(ages) >= KEPT else window
    found: defaultdict[str, EngineFigures] = defaultdict(EngineFigures)
    for request in requests:
        if request.ended_s is not None and request.ended_s > covered:
            continue
        for url in _failed(request, covered):
            found[url].failures += 1
        if request.ended_s is not None:
            for prompt in request.prompts:
                _count(found, prompt, request)
    return covered, found


def _failed(request: RecentRequest, window: float) -> Iterator[str]:
    for failure in request.failures:
        age = (request.ended_s or 0.0) + request.total_s - failure.at_s
        if failure.engine is not None and age <= window:
            yield failure.engine


def _count(
    found: defaultdict[str, EngineFigures], prompt: RecentPrompt, request: RecentRequest
) -> None:
    count = max(1, request.prompt_count)
    if prompt.prefill is not None:
        engine = found[prompt.prefill]
        if prompt.prefill_s is not None:
            engine.firsts.append(prompt.prefill_s)
        engine.tokens += (request.prompt_tokens or 0) / count
    if prompt.decode is not None:
        engine = found[prompt.decode]
        if prompt.first_s is not None:
            engine.firsts.append(prompt.first_s)
        if prompt.whole_s is not None:
            engine.wholes.append(prompt.whole_s)
        engine.tokens += (request.completion_tokens or 0) / count
