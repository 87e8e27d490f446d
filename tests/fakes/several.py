"""Several workers in one event loop: each is a whole proxy with its part of what workers share, and all listen at one port.

With PDPROXY_TEST_WORKERS=2 the tests of `world` run so, where their settings allow it, and those of `tests.fakes.process` with
processes. `.ci/full workers` runs all of `tests/proxy` so; `tests.fakes.one_worker` names the tests that can't, and why.
Tests with other fixtures (`pool`, `registered`, virtual time) have one proxy in any case.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from pdproxy.app.changes import Changes
from pdproxy.app.share import Share, Shared
from pdproxy.app.shown import add_up
from pdproxy.kit.links import Message
from pdproxy.kit.supervisor import WorkerProcess
from pdproxy.kit.switchboard import Switchboard
from pdproxy.settings.schema import Settings
from pdproxy.settings.worker_checks import refused

SCRIPTED = "scripted"
"""A placement that follows a test's script. Each worker would have its own: it runs in one process."""
WORKERS = int(os.environ.get("PDPROXY_TEST_WORKERS", "1"))
"""How many workers a proxy of the tests has, where a test does not say it."""


class Several:
    """What the workers share, and the parent's part of passing questions on."""

    def __init__(self, count: int, now: Callable[[], float]) -> None:
        self.restarts = 0
        self.workers = [WorkerProcess(number, pid=number + 1, ready=True) for number in range(count)]
        self._switchboard = Switchboard(self, add_up)  # type: ignore[arg-type]
        self._shared = Shared(count)
        self.changes = Changes(self, self._shared.journal)  # type: ignore[arg-type]
        self.shares = [self._share(number, now) for number in range(count)]

    def _share(self, number: int, now: Callable[[], float]) -> Share:
        worker = self.workers[number]

        def send(message: Message) -> None:
            if not self.changes.received(worker, message):
                self._switchboard.received(worker, message)

        return self._shared.of(number, send, now)

    def send(self, worker: WorkerProcess, message: Message) -> None:
        """As the supervisor does, without sockets."""
        asyncio.get_running_loop().call_soon(self.shares[worker.number].received, message)

    def close(self) -> None:
        """Close the counters by which workers wake each other."""
        for wake in self._shared.wakes:
            os.close(wake)


ran: dict[bool, set[str]] = {True: set(), False: set()}
"""The tests that have had a proxy with several workers, or with one because of their settings."""


def workers_for(settings: Settings) -> int:
    """Return how many workers a proxy with these settings may have in this run of the tests."""
    if WORKERS == 1:
        return 1
    is_possible = not refused(settings) and all(pool.placement != SCRIPTED for pool in settings.pools)
    ran[is_possible].add(os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0])
    return WORKERS if is_possible else 1
