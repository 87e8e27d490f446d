"""Which of several operators acts: the one that holds a Lease and renews it in time.

Owns the Lease. Times of other holders are measured by this process's own clock, from when a change
was seen: clocks of machines differ. A holder that can't renew stops before others may take over.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Literal

import msgspec

from pdproxy.upstream.kubernetes import UNREADABLE, ApiConnection, ApiError
from pdproxy.wire.kubernetes import Metadata, Renamed
from pdproxy_operator.kinds import LEASES
from pdproxy_operator.resources import Object

logger = logging.getLogger("pdproxy.operator")

DURATION, RENEW_WITHIN, EVERY = 15.0, 10.0, 2.0
"""Seconds for which a Lease that was renewed keeps others away; within which its holder must renew
it, or else it stops; and between two tries.
"""
NAME = "pdproxy-operator"


class LeaseSpec(Renamed, frozen=True):
    """Who holds a Lease. `holder` "": nobody. Times: RFC 3339."""

    holder: str = msgspec.field(name="holderIdentity", default="")
    duration: int = msgspec.field(name="leaseDurationSeconds", default=0)
    acquire_time: str | None = None
    renew_time: str | None = None
    transitions: int = msgspec.field(name="leaseTransitions", default=0)


class Lease(Renamed, frozen=True):
    """A Lease (coordination.k8s.io/v1)."""

    metadata: Metadata = Metadata()
    spec: LeaseSpec = LeaseSpec()


class LostError(Exception):
    """This operator does not hold the Lease any more."""


class Election:
    """Takes part for one operator. `holder`: its name, which no other has; `now`: seconds of a
    steady clock.
    """

    def __init__(
        self,
        connection: ApiConnection,
        namespace: str,
        holder: str,
        now: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._connection = connection
        self._namespace = namespace
        self._holder = holder
        self._now = now
        self._sleep = sleep
        self._seen: tuple[str, str] | None = None
        """The uid and the version of the Lease that was seen last."""
        self._seen_at = 0.0
        self._renewed_at: float | None = None
        """When the last renewal that has succeeded was begun, None: this operator does not hold
        the Lease.
        """
        self._said = ""

    def __repr__(self) -> str:
        return f"<Election of {self._holder}>"

    @property
    def is_leader(self) -> bool:
        """Whether this operator may act now."""
        return self._renewed_at is not None and self._now() < self._renewed_at + RENEW_WITHIN

    async def won(self) -> None:
        """Wait until this operator holds the Lease."""
        while not await self._try():
            await self._pause()

    async def keep(self) -> None:
        """Renew the Lease for as long as this operator acts. Raises LostError."""
        while True:
            await self._pause()
            if not await self._try() and not self.is_leader:
                raise LostError

    async def _pause(self) -> None:
        await self._sleep(EVERY * random.uniform(0.8, 1.2))

    async def _try(self) -> bool:
        """Try once to take the Lease, or to renew it. Return whether that has succeeded."""
        begun = self._now()
        try:
            async with asyncio.timeout(max(1.0, min(RENEW_WITHIN / 2, self._left(begun)))):
                has = await self._take()
        except (ApiError, TimeoutError) as error:
            await self._connection.drop()
            # another one has written at the same time
            if not (isinstance(error, ApiError) and error.status == 409):
                logger.warning("the Lease %s: %s", NAME, str(error) or "no answer in time")
            return False
        self._renewed_at = begun if has else None
        return has

    def _left(self, now: float) -> float:
        """Return the seconds that a try may take."""
        return RENEW_WITHIN if self._renewed_at is None else self._renewed_at + RENEW_WITHIN - now

    async def _take(self) -> bool:
        """Take or renew it, unless another one holds it. Raises ApiError."""
        try:
            found = await self._connection.get(LEASES.path(self._namespace, NAME), {})
        except ApiError as error:
            if error.status != 404:
                raise
            await self._write("POST", LeaseSpec(), None)
            return True
        try:
            lease = msgspec.json.decode(found, type=Lease)
        except UNREADABLE as error:
            raise ApiError(f"a Lease that can't be read: {error}") from None
        spec, seen = lease.spec, (lease.metadata.uid, lease.metadata.resource_version)
        if seen != self._seen:
            self._seen, self._seen_at = seen, self._now()
        is_free = not spec.holder or self._now() >= self._seen_at + DURATION
        if spec.holder != self._holder and not is_free:
            self._say(spec.holder)
            return False
        await self._write("PUT", spec, lease.metadata.resource_version)
        return True

    async def _write(
        self, method: Literal["POST", "PUT"], spec: LeaseSpec, version: str | None
    ) -> None:
        """Hold it. `spec`: as it was, `version`: of the Lease that is replaced."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_own = spec.holder == self._holder
        metadata: Object = {"name": NAME, "namespace": self._namespace}
        if version is not None:
            metadata["resourceVersion"] = version
        body = {
            "apiVersion": LEASES.version,
            "kind": LEASES.kind,
            "metadata": metadata,
            "spec": {
                "holderIdentity": self._holder,
                "leaseDurationSeconds": round(DURATION),
                "acquireTime": spec.acquire_time if is_own else now,
                "renewTime": now,
                "leaseTransitions": spec.transitions + (version is not None and not is_own),
            },
        }
        path = LEASES.path(self._namespace, NAME if method == "PUT" else "")
        await self._connection.send(method, path, {}, msgspec.json.encode(body))

    def _say(self, holder: str) -> None:
        if holder != self._said:
            self._said = holder
            logger.info("%s acts: this operator waits", holder)
