"""A process's links for choosing engines: those of the scheduler process to all workers, or that of
a worker to the scheduler process.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection

from pdproxy.workers.admitted_worker import AdmissionOfAll
from pdproxy.workers.remote_turns import TOPIC as TURNS
from pdproxy.workers.scheduler_clients import Answers, Hears, PoolChoices, SchedulerClient
from pdproxy.workers.scheduler_link import SchedulerLink

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
        self.hears: dict[str, Hears] = {}
        """In the scheduler process: what takes what workers say, by topics."""
        self.answers: dict[str, Answers] = {}
        """In the scheduler process: what answers what workers ask, by topics."""
        self.greets: list[Callable[[SchedulerClient], None]] = []
        """In the scheduler process: what says to each new worker all that workers are to know."""
        self.of_all: AdmissionOfAll | None = None
        """In the scheduler process: what gives requests places."""
        self.leaves: list[Callable[[SchedulerClient], None]] = []
        """In the scheduler process: what is told of each worker that says no more."""
        self._pools: list[PoolChoices] = []
        self._clients: set[SchedulerClient] = set()
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
        if pool.turns is not None:
            self.hears[f"{TURNS} {number}"] = lambda client, body: client.turns.held(number, body)

        def changed() -> None:
            for client in self._clients:
                client.know_transfers(number)

        pool.ledger.transfers.changed = changed

    def connect(self, end: socket.socket) -> None:
        """Use a socket to the other process, which has just begun, or this one has."""
        if not self._is_started:
            self._early.append(end)
        elif self._chooses:
            self._serve(end)
        else:
            self.link.connect(end)

    def say(self, topic: str, body: bytes) -> None:
        """In the scheduler process: say something to all workers."""
        for client in self._clients:
            client.say(topic, body)

    @property
    def leases(self) -> int:
        """How many leases the workers have of this process."""
        return sum(client.leases for client in self._clients)

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
        self._clients.clear()
        for end in self._early:
            end.close()
        self.link.close()

    def _serve(self, end: socket.socket) -> None:
        client = SchedulerClient(
            end, self._pools, self._gone, self._said, self.hears, self.answers, self.of_all
        )
        self._clients.add(client)
        for greet in self.greets:
            greet(client)

    def _gone(self, client: SchedulerClient) -> None:
        self._clients.discard(client)
        for leave in self.leaves:
            leave(client)

    def _said(self, client: SchedulerClient) -> None:
        """A worker has said what it has."""
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
