"""The loss of one engine, and who was under way there: which requests may be the cause.

A request may be the cause of a loss if it had been sent to the engine within the last `SOON`
seconds (`scheduling.losses`), and had no data yet: what ends an engine does so as the engine begins
it. Such a request is a suspect. The only suspect is treated as the cause, whoever else was under
way there. Where there are several suspects, or none among several requests, the loss counts for
nobody. Once one of them has lost another engine, the first loss is explained: the others are no
suspects any more.
"""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from pdproxy.kit.one_shot_event import OneShotEvent
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role


class Only(msgspec.Struct, eq=False):
    """Values that are noted one after the other. What counts is whether all of them are the
    same.
    """

    value: Hashable = None
    several: bool = False

    def note(self, value: Hashable) -> None:
        """Note one more."""
        if self.value is None:
            self.value = value
        elif value != self.value:
            self.several = True

    def is_only(self, value: Hashable) -> bool:
        """Return whether this one was noted, and no other one."""
        return not self.several and value == self.value


class Loss(msgspec.Struct, eq=False):
    """One run of an engine to which connections have broken at about the same time, until `until`.

    `broke_at`: when the first one has, None if probes have found the engine down. `is_lost`:
    whether the engine's process has ended, None before that is known, which `known` announces.
    `explained`: the cause is known. `requests` and `clients`: of all that were under way there;
    `suspects` and `their_clients`: of those that may be the cause.
    """

    engine: LedgerEngine
    until: float
    broke_at: float | None
    is_lost: bool | None = None
    known: OneShotEvent | None = None
    explained: bool = False
    requests: Only = msgspec.field(default_factory=Only)
    clients: Only = msgspec.field(default_factory=Only)
    suspects: Only = msgspec.field(default_factory=Only)
    their_clients: Only = msgspec.field(default_factory=Only)

    def note(self, number: int, client: bytes | str, *, suspect: bool) -> None:
        """Note a request that was under way there, by its number."""
        self.requests.note(number)
        self.clients.note(client)
        if suspect:
            self.suspects.note(number)
            self.their_clients.note(client)

    @property
    def has_suspects(self) -> bool:
        """Whether any request may be the cause."""
        return self.suspects.value is not None

    def is_of_request(self, number: int) -> bool:
        """Return whether the loss counts for this request: it is the only suspect, or was alone
        there.
        """
        return not self.explained and (
            self.requests.is_only(number) or self.suspects.is_only(number)
        )

    def is_of_client(self, client: bytes | str) -> bool:
        """Return whether the loss counts for this client: all suspects, or all requests that were
        there, are the client's.
        """
        return not self.explained and (
            self.clients.is_only(client) or self.their_clients.is_only(client)
        )


class BrokenLeg(msgspec.Struct, frozen=True, eq=False):
    """A leg whose engine may be lost. `streamed`: its data had come; `suspect`: its request may be
    the cause.
    """

    loss: Loss
    streamed: bool
    suspect: bool


class RequestLosses(msgspec.Struct, eq=False):
    """The engines that were lost under one request of a client; its prompts, if it has several,
    share it.

    `number`: no other request has it. `broken`: legs of which it is not known whether their engine
    is lost; `engines`: those that are, each with whether the request is a suspect there. `earlier`:
    how many count from the beginning, since its fingerprint or its client has losses. `protected`:
    roles whose last engine it does not get, from the beginning; `limited`: whether its client is.
    """

    number: int
    broken: list[BrokenLeg] = []
    engines: dict[Loss, bool] = {}
    earlier: int = 0
    protected: frozenset[Role] = frozenset()
    limited: bool = False

    @property
    def some(self) -> bool:
        """See `scheduling.losses.LostUnder`."""
        return bool(self.engines)
