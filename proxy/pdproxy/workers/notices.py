"""Engines' notices, of several workers: they come to the scheduler process, which passes each on to
the worker whose prompt it is about. Ids name the worker that has made them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from pdproxy.kit import ids
from pdproxy.observe.events import KvNoticed, Observers
from pdproxy.wire.notices import Notice
from pdproxy.workers.calls import told
from pdproxy.workers.scheduler_clients import Holder, SchedulerClient
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.scheduler_links import SchedulerLinks

AT_ONCE = 1 << 20
"""Bytes of notices for a worker that are sent before the turn of the event loop ends."""
MAX_UNREAD = 8 << 20
"""Bytes that a worker has not read: behind more, notices for it are dropped."""
_OTHERS = 1024
"""Bytes of a notice besides the handle and the ids that it may carry, about."""


class NoticesAtWorker(Protocol):
    """What a worker is told."""

    @told
    def take(self, notices: Sequence[Notice]) -> None:
        """Notices about prompts of the worker."""


class NoticesForWorkers:
    """What the scheduler process, with number `number`, does with the notices of the pool with
    number `pool`. `workers`: how many workers there are.

    `take`: takes those that name no worker; `is_read`: whether anything reads the handles and ids
    that they may carry.
    """

    def __init__(
        self,
        links: SchedulerLinks,
        pool: int,
        number: int,
        workers: int,
        take: Callable[[Notice], None],
        observers: Observers,
        *,
        is_read: bool,
    ) -> None:
        self._pool = pool
        self._number = number
        self._workers = workers
        self._take = take
        self._observers = observers
        self._is_read = is_read
        self._clients: dict[int, SchedulerClient] = {}
        """The workers that are connected, by their numbers."""
        self._due: dict[int, list[Notice]] = {}
        """What is sent when the event loop has read what is there, or when its worker connects: a
        scheduler process that has just begun reads notices before that.
        """
        self._sizes: Counter[int] = Counter()
        """Bytes of these, by workers."""
        self._is_called = False
        links.greets.append(lambda client: _NoticesOfWorker(self, client, pool))

    def __repr__(self) -> str:
        return f"<NoticesForWorkers {self._sizes.total()} bytes wait>"

    def receive(self, notice: Notice) -> None:
        """Take a notice that an engine has sent."""
        owner = ids.worker_of(notice.request_id)
        if owner is None or owner == self._number or owner >= self._workers:
            self._take(notice)
            return
        client = self._clients.get(owner)
        unread = self._sizes[owner] + (0 if client is None else client.unsent)
        if unread > MAX_UNREAD:
            self._observers.notify(KvNoticed(notice.event.value, "not_passed"))
            return
        if not self._is_read:
            notice = msgspec.structs.replace(notice, params=None, token_ids=None)
        self._due.setdefault(owner, []).append(notice)
        self._sizes[owner] += _OTHERS + len(notice.params or b"") + len(notice.token_ids or b"")
        if client is not None and self._sizes[owner] >= AT_ONCE:
            self._pass_on(owner, client)
        elif not self._is_called:
            self._is_called = True
            asyncio.get_running_loop().call_soon(self._pass_on_all)

    def _pass_on_all(self) -> None:
        self._is_called = False
        for owner, client in self._clients.items():
            self._pass_on(owner, client)

    def _pass_on(self, owner: int, client: SchedulerClient) -> None:
        del self._sizes[owner]
        if (due := self._due.pop(owner, None)) is not None:
            client.tell(NoticesAtWorker.take, self._pool, due)

    def joined(self, owner: int, client: SchedulerClient) -> None:
        """Pass notices on to a worker from now on. `owner`: its number."""
        self._clients[owner] = client
        self._pass_on(owner, client)

    def left(self, client: SchedulerClient) -> None:
        """A worker has ended."""
        self._clients = {owner: one for owner, one in self._clients.items() if one is not client}


class _NoticesOfWorker(Holder):
    """What one worker calls."""

    def __init__(self, of_all: NoticesForWorkers, client: SchedulerClient, pool: int) -> None:
        self._of_all = of_all
        self._client = client
        client.hold(self)
        client.serve(_NoticesOfWorker, self, pool)

    def close(self) -> None:
        """See `Holder`."""
        self._of_all.left(self._client)

    @told
    def join(self, owner: int) -> None:
        """Be told notices from now on. `owner`: the worker's number."""
        self._of_all.joined(owner, self._client)


class NoticesOfWorker:
    """Has `take` get the notices of a pool for worker `number`. `failed`: what is called if one
    can't be processed.
    """

    def __init__(
        self,
        link: SchedulerLink,
        pool: int,
        number: int,
        take: Callable[[Notice], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._take = take
        self._failed = failed
        link.serve(NoticesAtWorker, self, pool)
        link.begins.append(lambda: link.tell(_NoticesOfWorker.join, pool, number))

    def take(self, notices: Sequence[Notice]) -> None:
        """See `NoticesAtWorker`."""
        for notice in notices:
            try:
                self._take(notice)
            except Exception as error:  # a defect here must not lose the notices behind this one
                self._failed(error)
