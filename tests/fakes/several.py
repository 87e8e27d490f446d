"""Several workers in one event loop: each is a whole proxy with its part of what workers share, and all listen at one port.

With PDPROXY_TEST_WORKERS=2 the tests of `world` run so, where their settings allow it, and those of `tests.fakes.process` with
processes. `.ci/full workers` names the files that pass. Of the others only a few were looked into. These kinds of tests can't:

- those that look into one proxy's parts (`w.proxy`): its connections to engines, places, drain, or what a key has used there;
- those that count what each worker does by itself: failures until a breaker opens, probes, lines in the log, engines in turn;
- those of what is divided: bytes of bodies; and those that follow files by hand (`credentials.look`).

Whether all failures are of these kinds is not known.
Tests with other fixtures (`pool`, `registered`, virtual time) have one proxy in any case.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from pdproxy.app.share import Share, Shared
from pdproxy.app.shown import add_up
from pdproxy.kit.links import Message
from pdproxy.kit.supervisor import WorkerProcess
from pdproxy.kit.switchboard import Switchboard
from pdproxy.settings.schema import Settings
from pdproxy.settings.worker_checks import refused

WORKERS = int(os.environ.get("PDPROXY_TEST_WORKERS", "1"))
"""How many workers a proxy of the tests has, where a test does not say it."""


class Several:
    """What the workers share, and the parent's part of passing questions on."""

    def __init__(self, count: int, now: Callable[[], float]) -> None:
        self.restarts = 0
        self.workers = [WorkerProcess(number, pid=number + 1, ready=True) for number in range(count)]
        self._switchboard = Switchboard(self, add_up)  # type: ignore[arg-type]
        self._shared = Shared(count)
        self.shares = [self._share(number, now) for number in range(count)]

    def _share(self, number: int, now: Callable[[], float]) -> Share:
        worker = self.workers[number]
        return self._shared.of(number, lambda message: self._switchboard.received(worker, message), now)

    def send(self, worker: WorkerProcess, message: Message) -> None:
        """As the supervisor does, without sockets."""
        asyncio.get_running_loop().call_soon(self.shares[worker.number].received, message)

    def close(self) -> None:
        """Close the counters by which workers wake each other."""
        for wake in self._shared.wakes:
            os.close(wake)


def workers_for(settings: Settings) -> int:
    """Return how many workers a proxy with these settings may have in this run of the tests."""
    return 1 if WORKERS == 1 or refused(settings) else WORKERS
