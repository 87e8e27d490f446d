"""What the process does about signals: SIGTERM and SIGINT drain and end it, SIGHUP is ignored.

Owns the count of the requests to stop. All other signals keep the behaviour of Python and the system.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable

logger = logging.getLogger("pdproxy")

HANGUP_LINES_EVERY = 10.0
"""Minimum of seconds between two log lines about ignored signals."""


class Ending:
    """Counts the requests to stop."""

    def __init__(self, at_once: asyncio.Event | None = None) -> None:
        """Make one without requests. `at_once` may be shared with others that must end at once then."""
        self.requested = asyncio.Event()
        self.at_once = at_once or asyncio.Event()

    def signalled(self, number: int) -> None:
        """Count a signal: the first one asks for the end, a SIGINT after it asks for the end at once."""
        if self.requested.is_set() and number == signal.SIGINT:
            self.at_once.set()
        self.requested.set()

    def take_signals(self, *numbers: signal.Signals) -> None:
        """Handle these signals in the running loop."""
        loop = asyncio.get_running_loop()
        for number in numbers:
            loop.add_signal_handler(number, self.signalled, number)


class Hangups:
    """Ignores SIGHUP and logs that, at most every 10 s: its sender may expect that the settings are read again."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Make one that has received none."""
        self._now = now
        self._count = 0
        self._logged: float | None = None

    def take(self) -> None:
        """Handle SIGHUP in the running loop."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.signalled)

    def signalled(self) -> None:
        """Count one, and log it if the last line is old enough."""
        self._count += 1
        now = self._now()
        if self._logged is None or now - self._logged >= HANGUP_LINES_EVERY:
            self._logged = now
            logger.warning(
                "SIGHUP was ignored (%d so far): settings are read only at the start, files of keys and certificates when "
                "they change; SIGTERM ends the process",
                self._count,
            )
