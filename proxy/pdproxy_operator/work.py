"""A queue of keys: each is worked on alone, soon after something has changed, later and later after
failures, and from time to time anyway.

Owns when which key is due. A key that is added while its work runs is worked on once more
afterwards: nothing that changes meanwhile is missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import random
from collections.abc import Awaitable, Callable, Hashable
from enum import Enum
from itertools import count
from typing import Generic, TypeVar

from pdproxy.kit.frames import drop_traceback, frames
from pdproxy.upstream.kubernetes import ApiError

K = TypeVar("K", bound=Hashable)
logger = logging.getLogger("pdproxy.operator")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
"""Seconds until work that failed is tried again: the first, doubled up to the second; as little as
half of it by chance.
"""
RESYNC, JITTER = 600.0, 0.2
"""Seconds after which a key is worked on although nothing has changed, and the share by which they
are changed at random.
"""
DEADLINE = 120.0
"""Seconds that the work on one key may take."""
WORKERS = 4
"""Keys that are worked on at once."""


class Result(Enum):
    """What the work on a key has come to."""

    DONE = "done"
    GONE = "gone"
    FAILED = "failed"
    LATE = "late"


class Queue(Generic[K]):
    """Keys that are due, and those that will be. `now`: seconds of a steady clock."""

    def __init__(self, now: Callable[[], float], chance: Callable[[], float]) -> None:
        self._now = now
        self._chance = chance
        self._due: dict[K, float] = {}
        """When each key is due, those that are worked on excepted."""
        self._heap: list[tuple[float, int, K]] = []
        """The same, the soonest first, with others that do not count any more."""
        self._numbers = count()
        self._active: dict[K, float | None] = {}
        """Keys that are worked on, each with when it is due again, None: not asked for."""
        self._failures: dict[K, int] = {}
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Queue {len(self)} due, {len(self._active)} active>"

    def __len__(self) -> int:
        now = self._now()
        return sum(at <= now for at in self._due.values())

    def add(self, key: K, *, is_fresh: bool = False) -> None:
        """Have a key worked on: at once, or when its pause after a failure is over. `is_fresh`: its
        user has changed something, so that it may succeed now.
        """
        if is_fresh:
            self._failures.pop(key, None)
        elif self._failures.get(key) and key not in self._active:
            return  # it is due when its pause is over
        self._set(key, self._now())

    def add_after(self, key: K, seconds: float) -> None:
        """Have a key worked on in so many seconds at the latest."""
        self._set(key, self._now() + seconds)

    def _set(self, key: K, at: float) -> None:
        if key in self._active:
            known = self._active[key]
            self._active[key] = at if known is None else min(known, at)
            return
        if self._due.get(key, at + 1) <= at:
            return
        self._due[key] = at
        heapq.heappush(self._heap, (at, next(self._numbers), key))
        self._changed.set()

    async def next(self) -> K:
        """Wait for a key that is due, and begin with it. Call `done` when that has ended."""
        while True:
            while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
                heapq.heappop(self._heap)  # it was brought forward, or is begun
            if self._heap and self._heap[0][0] <= self._now():
                key = heapq.heappop(self._heap)[2]
                del self._due[key]
                self._active[key] = None
                return key
            wait = self._heap[0][0] - self._now() if self._heap else None
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._changed.wait()

    def done(self, key: K, result: Result, again: float | None = None) -> None:
        """End the work on a key. `again`: seconds after which it wants to be worked on."""
        asked = self._active.pop(key)
        if result in (Result.FAILED, Result.LATE):
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            pause = min(FIRST_PAUSE * 2.0 ** min(failures - 1, 20), LONGEST_PAUSE)
            self.add_after(key, pause * (1 + self._chance()) / 2)
            return
        self._failures.pop(key, None)
        if asked is not None:
            self._set(key, asked)
        if result is Result.DONE:
            self.add_after(key, RESYNC * (1 - JITTER + 2 * JITTER * self._chance()))
            if again is not None:
                self.add_after(key, again)


class Work(Generic[K]):
    """Works on the keys of a queue. `reconcile` returns the seconds after which the key is to be
    worked on again, None: when something changes; it raises `Gone` where nothing is left to do.
    `ended` gets each result, and the seconds that it took.
    """

    def __init__(
        self,
        reconcile: Callable[[K], Awaitable[float | None]],
        ended: Callable[[Result, float], None] = lambda _result, _seconds: None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._reconcile = reconcile
        self._ended = ended
        self.queue: Queue[K] = Queue(lambda: asyncio.get_running_loop().time(), chance)

    def __repr__(self) -> str:
        return f"<Work {self.queue}>"

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(WORKERS):
                tasks.create_task(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            key = await self.queue.next()
            begun = loop.time()
            result, again = await self._work(key)
            self._ended(result, loop.time() - begun)
            self.queue.done(key, result, again)

    async def _work(self, key: K) -> tuple[Result, float | None]:
        try:
            async with asyncio.timeout(DEADLINE) as deadline:
                return Result.DONE, await self._reconcile(key)
        except GoneError:
            return Result.GONE, None
        except TimeoutError as error:
            if deadline.expired():
                logger.error("%s: not done in %g s", key, DEADLINE)  # noqa: TRY400
                return Result.LATE, None
            logger.error("%s: %s", key, frames(error))  # noqa: TRY400
        except ApiError as error:
            logger.warning("%s: %s", key, error)
        except Exception as error:  # other keys go on
            logger.error("%s: %s", key, frames(error))  # noqa: TRY400
            drop_traceback(error)
        return Result.FAILED, None


class GoneError(Exception):
    """What a key names is gone."""
