"""What the process does about signals: SIGTERM and SIGINT drain and end it, SIGHUP has the settings
read again.

Owns the count of the requests to stop. All other signals keep the behaviour of Python and the
system.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable

logger = logging.getLogger("pdproxy")

HANGUP_LINES_EVERY = 10.0
"""Minimum of seconds between two log lines about ignored signals."""


class Ending:
    """Counts the requests to stop. `requested`: the first one has come; `draining`: no new requests
    are served any more.
    """

    def __init__(self, at_once: asyncio.Event | None = None) -> None:
        """Make one without requests. `at_once` may be shared with others that must end at once
        then.
        """
        self.requested = asyncio.Event()
        self.draining = asyncio.Event()
        self.at_once = at_once or asyncio.Event()

    def signalled(self, number: int) -> None:
        """Count a signal.

        The first SIGTERM asks for the end, and leaves time for balancers to notice. SIGINT, or
        another signal, asks for the drain now. A SIGINT after that asks for the end at once.
        """
        if self.draining.is_set() and number == signal.SIGINT:
            self.at_once.set()
        if self.requested.is_set() or number == signal.SIGINT:
            self.draining.set()
        self.requested.set()

    async def lingered(self, seconds: float) -> None:
        """Wait until the drain is to begin: for so many seconds, if nobody asks for it earlier."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.draining.wait()
        self.draining.set()

    def take_signals(self, *numbers: signal.Signals) -> None:
        """Handle these signals in the running loop."""
        loop = asyncio.get_running_loop()
        for number in numbers:
            loop.add_signal_handler(number, self.signalled, number)


class Hangups:
    """Takes SIGHUP: its sender expects that the settings are read again. Without files it is
    ignored, and logged every 10 s.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Make one that has received none."""
        self._now = now
        self._count = 0
        self._logged: float | None = None
        self.then: Callable[[], None] | None = None
        """Has the settings read again; None: there is nothing to read."""

    def take(self) -> None:
        """Handle SIGHUP in the running loop."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.signalled)

    def signalled(self) -> None:
        """Have the settings read again. Where nothing can be read, count one, and log it if the
        last line is old enough.
        """
        if self.then is not None:
            self.then()
            return
        self._count += 1
        now = self._now()
        if self._logged is None or now - self._logged >= HANGUP_LINES_EVERY:
            self._logged = now
            logger.warning(
                "SIGHUP was ignored (%d so far): there is no file of settings, and files of keys "
                "and certificates are read when "
                "they change; SIGTERM ends the process",
                self._count,
            )
