"""The comparison's load: each request goes to both fleets at the same time, whatever the
answers do.

Owns the arrivals and the clients' deadlines. Memory is bounded: with `MOST` requests under way
at a fleet, the next ones are left out for both, and counted.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

import aiohttp

from pdproxy.kit.tasks import TaskOwner
from pdproxy_lab.bench.client import Sender, Target
from pdproxy_lab.bench.outcome import Outcome
from pdproxy_lab.bench.prompts import Prompts
from pdproxy_lab.bench.workload import Lengths, Planned
from pdproxy_lab.demo.comparison.setup import INPUT_TOKENS, OUTPUT_TOKENS

MOST = 400
TIMEOUT = 300.0
"""Seconds for a whole answer: that of the last of `MOST` requests at an overloaded fleet."""
TICK = 0.05
"""Seconds between two samples of the event loop's lag."""
_IDS = Lengths(300, 1500)
"""Token ids of prompts: words of the simulated engines' vocabulary."""

Finished = Callable[[int, Outcome], None]
"""Gets the number of a fleet and what happened to one of its requests."""


class Load:
    """Sends requests at `rate` per second to each of some servers. `finished` gets each one that
    has ended, but for those that `stop` has cut off. Use it inside one event loop.
    """

    def __init__(
        self, session: aiohttp.ClientSession, model: str, finished: Finished, chance: random.Random
    ) -> None:
        self.rate = 1.0
        self.left_out = 0
        """Requests that were not sent, because too many were under way."""
        self.lags: list[float] = []
        """Seconds by which the event loop was late, sampled since this was emptied last."""
        self._session = session
        self._finished = finished
        self._chance = chance
        self._prompts = Prompts("completions", model, f"{chance.random()}", _IDS, {})
        self._senders: list[Sender] = []
        self._open: list[int] = []
        self._tasks = TaskOwner("load")
        self._start = time.perf_counter()

    def send_to(self, targets: Sequence[Target]) -> None:
        """Send what comes next to these servers, one per fleet."""
        self._senders = [
            Sender(self._session, target, "completions", timeout=TIMEOUT) for target in targets
        ]
        self._open = self._open or [0] * len(targets)

    def start(self) -> None:
        """Begin to send."""
        self._tasks.spawn(self._offer(), "arrivals")
        self._tasks.spawn(self._watch_loop(), "lag")

    async def stop(self) -> None:
        """Send nothing more, and cut off what is under way."""
        await self._tasks.settle(0)

    async def _offer(self) -> None:
        number, due = 0, time.perf_counter()
        while True:
            planned = Planned(0.0, INPUT_TOKENS, OUTPUT_TOKENS)
            body = self._prompts.body(number, planned)
            number += 1
            due = max(due + self._chance.expovariate(self.rate), time.perf_counter() - 1.0)
            await asyncio.sleep(max(due - time.perf_counter(), 0.0))
            if max(self._open) >= MOST:
                self.left_out += 1
                continue
            for place, sender in enumerate(self._senders):
                self._open[place] += 1
                self._tasks.spawn(self._send(place, sender, body, due), "request")

    async def _send(self, place: int, sender: Sender, body: bytes, due: float) -> None:
        outcome = Outcome(
            due=due - self._start, asked_input=INPUT_TOKENS, asked_output=OUTPUT_TOKENS
        )
        try:
            await sender.send(outcome, body, self._start)
        finally:
            self._open[place] -= 1
        if outcome.error != "cut":
            self._finished(place, outcome)

    async def _watch_loop(self) -> None:
        while True:
            due = time.perf_counter() + TICK
            await asyncio.sleep(TICK)
            self.lags.append(max(time.perf_counter() - due, 0.0))
            del self.lags[:-1000]
