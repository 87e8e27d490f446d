"""The members of the pools in a worker, as the scheduler process tells them.

Owns nothing but what was told. A worker decides nothing about members: it has the engines that it
is told to have, ends their legs when it is told to, and says which engines that drain it needs. A
worker that is told of members by another scheduler process than before keeps those that are the
same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.membership import Membership
from pdproxy.kit.tasks import TaskOwner
from pdproxy.settings.errors import SettingsError
from pdproxy.workers.members import MEMBERS, Key, MembersAtWorker, NeedsOfWorker, ToldMember
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.subscriber import Subscription

logger = logging.getLogger("pdproxy.workers")

AGAIN = 1.0
"""Seconds between two attempts to have an engine whose files can't be used here."""


class FollowedMembers:
    """Those of all pools, in one worker. `link`: to the scheduler process."""

    def __init__(self, link: SchedulerLink) -> None:
        self._link = link
        self._memberships: list[Membership] = []
        self._engines: list[EngineRegistry] = []
        self._told: list[Subscription[ToldMember]] = []
        """By pools."""
        self._missing: dict[Key, tuple[ToldMember, str]] = {}
        """Members that could not be had, or not with their new settings, each with the reason."""
        link.serve(MembersAtWorker, self)

    def __repr__(self) -> str:
        return f"<FollowedMembers of {len(self._told)} pools>"

    def add(self, members: Membership, engines: EngineRegistry) -> None:
        """Follow the members of one more pool."""
        pool = len(self._told)
        told = self._link.subscriber.subscribe(
            f"{MEMBERS} {pool}",
            ToldMember,
            lambda _, member: self._put(member),
            partial(self._take_out, pool),
            is_whole=True,
        )
        told.then = partial(self._told_all, pool)
        self._told.append(told)
        self._memberships.append(members)
        self._engines.append(engines)

    def shortcomings(self) -> list[str]:
        """Return which members can't be used here, a sentence each."""
        return [f"{url} can't be used: {why}" for (_, url), (_, why) in self._missing.items()]

    @property
    def is_known(self) -> bool:
        """Whether a scheduler process has told all members."""
        return all(told.has_all for told in self._told)

    def start(self, tasks: TaskOwner) -> None:
        """Try from time to time to have the members that could not be had, in a task of this
        owner.
        """
        tasks.keep(self._try_again, "members")

    async def _try_again(self) -> None:
        while True:
            await asyncio.sleep(AGAIN)
            for member, _ in list(self._missing.values()):
                self._put(member)

    def _told_all(self, pool: int) -> None:
        """Take out those that this worker has had from its settings alone."""
        for url in list(self._memberships[pool].members):
            if url not in self._told[pool].values:
                self._take_out(pool, url)

    def _put(self, member: ToldMember) -> None:
        key = member.pool, member.settings.url
        before = self._missing.pop(key, None)
        try:
            member.put(self._memberships)
        except (SettingsError, ValueError) as error:  # a file is missing here, for example
            self._missing[key] = member, str(error)
            if before is None or before[1] != str(error):
                logger.error("%s can't be used: %s", key[1], error)  # noqa: TRY400

    def _take_out(self, pool: int, url: str) -> None:
        self._missing.pop((pool, url), None)
        if url in self._memberships[pool].members:
            self._memberships[pool].take_out(url)

    def tell_needs(self, number: int, engines: Sequence[Key]) -> None:
        """See `MembersAtWorker`."""
        needed = [key for key in engines if self._needs(*key)]
        self._link.tell(NeedsOfWorker.tell, 0, number, needed)

    def _needs(self, pool: int, url: str) -> bool:
        engines = self._engines[pool]
        every = [one for one in engines.leaving if one.url == url]
        if url in engines:
            every.append(engines[url])
        return any(map(engines.needed, every))
