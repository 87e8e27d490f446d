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
from pdproxy.settings.engines import Node, engine_url
from pdproxy.settings.errors import SettingsError
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


def _is_usable(url: str) -> bool:
    """Return whether an engine can have a URL that was made of an answer. The targets of service records may be any bytes."""
    try:
        return engine_url(url, ("url",)) == url
    except SettingsError:
        return False


def _nowhere(url: str) -> str | None:
    """Return the name of another pool that an engine is in, where there is no other pool."""
    return None


class DnsSource:
    """The engines of one name. `template`: their settings, whose URL is the name's. `chance`: from 0 to 1, for the jitter.

    `elsewhere`: returns the name of another pool that has an engine, None if none has it. `are_new`: the engines of the first
    answer begin slowly, too: others serve already.
    """

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
        elsewhere: Callable[[str], str | None] = _nowhere,
        *,
        are_new: bool = False,
    ) -> None:
        self.name = name.url
        self.template = template
        self._elsewhere = elsewhere
        self._are_new = are_new
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
        self._is_over = False
        self.answered_at: float | None = None
        """When the last good answer came."""
        self.counts: Counter[str] = Counter()
        """Answers by their result, as in pdproxy_dns_answers_total."""

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

    def use(self, template: Node) -> None:
        """Have its engines with other settings from now on. What fails changes nothing.

        Raises:
            SettingsError: an engine can't work with them.
            MembershipError: as there.
        """
        before, self.template = self.template, template
        try:
            if self._applied is not None:
                self._have()
        except Exception:
            self.template = before
            raise

    def give_up(self) -> None:
        """Want no engine any more: what it alone wants is drained and removed. An answer that comes now changes nothing."""
        self._is_over = True
        self._known.clear()
        self._membership.apply(self.name, ())

    async def run(self) -> None:
        """Follow the name until cancelled, or given up."""
        while not self._is_over:
            pause = await self.look()
            await asyncio.sleep(pause)

    async def look(self) -> float:
        """Ask once, and have the engines that were answered. Return in how many seconds to ask again."""
        found = await self._look_up(self._dns_name)
        if self._is_over:  # `asyncio.wait_for` loses a cancellation that comes together with the answer
            return 0.0
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
        if (count := len(self.urls())) > MAX_PLACES:
            self.counts["failed"] += 1
            return f"names {count} engines: {MAX_PLACES} at most"
        before = self._applied
        try:
            applied = self._have()
        except (SettingsError, MembershipError, ValueError) as error:
            self.counts["failed"] += 1
            return truncate(error)
        self.counts["empty" if not applied else "same" if before == applied else "changed"] += 1
        return None

    def _have(self) -> tuple[Node, ...]:
        """Have the engines that are known, and return them: all but those that others have."""
        wanted, left_out = list[Node](), list[str]()
        for url in self.urls():
            node, member = msgspec.structs.replace(self.template, url=url), self._membership.members.get(url)
            if not _is_usable(url):
                left_out.append(f"{truncate(url)} can't be an engine's URL")
            elif (pool := self._elsewhere(url)) is not None:
                left_out.append(f"{url} is an engine of pool {pool}")
            elif member is None or member.leaves or member.source == self.name or member.settings == node:
                wanted.append(node)
            else:  # it must not keep the others out
                left_out.append(f"{url} was added by {member.source}, with other settings")
        self._membership.apply(self.name, wanted, are_new=self._are_new or self._applied is not None)
        self._applied, self._left_out = tuple(wanted), left_out
        return self._applied

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
