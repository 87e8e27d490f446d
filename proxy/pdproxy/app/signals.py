"""What the process does about signals: SIGTERM and SIGINT end it in order, SIGHUP is ignored.

Owns the count of the requests to stop. All other signals keep what Python and the system do.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable

logger = logging.getLogger("pdproxy")

HANGUP_LINES_EVERY = 10.0
"""Seconds between two log lines of ignored signals at the least."""


class Ending:
    """Counts the requests to stop."""

    def __init__(self, at_once: asyncio.Event | None = None) -> None:
        """Make one that nobody has asked yet; `at_once` may be shared with whoever else has to hurry then."""
        self.asked = asyncio.Event()
        self.at_once = at_once or asyncio.Event()

    def signalled(self, number: int) -> None:
        """Take a signal: the first asks, a second SIGINT insists."""
        if self.asked.is_set() and number == signal.SIGINT:
            self.at_once.set()
        self.asked.set()

    def take_signals(self, *numbers: signal.Signals) -> None:
        """Have the running loop hand these signals over."""
        loop = asyncio.get_running_loop()
        for number in numbers:
            loop.add_signal_handler(number, self.signalled, number)


class Hangups:
    """Ignores SIGHUP and says so, at most once in a while: who sends it may expect that something is read again."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Make one that has seen none."""
        self._now = now
        self._count = 0
        self._said: float | None = None

    def take(self) -> None:
        """Have the running loop hand the signal over."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.signalled)

    def signalled(self) -> None:
        """Take note of one."""
        self._count += 1
        now = self._now()
        if self._said is None or now - self._said >= HANGUP_LINES_EVERY:
            self._said = now
            logger.warning(
                "SIGHUP was ignored (%d so far): settings are read at the start alone, files of keys and certificates when "
                "they change; SIGTERM ends the process",
                self._count,
            )
