"""Named background tasks with an owner: no task is lost, and each failure is logged.

Two kinds: one-shot tasks, whose failure is logged (`TaskOwner.spawn`), and tasks that must run for as long as the process, which
are started again when they fail (`TaskOwner.keep`). Work that has no task but must not stop either, such as a callback of the
event loop, reports its failures to a `Failures` (`TaskOwner.watch`). No exception's text is logged: it may quote a prompt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass

from pdproxy.kit.frames import drop_traceback, frames
from pdproxy.kit.text import cut

logger = logging.getLogger("pdproxy")

MAX_NAME = 128
"""Characters of a task's name. It may hold text that an engine sent."""


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds until a failed task is started again: `first`, doubled each time up to `longest`.

    After `well` seconds without a failure a task is well: its failures are forgotten, except in the total.
    """

    first: float = 1.0
    longest: float = 60.0
    well: float = 60.0


class Failures:
    """The failures of one task that must always run, or of a callback. Owned by a `TaskOwner`."""

    def __init__(self, name: str, pauses: Pauses, now: Callable[[], float]) -> None:
        """Make one for a task that is well."""
        self.name = name
        self.count = 0
        """How often it has failed since it was well."""
        self.total = 0
        """How often it has failed."""
        self.pause = 0.0
        """Seconds that it waits, or has waited, before it is started again."""
        self._pauses = pauses
        self._now = now
        self._kind = ""
        self._began = now()
        self._due: float | None = None

    def __repr__(self) -> str:
        return f"<Failures of {self.name}: {self.count}>"

    def began(self) -> None:
        """Note that the task has been started, or started again."""
        self._began, self._due = self._now(), None

    def failed(self, error: BaseException | None, *, pauses: bool = False) -> None:
        """Note a failure, and log it. None: the task ended, which it must not. `pauses`: it will be started again later."""
        now = self._now()
        if self.count == 0 or self._is_well(now):
            self.count, self.pause = 0, self._pauses.first
        else:
            self.pause = min(2 * self.pause, self._pauses.longest)
        self.count += 1
        self.total += 1
        self._kind = "it ended" if error is None else type(error).__qualname__
        self._began, self._due = now, now + self.pause if pauses else None
        what = self._kind if error is None else frames(error)
        if pauses:
            logger.error("background task %s failed, and starts again in %g s: %s", self.name, self.pause, what)
        elif self.total == 1 or self.count & (self.count - 1) == 0:  # a message from outside may cause each failure
            logger.error("background task %s failed %d times, and goes on: %s", self.name, self.count, what)

    def _is_well(self, now: float) -> bool:
        return self._due is None and now - self._began >= self._pauses.well

    def shortcoming(self) -> str | None:
        """Return a sentence for the operator; None while the task is well."""
        now = self._now()
        if self.count == 0 or self._is_well(now):
            return None
        failed = f"background task {self.name} has failed {self.count} times, the last time by {self._kind}"
        if self._due is not None:
            return f"{failed}: it starts again in {max(0.0, self._due - now):.1f} s"
        return f"{failed}, and goes on since {now - self._began:.1f} s"


class TaskOwner:
    """Owns every background task of one component: it holds the only reference to them."""

    def __init__(self, name: str, pauses: Pauses | None = None, now: Callable[[], float] = time.monotonic) -> None:
        """Make one without any task. `pauses`: of the tasks that are started again."""
        self._name = name
        self._pauses = pauses or Pauses()
        self._now = now
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: list[Failures] = []

    def __repr__(self) -> str:
        return f"<TaskOwner {self._name}: {len(self._tasks)} running>"

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine in the background; a failure is logged with its name."""
        task = asyncio.get_running_loop().create_task(coroutine, name=f"{self._name}:{cut(name, MAX_NAME)}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("background task %s failed: %s", task.get_name(), frames(error))
            drop_traceback(error)

    def keep(self, run: Callable[[], Coroutine[object, object, None]], name: str) -> asyncio.Task[None]:
        """Run a task that must always run. When it ends, it is started again after a pause, until it is cancelled."""
        return self.spawn(self._kept(run, self.watch(name)), name)

    def watch(self, name: str) -> Failures:
        """Return the object to which failures of something that must always run are reported."""
        failures = Failures(cut(name, MAX_NAME), self._pauses, self._now)
        self._failures.append(failures)
        return failures

    async def _kept(self, run: Callable[[], Coroutine[object, object, None]], failures: Failures) -> None:
        task = asyncio.current_task()
        assert task is not None
        while True:
            failures.began()
            failed: BaseException | None = None
            try:
                await run()
            except (Exception, asyncio.CancelledError) as error:
                failed = error
            if task.cancelling():
                return
            failures.failed(failed, pauses=True)
            if failed is not None:
                drop_traceback(failed)
            await asyncio.sleep(failures.pause)

    def shortcomings(self) -> list[str]:
        """Return one sentence for each task that must always run and is not well."""
        return [line for failures in self._failures if (line := failures.shortcoming()) is not None]

    def failures(self) -> Iterable[tuple[str, int]]:
        """Yield how often each task that must always run has failed."""
        for failures in self._failures:
            yield failures.name, failures.total

    async def settle(self, timeout: float) -> int:
        """Wait up to `timeout` seconds for the tasks to end. Cancel the rest, and return how many they were."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        while self._tasks:  # one that ends may have spawned another
            if (left := end - loop.time()) <= 0:
                break
            await asyncio.wait(set(self._tasks), timeout=left)
        pending = set(self._tasks)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.gather(*pending, return_exceptions=True)
        return len(pending)
