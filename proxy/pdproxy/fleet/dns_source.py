"""Engines that a name in DNS stands for: a source of the membership that follows the name's records.

Owns what was answered last. What can't be answered changes nothing; an engine must be missing in two answers in a row before it
is drained, and one that comes back before it is gone serves on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from pdproxy.fleet.member import MembershipError
from pdproxy.fleet.membership import Membership
from pdproxy.kit.errors import Wait
from pdproxy.kit.text import truncate
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.settings.dns import Dns, DnsName
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.schema import Node
from pdproxy.upstream.resolver import MAX_PLACES, LookupFailedError, Records

logger = logging.getLogger("pdproxy.dns")

MISSING = 2
"""In how many answers in a row an engine must be missing."""
RETRY, LONGEST_RETRY = 1.0, 30.0
"""Seconds until a question that failed is asked again: the first, doubled up to the second."""
JITTER = 0.1
"""The share by which times are changed at random: many proxies begin at the same time."""
Place = tuple[str, int | None]
LookUp = Callable[[DnsName], Awaitable[Mapping[str, Records | LookupFailedError]]]


class DnsSource:
    """The engines of one name. `template`: their settings, whose URL is the name's. `chance`: from 0 to 1, for the jitter."""

    def __init__(
        self,
        template: Node,
        name: DnsName,
        look_up: LookUp,
        membership: Membership,
        observers: Observers,
        dns: Dns,
        now: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        self.name = name.url
        self._template = template
        self._dns_name = name
        self._look_up = look_up
        self._membership = membership
        self._observers = observers
        self._dns = dns
        self._now = now
        self._chance = chance
        self._known: dict[str, dict[Place, int]] = {}
        """By type of record: the places, with the number of answers in a row in which each was missing."""
        self._applied: tuple[Node, ...] | None = None
        self._problem: str | None = None
        self._problem_since = 0.0
        self._left_out: list[str] = []
        self._failures = 0
        self.answered_at: float | None = None
        """When the last good answer came."""
        self.counts: Counter[str] = Counter()
        """Answers by their result, one of `catalog_fleet.DNS_RESULTS`."""

    def __repr__(self) -> str:
        return f"<DnsSource {self.name}: {len(self.urls())} engines>"

    def urls(self) -> list[str]:
        """Return the URLs of its engines."""
        places = {place: None for places in self._known.values() for place in places}
        return [self._dns_name.engine(*place) for place in places]

    def shortcomings(self) -> list[str]:
        """Return what is wrong with it, a sentence each."""
        found = []
        if self._problem is not None:
            kept = "its last answer stays in use" if self._applied else "no engine of it is known"
            found.append(f"{self.name}: {self._problem}, for {self._now() - self._problem_since:.0f} s: {kept}")
        elif self.answered_at is None:
            found.append(f"{self.name}: has not been answered yet")
        return found + [f"{self.name}: {text}" for text in self._left_out]

    async def run(self) -> None:
        """Follow the name until cancelled."""
        while True:
            pause = await self.look()
            await asyncio.sleep(pause)

    async def look(self) -> float:
        """Ask once, and have the engines that were answered. Return in how many seconds to ask again."""
        found = await self._look_up(self._dns_name)
        failures = {kind: one for kind, one in found.items() if isinstance(one, LookupFailedError)}
        records = {kind: one for kind, one in found.items() if isinstance(one, Records)}
        if any(one.late for one in failures.values()):
            self._observers.notify(DeadlinePassed(Wait.DNS.value))
        # A server that knows nothing of one family of addresses fails for it for ever: only what has had records is missed.
        wrong = next((str(one) for kind, one in failures.items() if self._known.get(kind) or not records), None)
        for kind, one in records.items():
            self._take(kind, one.places)
        if records:
            self.answered_at = self._now()
            if not any(one.places for one in records.values()) and not any(self._known.values()):
                wrong = wrong or "names no engine"
            wrong = self._apply() or wrong
        self._note(wrong)
        if not records:
            self.counts["failed"] += 1
            self._failures += 1
            return jittered(min(RETRY * 2 ** min(self._failures - 1, 10), LONGEST_RETRY), self._chance)
        self._failures = 0
        ttl = min(one.ttl for one in records.values())
        return jittered(min(max(ttl, self._dns.min_ttl), self._dns.max_ttl), self._chance)

    def _take(self, kind: str, places: Sequence[Place]) -> None:
        known = self._known.setdefault(kind, {})
        for place in list(known):
            known[place] = 0 if place in places else known[place] + 1
            if known[place] >= MISSING:
                del known[place]
        for place in places:
            known.setdefault(place, 0)

    def _apply(self) -> str | None:
        """Have the engines that are known. Return why that is not possible."""
        nodes = [msgspec.structs.replace(self._template, url=url) for url in self.urls()]
        if len(nodes) > MAX_PLACES:
            self.counts["failed"] += 1
            return f"names {len(nodes)} engines: {MAX_PLACES} at most"
        wanted, self._left_out = [], []
        for node in nodes:
            member = self._membership.members.get(node.url)
            if member is None or member.leaves or member.source == self.name or member.settings == node:
                wanted.append(node)
            else:  # it must not keep the others out
                self._left_out.append(f"{node.url} was added by {member.source}, with other settings")
        before, self._applied = self._applied, tuple(wanted)
        try:
            self._membership.apply(self.name, wanted, are_new=before is not None)
        except (SettingsError, MembershipError, ValueError) as error:
            self._applied = before
            self.counts["failed"] += 1
            return truncate(error)
        self.counts["empty" if not wanted else "same" if before == self._applied else "changed"] += 1
        return None

    def _note(self, wrong: str | None) -> None:
        if wrong is not None and wrong != self._problem:
            if self._problem is None:
                self._problem_since = self._now()
            logger.warning("%s: %s", self.name, wrong)
        elif wrong is None and self._problem is not None:
            logger.info("%s is answered again", self.name)
        self._problem = wrong


def jittered(seconds: float, chance: Callable[[], float]) -> float:
    """Return a time that differs by `JITTER` at most. `chance`: from 0 to 1."""
    return seconds * (1 + JITTER * (2 * chance() - 1))
