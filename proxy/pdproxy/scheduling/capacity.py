"""How many requests engines can take: a window for each, learned from what it reports. Pure.

Owns the windows. An engine has none before it was seen to be full: twice in a row many of its
requests waited, its KV cache was nearly full, or it refused one of many requests because of its
queue. Then its window is what it has without those that wait, but no less than half of what it had;
and it grows by a twentieth while it is used and nothing waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

SHRINK, GROW = 0.5, 1.05
"""How much smaller a window becomes at most, and how much larger, from one report to the next."""
MANY_WAIT = 0.1
"""The part of an engine's requests that may wait: new ones wait for a step or for KV at any
load.
"""
FEW = 8
"""Requests: a refusal by an engine that has no more of ours says little about what it can take.
Others may fill its queue.
"""
KV_FULL, KV_FREE = 0.9, 0.8
"""The parts of an engine's KV cache in use above which its window shrinks, and below which it may
grow.
"""


@dataclass(frozen=True, slots=True)
class Load:
    """An engine's load as the proxy sees it. `requests`: the proxy's open leases; `prefills`: it
    only makes KV for others.
    """

    url: str
    requests: int
    prefills: bool = False


class Windows:
    """The windows of all engines. `fixed`: the window of each engine that answers clients; None:
    windows are learned.
    """

    def __init__(self, fixed: int | None = None) -> None:
        self.fixed = fixed
        self._windows: dict[str, float] = {}
        self._full: dict[str, int] = {}
        """How often in a row an engine was seen with many waiting requests."""

    def of(self, load: Load) -> float | None:
        """Return an engine's window, None if it has none."""
        if self.fixed is not None:
            return None if load.prefills else float(self.fixed)
        return self._windows.get(load.url)

    def forget(self, url: str) -> None:
        """Forget the window of an engine that was removed, or whose run is over."""
        self._windows.pop(url, None)
        self._full.pop(url, None)

    def seen(self, load: Load, waiting: float | None, kv_usage: float) -> None:
        """Note what an engine reports: requests that wait in it (None: not reported), and the part
        of its KV cache in use.
        """
        if self.fixed is not None:
            return
        waits = waiting or 0.0
        many = waits > max(1.0, MANY_WAIT * load.requests)
        self._full[load.url] = full = self._full.get(load.url, 0) + 1 if many else 0
        window = self._windows.get(load.url)
        if full >= 2 or kv_usage > KV_FULL:
            self._shrink(load, waits)
        elif (
            window is not None
            and not many
            and kv_usage < KV_FREE
            and load.requests >= math.floor(window)
        ):
            self._windows[load.url] = max(window * GROW, window + 1)

    def refused(self, load: Load) -> None:
        """Note that an engine refused a request because its queue is full. Of one with few
        requests, only its reports count.
        """
        if self.fixed is None and load.requests > FEW:
            self._shrink(load, 0.0)

    def _shrink(self, load: Load, waits: float) -> None:
        window = min(self._windows.get(load.url, math.inf), float(load.requests))
        self._windows[load.url] = max(window * SHRINK, load.requests - waits, 1.0)

    def places(self, usable: Iterable[Load], inflight: int) -> int | None:
        """Return how many requests all usable engines together can take, None if there is no bound.

        `inflight`: the requests that have a place. Each has a lease of an engine that answers;
        those that are being prefilled apart have one of a prefill engine as well.
        """
        answer, prefill, prefilled = 0.0, 0.0, 0
        answers = prefills = False
        for load in usable:
            window = self.of(load)
            window = math.inf if window is None else window
            if load.prefills:
                prefills, prefill, prefilled = True, prefill + window, prefilled + load.requests
            else:
                answers, answer = True, answer + window
        bound = answer if answers else math.inf
        if prefills:
            bound = min(bound, inflight - prefilled + prefill)
        return None if bound == math.inf else max(math.floor(bound), 1)
