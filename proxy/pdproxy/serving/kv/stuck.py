"""Requests for which a decode engine waits for KV that will not come.

Where a prefill engine pushes, nothing but the push frees the blocks that a decode engine has
reserved. If the prefill fails, the request is closed there, but its blocks stay taken until the
engine frees them after a time of its own, or restarts. The proxy can only count them, and the count
is an estimate. An engine that had not begun with the request keeps nothing. And a request that was
closed between the prefill's answer and the push is not counted: its KV mostly comes, and no engine
shows whether it has. An engine that is removed keeps its blocks, too: they count again once it is
back, if it was not restarted meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from pdproxy.fleet.engine import Engine
from pdproxy.scheduling.runs import MAX_REMOVED
from pdproxy.transfer.contract import Holder, PushedToDecode

MAX_TIMES = 4096
"""Requests per engine of which the time is kept. Of more, only the number is known."""


class _Stuck:
    """The requests of one run of an engine."""

    __slots__ = ("count", "run_number", "times")

    def __init__(self, run_number: int) -> None:
        self.run_number = run_number
        self.count = 0
        self.times: deque[float] = deque(maxlen=MAX_TIMES)


class StuckKv:
    """Counts them for each engine. `engines`: those of the pool. Of others, what they had is kept
    for when they are back.
    """

    def __init__(self, engines: Mapping[str, Engine], holder: Holder) -> None:
        self._engines = engines
        self._seconds = holder.stuck_for if isinstance(holder, PushedToDecode) else None
        self._by_engine: dict[str, _Stuck] = {}

    def __repr__(self) -> str:
        return (
            f"<StuckKv {', '.join(f'{url}: {one.count}' for url, one in self._by_engine.items())}>"
        )

    def run_of(self, url: str) -> int | None:
        """Return the number of an engine's present run, None if the engine is not known."""
        engine = self._engines.get(url)
        return None if engine is None else engine.in_ledger.run_number

    def holds(self, url: str) -> bool:
        """Return whether something is counted of an engine, which may have been removed."""
        return url in self._by_engine

    def add(self, url: str, run: int | None, now: float) -> None:
        """Count one more request of an engine's run `run`. One of an earlier run waits for nothing
        any more.
        """
        if run is None or self._over(url, run):
            return
        stuck = self._by_engine.get(url)
        if stuck is None or stuck.run_number < run:
            stuck = self._by_engine[url] = _Stuck(run)
            removed = [one for one in self._by_engine if one not in self._engines]
            for one in removed[:-MAX_REMOVED]:
                del self._by_engine[one]
        if stuck.run_number == run:
            stuck.count += 1
            stuck.times.append(now)

    def snapshot(self, now: float) -> dict[str, tuple[int, float]]:
        """Return how many there are at each engine of the pool, and the age of the oldest in
        seconds.
        """
        for url, stuck in list(self._by_engine.items()):
            if self._seconds is not None:
                while stuck.times and stuck.times[0] <= now - self._seconds:
                    stuck.times.popleft()
                stuck.count = len(stuck.times)
            if self._over(url, stuck.run_number) or not stuck.count:
                del self._by_engine[url]
        return {
            url: (stuck.count, now - stuck.times[0])
            for url, stuck in self._by_engine.items()
            if self.run_of(url) == stuck.run_number
        }

    def shortcomings(self, now: float) -> list[str]:
        """Return what is wrong with engines, a sentence each."""
        return [
            f"decode {url}: {count} requests may wait for KV that will not come (the oldest for "
            f"{age:.0f} s), with their blocks: "
            + (
                f"it frees each after {self._seconds:g} s"
                if self._seconds is not None
                else "only its restart frees them"
            )
            for url, (count, age) in self.snapshot(now).items()
        ]

    def _over(self, url: str, run: int) -> bool:
        """Return whether an engine has shown that it is in another run. One that is removed, or was
        not probed yet, has not.
        """
        engine = self._engines.get(url)
        return (
            engine is not None
            and engine.in_ledger.evidence is not None
            and engine.in_ledger.run_number != run
        )
