"""The members of the pools in a worker, as the scheduler process tells them.

Owns nothing but what was told. A worker decides nothing about members: it has the engines that it
is told to have, ends their legs when it is told to, and says which engines that drain it needs. A
worker that is told of members by another scheduler process than before keeps those that are the
same.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.membership import Membership
from pdproxy.kit.tasks import TaskOwner
from pdproxy.settings.errors import SettingsError
from pdproxy.workers.members import (
    MEMBERS,
    NEEDS,
    Key,
    Needs,
    ToldMember,
    ToldMembers,
    decode_member,
    decode_needs,
    encode,
)
from pdproxy.workers.scheduler_link import SchedulerLink

logger = logging.getLogger("pdproxy.workers")

AGAIN = 1.0
"""Seconds between two attempts to have an engine whose files can't be used here."""

_decode = msgspec.msgpack.Decoder(ToldMembers).decode


class FollowedMembers:
    """Those of all pools, in one worker. `link`: to the scheduler process."""

    def __init__(self, link: SchedulerLink) -> None:
        self._link = link
        self._memberships: list[Membership] = []
        self._engines: list[EngineRegistry] = []
        self._told: set[Key] = set()
        """The members that the present scheduler process has told."""
        self._missing: dict[Key, tuple[ToldMember, str]] = {}
        """Members that could not be had, or not with their new settings, each with the reason."""
        self.is_known = False
        """Whether a scheduler process has told all members."""
        link.hears[MEMBERS] = self._hear
        link.hears[NEEDS] = self._answer

    def __repr__(self) -> str:
        return f"<FollowedMembers {len(self._told)}>"

    def add(self, members: Membership, engines: EngineRegistry) -> None:
        """Follow the members of one more pool."""
        self._memberships.append(members)
        self._engines.append(engines)

    def shortcomings(self) -> list[str]:
        """Return which members can't be used here, a sentence each."""
        return [f"{url} can't be used: {why}" for (_, url), (_, why) in self._missing.items()]

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

    def _hear(self, body: bytes) -> None:
        told = _decode(body)
        if told.begins:
            self._told.clear()
        for key in told.gone:
            self._take_out(key)
        for member in map(decode_member, told.members):
            self._told.add((member.pool, member.settings.url))
            self._put(member)
        if told.is_all:
            known = [
                (pool, url)
                for pool, members in enumerate(self._memberships)
                for url in members.members
            ]
            for key in known:
                if key not in self._told:
                    self._take_out(key)
            self.is_known = True

    def _put(self, member: ToldMember) -> None:
        key = member.pool, member.settings.url
        before = self._missing.pop(key, None)
        try:
            member.put(self._memberships)
        except (SettingsError, ValueError) as error:  # a file is missing here, for example
            self._missing[key] = member, str(error)
            if before is None or before[1] != str(error):
                logger.error("%s can't be used: %s", key[1], error)  # noqa: TRY400

    def _take_out(self, key: Key) -> None:
        pool, url = key
        self._told.discard(key)
        self._missing.pop(key, None)
        if url in self._memberships[pool].members:
            self._memberships[pool].take_out(url)

    def _answer(self, body: bytes) -> None:
        asked = decode_needs(body)
        needed = [key for key in asked.engines if self._needs(*key)]
        self._link.say(NEEDS, encode(Needs(asked.number, needed)))

    def _needs(self, pool: int, url: str) -> bool:
        engines = self._engines[pool]
        every = [one for one in engines.leaving if one.url == url]
        if url in engines:
            every.append(engines[url])
        return any(map(engines.needed, every))
