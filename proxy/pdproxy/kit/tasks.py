"""Named background tasks with an owner, so that none is forgotten and none fails without a log
line.

Two kinds: one-shot tasks, whose failure is logged (`TaskOwner.spawn`), and tasks that must run for
as long as the process, which are started again when they fail (`TaskOwner.keep`). A callback of the
event loop that must always work, but has no task, reports its failures to a `Failures`
(`TaskOwner.watch`). Messages of exceptions are not logged: they may quote a prompt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass

from pdproxy.kit.frames import drop_traceback, frames
from pdproxy.kit.ordered_set import OrderedSet
from pdproxy.kit.text import truncate

logger = logging.getLogger("pdproxy")

MAX_NAME = 128
"""Characters of a task's name, which may contain text from an engine."""


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds until a failed task is started again: `first`, doubled each time up to `longest`.

    A task that has run for `well` seconds counts as well: its failures are forgotten, except for
    their total.
    """

    first: float = 1.0
    longest: float = 60.0
    well: float = 60.0


class Failures:
    """The failures of one task that must always run, or of a callback like that. Owned by a
    `TaskOwner`.
    """

    def __init__(self, name: str, pauses: Pauses, now: Callable[[], float]) -> None:
        """Make one without failures."""
        self.name = name
        self.count = 0
        """How often it has failed since it was last well."""
        self.total = 0
        """How often it has failed in total."""
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
        """It has been started, or started again."""
        self._began, self._due = self._now(), None

    def failed(self, error: BaseException | None, *, pauses: bool = False) -> None:
        """Count a failure, and log it. None: it ended without an error. `pauses`: it will be
        started again after a pause.
        """
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
            logger.error(
                "background task %s failed, and starts again in %g s: %s",
                self.name,
                self.pause,
                what,
            )
        elif (
            self.total == 1 or self.count & (self.count - 1) == 0
        ):  # any sender's messages may make it fail, one by one
            logger.error(
                "background task %s failed %d times, and goes on: %s", self.name, self.count, what
            )

    def _is_well(self, now: float) -> bool:
        return self._due is None and now - self._began >= self._pauses.well

    def shortcoming(self) -> str | None:
        """Return what an operator must know, in a sentence; None while the task is well."""
        now = self._now()
        if self.count == 0 or self._is_well(now):
            return None
        failed = (
            f"background task {self.name} has failed {self.count} times, the last time by "
            f"{self._kind}"
        )
        if self._due is not None:
            return f"{failed}: it starts again in {max(0.0, self._due - now):.1f} s"
        return f"{failed}, and has continued for {now - self._began:.1f} s"


class TaskOwner:
    """Owns every background task of one component: it has the only reference to them."""

    def __init__(
        self, name: str, pauses: Pauses | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Make one without any task. `pauses`: of the tasks that are kept running."""
        self._name = name
        self._pauses = pauses or Pauses()
        self._now = now
        self._tasks: OrderedSet[asyncio.Task[None]] = OrderedSet()
        self._failures: list[Failures] = []
        self._kept: dict[asyncio.Task[None], Failures] = {}

    def __repr__(self) -> str:
        return f"<TaskOwner {self._name}: {len(self._tasks)} running>"

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine in the background; a failure is logged with its name."""
        task = asyncio.get_running_loop().create_task(
            coroutine, name=f"{self._name}:{truncate(name, MAX_NAME)}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._kept.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("background task %s failed: %s", task.get_name(), frames(error))
            drop_traceback(error)

    def keep(
        self, run: Callable[[], Coroutine[object, object, None]], name: str
    ) -> asyncio.Task[None]:
        """Run what must always run. When it ends, it is started again after a pause, until it is
        cancelled.
        """
        failures = self.watch(name)
        task = self.spawn(self._run_again(run, failures), name)
        self._kept[task] = failures
        return task

    def end(self, task: asyncio.Task[None]) -> None:
        """End a task that was kept running, and forget its failures."""
        task.cancel()
        failures = self._kept.pop(task, None)
        self._failures = [one for one in self._failures if one is not failures]

    def watch(self, name: str) -> Failures:
        """Return where the failures of something that must always run are to be reported."""
        failures = Failures(truncate(name, MAX_NAME), self._pauses, self._now)
        self._failures.append(failures)
        return failures

    async def _run_again(
        self, run: Callable[[], Coroutine[object, object, None]], failures: Failures
    ) -> None:
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
                failed = None  # its traceback refers to this frame
                return
            failures.failed(failed, pauses=True)
            if failed is not None:
                drop_traceback(failed)
            await asyncio.sleep(failures.pause)

    def shortcomings(self) -> list[str]:
        """Return which tasks that must always run have failed lately, a sentence each."""
        return [text for failures in self._failures if (text := failures.shortcoming()) is not None]

    def failures(self) -> Iterable[tuple[str, int]]:
        """Return how often each task that must always run has failed. Tasks of one shortened name
        count together.
        """
        totals: Counter[str] = Counter()
        for failures in self._failures:
            totals[failures.name] += failures.total
        return totals.items()

    async def settle(self, timeout: float) -> int:
        """Wait up to `timeout` seconds for the tasks to end by themselves, cancel the rest; return
        how many those were.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        while self._tasks:  # one that ends may have spawned another
            if (left := end - loop.time()) <= 0:
                break
            await asyncio.wait(list(self._tasks), timeout=left)
        pending = list(self._tasks)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.gather(*pending, return_exceptions=True)
        return len(pending)
