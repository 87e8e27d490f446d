"""How many proxies there are in front of the same engines: as many as a name in DNS has
addresses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pdproxy.fleet.dns_source import LONGEST_RETRY, MISSING, RETRY, LookUp, jittered
from pdproxy.kit.errors import Wait
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.settings.dns import Dns, DnsName
from pdproxy.upstream.resolver import DnsRecords, LookupFailedError

logger = logging.getLogger("pdproxy.fleet")


class ReplicaCount:
    """The number that a name says. `use(count)` is called with each other one, `count` is the
    first.

    What can't be answered changes nothing. Fewer addresses count when that many answers in a row
    have no more than these: a server may leave some out. A name with addresses of both families has
    one of each for each replica.
    """

    def __init__(
        self,
        name: DnsName,
        look_up: LookUp,
        use: Callable[[int], None],
        observers: Observers,
        dns: Dns,
        now: Callable[[], float],
        chance: Callable[[], float],
        count: int = 1,
    ) -> None:
        self._name = name
        self._look_up = look_up
        self._use = use
        self._observers = observers
        self._dns = dns
        self._now = now
        self._chance = chance
        self.count = count
        """Read only."""
        self._fewer: list[int] = []
        """What the last answers have said, which are all below `count`."""
        self._failures = 0
        self._problem: str | None = "has not been answered yet"
        self._problem_since = now()

    def __repr__(self) -> str:
        return f"<ReplicaCount {self._name.name}: {self.count}>"

    def shortcomings(self) -> list[str]:
        """Return what is wrong with it, in one sentence or none."""
        if self._problem is None:
            return []
        since = self._now() - self._problem_since
        return [
            (
                f"replicas.name {self._name.name}: {self._problem}, for {since:.0f} s: taken to be "
                f"{self.count}"
            )
        ]

    async def run(self) -> None:
        """Follow the name until cancelled."""
        while True:
            pause = await self.look()
            await asyncio.sleep(pause)

    async def look(self) -> float:
        """Ask once, and use what is answered. Return in how many seconds to ask again."""
        found = await self._look_up(self._name)
        failures = [one for one in found.values() if isinstance(one, LookupFailedError)]
        records = [one for one in found.values() if isinstance(one, DnsRecords)]
        if any(one.late for one in failures):
            self._observers.notify(DeadlinePassed(Wait.DNS.value))
        count = max((len(one.places) for one in records), default=0)
        if count:
            self._say(count)
        # A server may fail for ever for a family of addresses that it does not know.
        self._note(None if count else str(failures[0]) if failures else "has no address")
        if not records:
            self._failures += 1
            return jittered(
                min(RETRY * 2 ** min(self._failures - 1, 10), LONGEST_RETRY), self._chance
            )
        self._failures = 0
        ttl = min(one.ttl for one in records)
        return jittered(min(max(ttl, self._dns.min_ttl), self._dns.max_ttl), self._chance)

    def _say(self, count: int) -> None:
        if count < self.count:
            self._fewer.append(count)
            if len(self._fewer) < MISSING:
                return
            count = max(self._fewer)
        self._fewer.clear()
        if count != self.count:
            logger.info("%s: %d replicas, %d before", self._name.name, count, self.count)
            self.count = count
            self._use(count)

    def _note(self, wrong: str | None) -> None:
        if wrong is not None and wrong != self._problem:
            self._problem_since = self._now()
            logger.warning(
                "replicas.name %s: %s: taken to be %d", self._name.name, wrong, self.count
            )
        self._problem = wrong
