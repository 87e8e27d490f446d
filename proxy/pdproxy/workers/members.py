"""The members of the pools, which the scheduler process decides and publishes. The supervisor keeps
them for its successor.

An engine that drains stays until no worker has requests or KV there. Each worker is asked for that
from time to time, and its answer counts if it was asked after the scheduler process itself had
nothing left there: the question comes behind all choices that it was sent before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

import msgspec

from pdproxy.fleet import membership
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.member import Drain, Member
from pdproxy.fleet.membership import Membership
from pdproxy.kit.tasks import TaskOwner
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import SettingsError
from pdproxy.workers.calls import told
from pdproxy.workers.kept import Keeper
from pdproxy.workers.publisher import Topic
from pdproxy.workers.scheduler_clients import Holder, SchedulerClient
from pdproxy.workers.scheduler_links import SchedulerLinks

logger = logging.getLogger("pdproxy.workers")

MEMBERS = "members"
"""Behind this word, the topic of the members of a pool, by their URLs, has the pool's number."""
HEIRS = 2.0
"""Seconds for which engines stay that a worker needed which has ended: another one gets its KV."""
Key = tuple[int, str]
"""The number of a pool, and the URL of an engine."""


class ToldMember(msgspec.Struct, array_like=True, frozen=True):
    """A member, as `fleet.member.Member`."""

    pool: int
    settings: ConfiguredEngine
    source: str
    heirs: Sequence[str]
    since: float
    drain: Drain | None

    @classmethod
    def of(cls, pool: int, member: Member) -> ToldMember:
        """Return what is told of a member of the pool with this number."""
        heirs = list(member.heirs)
        return cls(pool, member.settings, member.source, heirs, member.since, member.drain)

    def put(self, memberships: Sequence[Membership]) -> None:
        """Have its pool have it. Raises as `Membership.put`."""
        memberships[self.pool].put(self.settings, self.source, self.heirs, self.since, self.drain)


_decode_member = msgspec.msgpack.Decoder(ToldMember).decode


class MembersAtWorker(Protocol):
    """What a worker is told besides the members."""

    @told
    def tell_needs(self, number: int, engines: Sequence[Key]) -> None:
        """Tell which of these engines, that drain, the worker needs: call `NeedsOfWorker.tell` with
        this number.
        """


class NeedsOfWorker(Holder):
    """What one worker needs of engines that drain."""

    def __init__(self, of_all: MembersOfAll, client: SchedulerClient) -> None:
        self._of_all = of_all
        self._client = client
        self.asked = self.answered = 0
        """The numbers of the last question to it, and of the last one that it has answered."""
        self.engines: set[Key] = set()
        client.hold(self)
        client.serve(NeedsOfWorker, self)
        of_all.workers.append(self)

    def close(self) -> None:
        """See `Holder`."""
        self._of_all.left(self)

    def ask(self, number: int, engines: Sequence[Key]) -> None:
        """Have it tell: see `MembersAtWorker`."""
        self.asked = number
        self._client.tell(MembersAtWorker.tell_needs, 0, number, engines)

    @told
    def tell(self, number: int, engines: Sequence[Key]) -> None:
        """Take which engines it needs. `number`: of `MembersAtWorker.tell_needs`."""
        self.answered = number
        self.engines = set(engines)


class MembersOfAll:
    """Those of all pools, in the scheduler process."""

    def __init__(self, links: SchedulerLinks, keeper: Keeper, now: Callable[[], float]) -> None:
        self._links = links
        self._keeper = keeper
        self._now = now
        self._topics: list[Topic[ToldMember]] = []
        self._memberships: list[Membership] = []
        self._engines: list[EngineRegistry] = []
        self.workers: list[NeedsOfWorker] = []
        """What those need that are connected."""
        self._asked = 0
        """The number of the last question to any worker."""
        self.has_workers = False
        """Whether the workers are connected. Until then any of them may need any engine."""
        self._orphans: dict[Key, float] = {}
        """Engines that a worker needed which has ended, and until when they are needed for it."""
        self._busy: dict[Key, int] = {}
        """Engines that drain, each with the number of the first question behind the last time when
        this process had something left there.
        """
        self._lost: dict[str, str] = {}
        """By URLs of members that were kept and are missing: who has added them, and why."""
        links.greets.append(partial(NeedsOfWorker, self))

    def __repr__(self) -> str:
        return f"<MembersOfAll: {len(self.workers)} workers>"

    def add(self, members: Membership, engines: EngineRegistry) -> None:
        """Tell the members of one more pool."""
        pool = len(self._memberships)
        self._memberships.append(members)
        self._engines.append(engines)
        self._topics.append(
            self._links.publisher.topic(
                f"{MEMBERS} {pool}",
                partial(self._told, pool),
                lambda: members.members,
                self._keeper,
            )
        )
        members.when_changed = partial(self._changed, pool)
        engines.keep_known(partial(self._needed, pool))

    def shortcomings(self) -> list[str]:
        """Return which members are missing, a sentence each."""
        return [f"{url}, which {why}" for url, why in self._lost.items()]

    def start(self, tasks: TaskOwner) -> None:
        """Have the members that were kept, if this process takes the place of another one. Ask
        workers what they need from now on, in a task of this owner.
        """
        found = map(_decode_member, self._keeper.kept_of(MEMBERS))
        kept = {(one.pool, one.settings.url): one for one in found}
        for pool, one in enumerate(self._memberships):
            for url in [*one.members] if kept else []:
                if (pool, url) not in kept:
                    one.take_out(url)
        for member in kept.values():
            try:
                member.put(self._memberships)
            except (SettingsError, ValueError) as error:
                self._lost[member.settings.url] = (
                    f"{member.source} has added, can't be used: {error}"
                )
                logger.error("%s", self.shortcomings()[-1])  # noqa: TRY400
        for pool, one in enumerate(self._memberships):
            one.go_on()
            for url in one.members:
                self._changed(pool, url)
        tasks.keep(self._ask, "engines that drain")

    # -- telling

    def _changed(self, pool: int, url: str) -> None:
        member = self._memberships[pool].members.get(url)
        self._lost.pop(url, None)
        if self._drains((pool, url)):
            self._busy.setdefault((pool, url), self._asked + 1)
        else:
            self._forget_drain((pool, url))
        topic = self._topics[pool]
        if member is None:
            topic.gone(url)
        else:
            topic.changed(url)

    def _told(self, pool: int, url: str) -> ToldMember | None:
        member = self._memberships[pool].members.get(url)
        return None if member is None else ToldMember.of(pool, member)

    # -- engines that drain

    def left(self, worker: NeedsOfWorker) -> None:
        """A worker has ended."""
        self.workers.remove(worker)
        needed = worker.engines & self._busy.keys()
        self._orphans |= dict.fromkeys(needed, self._now() + HEIRS)

    def _needed(self, pool: int) -> Collection[str]:
        """Return the engines of a pool that drain, and that a worker may need."""
        return [url for at, url in self._busy if at == pool and self._may_need((at, url))]

    def _may_need(self, key: Key) -> bool:
        number = self._busy[key]
        return (
            not self.has_workers
            or self._orphans.get(key, 0.0) > self._now()
            or any(one.answered < number or key in one.engines for one in self.workers)
        )

    def _drains(self, key: Key) -> bool:
        member = self._memberships[key[0]].members.get(key[1])
        return member is not None and member.drain is not None and not member.drain.over

    def _forget_drain(self, key: Key) -> None:
        self._busy.pop(key, None)
        self._orphans.pop(key, None)

    async def _ask(self) -> None:
        while True:
            await asyncio.sleep(membership.LOOK)
            if self._busy:
                self._ask_workers()

    def _ask_workers(self) -> None:
        busy = [
            (pool, url) for pool, url in self._busy if self._engines[pool][url].in_ledger.requests
        ]
        for worker in self.workers:
            if worker.answered == worker.asked:
                self._asked += 1
                worker.ask(self._asked, list(self._busy))
        for key in busy:
            self._busy[key] = self._asked + 1
