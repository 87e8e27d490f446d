"""A process's links for choosing engines: those of the scheduler process to all workers, or that of
a worker to the scheduler process.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection

from pdproxy.workers.publisher import Publisher
from pdproxy.workers.remote_scheduler import TRANSFERS
from pdproxy.workers.scheduler_clients import SchedulerClient
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.worker_choices import LeasesOfWorker, PoolChoices, serve_choices

EXPECTED = 0.25
"""Seconds for which a scheduler process waits until all workers have said which leases they have.
One that does not say it is left out.
"""


class SchedulerLinks:
    """Those of one process. `chooses`: whether it is the scheduler process; `workers`: how many
    others there are.
    """

    def __init__(self, *, chooses: bool, workers: int) -> None:
        self._chooses = chooses
        self._workers = workers
        self.link = SchedulerLink()
        """That of a worker."""
        self.publisher = Publisher()
        """In the scheduler process: what all workers follow."""
        self.greets: list[Callable[[SchedulerClient], object]] = [self._greet]
        """In the scheduler process: what makes the objects that each new worker calls."""
        self._pools: list[PoolChoices] = []
        self._clients: dict[SchedulerClient, LeasesOfWorker] = {}
        self._early: list[socket.socket] = []
        """Sockets that came before the start."""
        self._is_started = self._engines_known = self._may_choose = False

    def __repr__(self) -> str:
        own = f"{len(self._clients)} workers" if self._chooses else repr(self.link)
        return f"<SchedulerLinks {own}>"

    def add(self, pool: PoolChoices) -> None:
        """Choose for a pool, the next one in their order."""
        number = len(self._pools)
        self._pools.append(pool)
        transfers = pool.ledger.transfers
        topic = self.publisher.topic(f"{TRANSFERS} {number}", lambda _: transfers.known())
        transfers.changed = topic.changed

    def connect(self, end: socket.socket) -> None:
        """Use a socket to the other process, which has just begun, or this one has."""
        if not self._is_started:
            self._early.append(end)
        elif self._chooses:
            self._serve(end)
        else:
            self.link.connect(end)

    def serve(self, owner: type, target: object, on: int) -> None:
        """In the scheduler process: have all workers call the methods of `owner` on `target`. `on`:
        as in `Call`.
        """
        self.greets.append(lambda client: client.serve(owner, target, on))

    @property
    def leases(self) -> int:
        """How many leases the workers have of this process."""
        return sum(map(len, self._clients.values()))

    @property
    def clients(self) -> Collection[SchedulerClient]:
        """In the scheduler process: the workers."""
        return self._clients

    def start(self) -> None:
        """Use the links from now on, in the running loop: all that hears what is said is made."""
        self._is_started = True
        early, self._early = self._early, []
        for end in early:
            self.connect(end)

    def look(self) -> None:
        """Notice which processes have ended. To be called from time to time: see `ItemLink`."""
        for client in list(self._clients):
            client.look()
        self.link.look()

    def choose(self) -> None:
        """In the scheduler process: choose as soon as workers have said what they have. The engines
        are known.
        """
        self._engines_known = True
        self._look()
        asyncio.get_running_loop().call_later(EXPECTED, self._choose)

    def stop(self) -> None:
        """Close all links."""
        for client in list(self._clients):
            client.close()
            self.publisher.left(client)
        self._clients.clear()
        for end in self._early:
            end.close()
        self.link.close()

    def _serve(self, end: socket.socket) -> None:
        SchedulerClient(end, self._gone, self._said, self.greets)

    def _greet(self, client: SchedulerClient) -> None:
        self._clients[client] = serve_choices(client, self._pools)
        client.serve(Publisher, self.publisher)

    def _gone(self, client: SchedulerClient) -> None:
        self._clients.pop(client, None)
        self.publisher.left(client)

    def _said(self, client: SchedulerClient) -> None:
        """A worker has said what it has."""
        self.publisher.greet(client)
        if self._may_choose:
            client.welcome()
        else:
            self._look()

    def _look(self) -> None:
        has_said = sum(one.has_said for one in self._clients)
        if self._engines_known and has_said >= self._workers:
            self._choose()

    def _choose(self) -> None:
        """Choose from now on."""
        if not self._may_choose:
            self._may_choose = True
            for client in self._clients:
                if client.has_said:
                    client.welcome()
