"""A source of engines that follows a name in DNS.

Owns what was answered last. An engine must be missing in two answers in a row before it is not
named any more.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence

from pdproxy.fleet.sources import FoundEngine, SourceAnswer
from pdproxy.kit.errors import Wait
from pdproxy.settings.dns import Dns, DnsName, dns_name
from pdproxy.settings.schema import Settings
from pdproxy.upstream.resolver import DnsRecords, LookupFailedError, Resolver

MISSING = 2
"""In how many answers in a row an engine must be missing."""
RETRY, LONGEST_RETRY = 1.0, 30.0
"""Seconds until a question that failed is asked again: the first, doubled up to the second."""
JITTER = 0.1
"""The share by which times are changed at random: many proxies begin at the same time."""
Place = tuple[str, int | None]
LookUp = Callable[[DnsName], Awaitable[Mapping[str, DnsRecords | LookupFailedError]]]


def source(url: str, settings: Settings) -> DnsSource:
    """Return the source that a URL names. See `fleet.sources`."""
    look_up = Resolver(settings.dns, settings.engines.allowed).look_up
    return DnsSource(dns_name(url, ("url",)), look_up, settings.dns)


class DnsSource:
    """Follows one name. `chance`: from 0 to 1, for the jitter."""

    def __init__(
        self, name: DnsName, look_up: LookUp, dns: Dns, chance: Callable[[], float] = random.random
    ) -> None:
        self._name = name
        self._look_up = look_up
        self._dns = dns
        self._chance = chance
        self._known: dict[str, dict[Place, int]] = {}
        """By type of record: the places, with the number of answers in a row in which each was
        missing.
        """
        self._failures = 0

    def __repr__(self) -> str:
        return f"<DnsSource {self._name.url}>"

    async def run(self, answered: Callable[[SourceAnswer], None]) -> None:
        """See `EngineSource`."""
        while True:
            answer, pause = await self.look()
            answered(answer)
            await asyncio.sleep(pause)

    async def look(self) -> tuple[SourceAnswer, float]:
        """Ask once. Return what is known now, and in how many seconds to ask again."""
        found = await self._look_up(self._name)
        failures = {kind: one for kind, one in found.items() if isinstance(one, LookupFailedError)}
        records = {kind: one for kind, one in found.items() if isinstance(one, DnsRecords)}
        passed = Wait.DNS if any(one.late for one in failures.values()) else None
        # A server that knows nothing of one family of addresses fails for it for ever: only what
        # has had records is missed.
        wrong = next(
            (str(one) for kind, one in failures.items() if self._known.get(kind) or not records),
            None,
        )
        if not records:
            self._failures += 1
            pause = min(RETRY * 2 ** min(self._failures - 1, 10), LONGEST_RETRY)
            return SourceAnswer(None, wrong, passed), jittered(pause, self._chance)
        self._failures = 0
        for kind, one in records.items():
            self._take(kind, one.places)
        urls = [self._name.engine(*place) for places in self._known.values() for place in places]
        engines = [FoundEngine(url) for url in dict.fromkeys(urls)]
        ttl = min(one.ttl for one in records.values())
        pause = min(max(ttl, self._dns.min_ttl), self._dns.max_ttl)
        return SourceAnswer(engines, wrong, passed), jittered(pause, self._chance)

    def _take(self, kind: str, places: Sequence[Place]) -> None:
        known = self._known.setdefault(kind, {})
        for place in list(known):
            known[place] = 0 if place in places else known[place] + 1
            if known[place] >= MISSING:
                del known[place]
        for place in places:
            known.setdefault(place, 0)


def jittered(seconds: float, chance: Callable[[], float]) -> float:
    """Return a time that differs by `JITTER` at most. `chance`: from 0 to 1."""
    return seconds * (1 + JITTER * (2 * chance() - 1))
