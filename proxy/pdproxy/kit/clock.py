"""Deadlines for the data path: any number of them on one timer of the event loop.

Owns that timer. Every request sets several deadlines and reaches none. So setting and cancelling a
deadline must be cheap, and it need not be exact: a deadline is reached up to `TICK` late, never
early. Time in which the loop was held up (a stalled machine, a stopped process, one long
computation) counts for no deadline: data that arrived in time is not late.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from types import TracebackType

import msgspec

from pdproxy.kit.frames import frames

logger = logging.getLogger("pdproxy")

TICK = 0.05
"""Seconds."""


def _nothing() -> None:
    """Do nothing: what a cancelled timer calls."""


class Timer(msgspec.Struct, eq=False):
    """One call at a certain time, unless it is cancelled first."""

    _slots: dict[int, dict[Timer, None]]
    _number: int
    then: Callable[[], None]

    def cancel(self) -> None:
        """Drop the call. Cancelling twice, or after the call, changes nothing."""
        # `then` often refers to the owner of this timer: no reference cycle stays
        self.then = _nothing
        slot = self._slots.get(self._number)
        if slot is not None:
            slot.pop(self, None)
            if not slot:
                del self._slots[self._number]


class Clock:
    """Calls functions at their times, in ticks. Belongs to the event loop that first sets a timer.

    Only time in which the loop could read its sockets counts. A callback that holds the loop up for
    seconds makes no wait shorter: that time counts for no timer, and sockets are read between it
    and the next timer.
    """

    def __init__(
        self,
        failed: Callable[[Exception], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make one. `failed` gets each exception that a timer's function raised; None: it is logged
        here.
        """
        self.now = now
        """Returns seconds of a steady clock, for durations. Timers count these seconds less those
        of hold-ups.
        """
        self._failed = failed or _log
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop of the timers, None before the first. Before Python 3.12, to ask for the running
        loop is a system call.
        """
        self._slots: dict[int, dict[Timer, None]] = {}
        self._done = 0
        self._due = 0.0
        """When the next tick is due, in seconds of the loop's time less `_lost`."""
        self._lost = 0.0
        """Seconds in which the loop was held up while timers ran."""
        self._next: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Clock {self.timers} timers>"

    @property
    def timers(self) -> int:
        """How many timers are set."""
        return sum(map(len, self._slots.values()))

    def after(self, seconds: float, then: Callable[[], None]) -> Timer:
        """Call `then` after `seconds`, or up to a tick later."""
        loop = self.loop
        if loop is None:
            loop = self.loop = asyncio.get_running_loop()
        number = int((loop.time() - self._lost + seconds) / TICK) + 1
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = {}
        timer = Timer(self._slots, number, then)
        slot[timer] = None
        if self._next is None:
            self._done = int((loop.time() - self._lost) / TICK)
            self._tick_at((self._done + 1) * TICK, read=False)
        return timer

    def within(self, seconds: float) -> Within:
        """Return a context that raises TimeoutError after `seconds`, as `asyncio.timeout` does."""
        return Within(self, seconds)

    def _tick_at(self, due: float, *, read: bool) -> None:
        assert self.loop is not None
        self._due = due
        self._next = self.loop.call_at(due + self._lost, self._tick, read)

    def _tick(self, read: bool) -> None:
        """Call all timers that are due. `read`: the sockets were read since the loop was held
        up.
        """
        assert self.loop is not None
        now = self.loop.time() - self._lost
        if now > self._due + TICK:
            self._lost += now - self._due
            now = self._due
            if not read:
                # The loop runs timers before it reads sockets. So wait for a later turn, after the
                # next read.
                self._tick_at(now + TICK / 10, read=True)
                return
        last = int(now / TICK)
        due = (
            range(self._done + 1, last + 1)
            if last - self._done <= len(self._slots)
            else sorted(self._slots)
        )
        self._done = last
        for number in due:
            if number > last:
                break
            slot = self._slots.pop(number, None)
            while slot:
                try:
                    slot.popitem()[0].then()
                except Exception as error:  # the other deadlines of the process still count
                    self._failed(error)
        self._next = None
        if self._slots:
            self._tick_at((last + 1) * TICK, read=False)


def _log(error: Exception) -> None:
    logger.error("the function of a deadline failed: %s", frames(error))


class Within(msgspec.Struct, eq=False):
    """See `Clock.within`. It is entered once, by the task that it may interrupt."""

    _clock: Clock
    _seconds: float
    _late: bool = False
    _task: asyncio.Task[object] | None = None
    _timer: Timer | None = None
    _cancelling: int = 0

    def __enter__(self) -> None:
        self._timer = self._clock.after(self._seconds, self._interrupt)
        task = asyncio.current_task(self._clock.loop)
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()

    def disarm(self) -> None:
        """Wait as long as it takes from now on."""
        if self._timer is not None:
            self._timer.cancel()

    def _interrupt(self) -> None:
        assert self._task is not None
        self._late = True
        self._task.cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # which refers to its error, whose frames may refer to this
        task, self._task = self._task, None
        assert task is not None
        assert self._timer is not None
        self._timer.cancel()
        self._timer = None
        # If somebody else cancelled the task as well, that cancellation must stay.
        late = self._late and task.uncancel() <= self._cancelling
        del task  # it may end with this error, whose traceback refers to this frame
        if late and kind is asyncio.CancelledError:
            raise TimeoutError from error


async def sleep(clock: Clock, seconds: float) -> None:
    """Wait, by a clock."""
    with contextlib.suppress(TimeoutError), clock.within(seconds):
        await asyncio.Event().wait()
