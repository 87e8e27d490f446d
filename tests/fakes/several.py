"""Several workers in one event loop: each is a whole proxy with its part of what workers share, and
all listen at one port.

With PDPROXY_TEST_WORKERS=2 the tests of `world` run so, where their settings allow it, and those of
`tests.fakes.process` with processes. `.ci/full workers` runs all of `tests/proxy` so;
`tests.fakes.one_worker` names the tests that can't, and why. Tests in virtual time have one proxy
in any case, and of those with the fixtures `pool` and `fleet` the ones whose engines send the proxy
nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdproxy.app.compose import Proxy
from pdproxy.app.share import ALONE, Share, SoleProcess
from pdproxy.app.sockets import places
from pdproxy.app.tokens import TRANSFORMERS, Library
from pdproxy.kit import ids
from pdproxy.kit.clock import Clock
from pdproxy.serving.dispatch.attempt import Attempt
from pdproxy.serving.dispatch.prompt_request import PromptRequest
from pdproxy.settings.schema import Settings
from pdproxy.transfer.contract import Contract, Dispatch
from pdproxy.workers import starting
from pdproxy.workers.kept import KEEP, keep
from pdproxy.workers.links import Message, pair
from pdproxy.workers.share import WorkerShare, WorkersMemory
from pdproxy.workers.shown_of_all import add_up
from pdproxy.workers.supervisor import WorkerProcess
from pdproxy.workers.switchboard import Switchboard

SCRIPTED = "scripted"
"""A placement that follows a test's script. Each worker would have its own: it runs in one
process.
"""
WORKERS = int(os.environ.get("PDPROXY_TEST_WORKERS", "1"))
"""How many workers a proxy of the tests has, where a test does not say it."""


class Several:
    """What the workers share, and the parent's part of passing questions on. The first of them
    leads: there is no scheduler process. `pair`: makes connected sockets.
    """

    def __init__(
        self,
        count: int,
        now: Callable[[], float],
        pair: Callable[[], tuple[socket.socket, socket.socket]] = pair,
    ) -> None:
        self.restarts = self.restarts_for_all = 0
        self._pair = pair
        self.workers = [
            WorkerProcess(number, pid=number + 1, ready=True) for number in range(count)
        ]
        self._switchboard = Switchboard(self, add_up)  # type: ignore[arg-type]
        self._shared = WorkersMemory(count, 0)
        self.shares = [self._share(number, now) for number in range(count)]

    def _share(self, number: int, now: Callable[[], float]) -> WorkerShare:
        worker = self.workers[number]

        def send(message: Message) -> None:
            if message.kind == KEEP:
                self.send(worker, keep(self._shared.kept, message))
            else:
                self._switchboard.received(worker, message)

        return self._shared.of(number, send, now)

    def send(self, worker: WorkerProcess, message: Message) -> None:
        """As the supervisor does, without sockets."""
        asyncio.get_running_loop().call_soon(self.shares[worker.number].received, message)

    def connect(self, proxies: Sequence[Proxy]) -> None:
        """As the supervisor does: give the first one and each other one a pair of sockets. It
        chooses for all, and tells them while it does not know the engines yet.
        """
        first, *others = self.shares
        for other in others:
            for share, end in zip((first, other), self._pair(), strict=True):
                share.connect(end)
        for share in self.shares:
            share.listen()
        first.choose()
        starting.tell(first.links.publisher, proxies[0])
        for other, proxy in zip(others, proxies[1:], strict=True):
            starting.follow(other.links.link.subscriber, proxy)


_NAMED = Attempt._named_dispatch


@dataclass
class Built:
    """The workers of a proxy, each with its share; one that is alone has none. None serves requests
    yet.
    """

    proxies: list[Proxy]
    shares: list[Share | SoleProcess]
    several: Several | None

    def start(self) -> None:
        """Start all of them. The process has one name for ids: here each leg's id names the worker
        that makes it.
        """
        if self.several is not None:
            numbers = {
                id(pool.resources): at
                for at, proxy in enumerate(self.proxies)
                for pool in proxy.pools
            }

            def named(attempt: Attempt, contract: Contract, request: PromptRequest) -> Dispatch:
                ids.name_worker(numbers[id(request.resources)])
                try:
                    return _NAMED(attempt, contract, request)
                finally:
                    ids._worker = ""

            Attempt._named_dispatch = named  # type: ignore[method-assign, assignment]
            self.several.connect(self.proxies)
        for proxy, share in zip(self.proxies, self.shares, strict=True):
            share.start(proxy.tasks)
            proxy.start()

    async def stop(self) -> None:
        """Stop all of them."""
        for proxy, share in zip(self.proxies, self.shares, strict=True):
            await proxy.custodian.settle(0)
            share.stop()
            await proxy.stop()
        if self.several is not None:
            Attempt._named_dispatch = _NAMED  # type: ignore[method-assign]


def built(settings: Settings, library: Library = TRANSFORMERS, clock: Clock | None = None) -> Built:
    """Make the workers of a proxy: as many as this run of the tests has, if its engines send it
    messages, else one.
    """
    sends = any(places(settings))
    count = workers_for(settings) if sends else 1
    several = (
        Several(count, clock.now if clock is not None else time.monotonic) if count > 1 else None
    )
    shares: list[Share | SoleProcess] = [ALONE] if several is None else [*several.shares]
    return Built(
        [Proxy.build(settings, library, clock=clock, share=share) for share in shares],
        shares,
        several,
    )


ran: dict[bool, set[str]] = {True: set(), False: set()}
"""The tests that have had a proxy with several workers, or with one because of their settings."""


def workers_for(settings: Settings) -> int:
    """Return how many workers a proxy with these settings may have in this run of the tests."""
    if WORKERS == 1:
        return 1
    is_possible = all(pool.placement != SCRIPTED for pool in settings.pools)
    ran[is_possible].add(os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0])
    return WORKERS if is_possible else 1
