"""What a request asks, and what it tells, where engines disappear under requests.

What serves a request (`serving`) sees which legs break. Which engines are lost, which requests may
be the cause, and which engines such a request gets, is found by `deciding`. The two know each other
by this module alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeAlias

from pdproxy.kit.errors import EnginesLostError
from pdproxy.scheduling.leases import Lease
from pdproxy.scheduling.ledger_engine import LedgerEngine

SOON = 1.0
"""Seconds behind its beginning in which a request that ends engines does so. Behind them, an engine
disappears by itself.
"""
Fingerprint: TypeAlias = bytes
"""What a request is known by when its client sends it again."""


class LostUnder(Protocol):
    """The engines that were lost under one request; its prompts, if it has several, share it."""

    @property
    def some(self) -> bool:
        """Whether there are any."""


class RequestAtRisk(Protocol):
    """A request, as far as it matters here. `lost` is empty until an engine may be lost under it;
    then it has one element.
    """

    @property
    def request_id(self) -> str:
        """Its id."""

    @property
    def client(self) -> bytes | str:
        """The name of its client."""

    @property
    def lost(self) -> list[LostUnder]:
        """What was lost under it."""


class Slot(Protocol):
    """A place for one more attempt, from its beginning to its first data or its answer. Leave it
    once.
    """

    def leave(self) -> None:
        """Give the place back. Doing so again changes nothing."""

    def lost(self) -> None:
        """Note that the engine of the attempt may be lost: that is judged before the next request
        begins, behind a moment, and not when this place is left.
        """


class Turn(Protocol):
    """The permission to begin of a request that takes turns with others like it."""

    def leave_in(self, seconds: float, *, harmless: bool = True) -> None:
        """Leave it later, unless it is left before. The last call counts."""

    def leave(self, *, harmless: bool = True) -> None:
        """Let the next request begin; where this one did no harm, perhaps more of them. Doing so
        again changes nothing.
        """


class KnownSuspects:
    """The requests, and the clients, that are known to have lost engines: all others are treated as
    ever.
    """

    __slots__ = ("clients", "fingerprints", "remembers")

    def __init__(
        self, fingerprints: Collection[Fingerprint] = (), clients: Collection[bytes | str] = ()
    ) -> None:
        self.fingerprints = fingerprints
        self.clients = clients
        self.remembers = False
        """Whether there are any. An attribute: every request reads it."""

    def __repr__(self) -> str:
        return f"<KnownSuspects {self.fingerprints} {self.clients}>"

    def know(self, fingerprint: Fingerprint | None, client: bytes | str) -> bool:
        """Return whether a request or its client is one of them."""
        return client in self.clients or fingerprint in self.fingerprints


class Losses(Protocol):
    """Those of one pool."""

    async def turn(
        self, sender: RequestAtRisk, fingerprint: Fingerprint, seconds: float
    ) -> Turn | None:
        """Look at a known suspect that begins. Wait for its turn if its client is limited, or its
        fingerprint has a loss. None: it is neither.

        Raises:
            EnginesLostError: it is refused, its turn did not come within `seconds`, or too many
                others wait.
        """

    def broke(
        self, sender: RequestAtRisk, engine: LedgerEngine, since: float, *, streamed: bool
    ) -> bool:
        """Note a leg whose connection has broken. Return whether its engine may be lost.

        `since`: when it was sent; `streamed`: data had come.
        """

    def left(
        self, sender: RequestAtRisk, leases: Iterable[Lease], fingerprint: Fingerprint
    ) -> None:
        """Note that a client has left before any data: its request may still end the engines at
        which it was under way.
        """

    async def judge(
        self, sender: RequestAtRisk, fingerprint: Fingerprint | None, *, looks_back: bool = False
    ) -> EnginesLostError | None:
        """Find out which engines are lost under a request. Return why it is not tried again, None
        if it may be.

        `looks_back`: also where its parts were under way that were ended since another part has
        failed.
        """

    async def forbidden(self, sender: RequestAtRisk) -> Sequence[str]:
        """Return the engines that a request must not get: the last ones of a role, or too many of
        those that are left.
        """

    def answered(
        self, client: bytes | str, fingerprint: Fingerprint | None, *, whole: bool
    ) -> None:
        """Note an answer to a known suspect: neither the request nor its client is the cause.
        `whole`: to its end; otherwise its stream has begun.
        """


def protected() -> EnginesLostError:
    """Return the error of a request that could get only engines that it must not get."""
    return EnginesLostError(
        "an engine disappeared under this request: it gets none of those that are left"
    )
