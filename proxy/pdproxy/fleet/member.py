"""One engine's membership in a pool: who wants it there, and on which way in or out it is. Pure:
`now` is passed in.

Membership is not health: an engine that is down stays a member. What can be read from the engine's
engine is not kept here.

    joining --a probe ended--> probing --a probe was good--> warming --its slow start is over-->
    serving
       |                         |                             |                                  |
       +-------------------------+------------ drain ----------+----------------------------------+
                                               v
              (as before) <--undrain-- draining --nothing is left--> drained, or no member any more
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from pdproxy.kit.ordered_set import OrderedSet
from pdproxy.scheduling.ledger_engine import LedgerEngine
from pdproxy.settings.engines import ConfiguredEngine


class MembershipError(Exception):
    """What was asked for is not possible for this engine now. Nothing has changed. The message is
    for an operator.

    `owner`: the source that has added the engine, if that is why.
    """

    def __init__(self, message: str, owner: str | None = None) -> None:
        super().__init__(message)
        self.owner = owner


class UnknownMemberError(MembershipError):
    """There is no such engine."""


class MemberState(Enum):
    """Where an engine is between its coming and its going."""

    JOINING = "joining"  # it was added, and no probe has ended
    PROBING = "probing"  # no probe was good yet
    # it was added or restarted while others served, and gets more and more requests
    WARMING = "warming"
    SERVING = "serving"
    DRAINING = "draining"  # it gets no requests, and has some left, or KV that is still to be read
    DRAINED = "drained"  # it has nothing left, and waits to be undrained


@dataclass(slots=True)
class Drain:
    """Why an engine gets no more requests. Times in monotonic seconds.

    `by`: who asked for it. `removes`: whether it is removed once nothing is left. `cut`: whether
    its legs were ended because the deadline has passed. `over`: whether nothing is left.
    """

    by: str
    since: float
    deadline: float
    removes: bool
    cut: bool = False
    over: bool = False


@dataclass(slots=True, eq=False)
class Member:
    """An engine of the pool. Written by `Membership` alone.

    `settings`: what it was added with, `source`: by whom; `heirs`: others that want it as well, the
    first one gets it if its source gives it up. `since`: when it was added, in monotonic seconds.
    `is_new`: whether it was added or restarted while the proxy runs, and has had no request since;
    `warming`: whether it then came up while others served.
    """

    settings: ConfiguredEngine
    source: str
    since: float
    heirs: OrderedSet[str] = field(default_factory=OrderedSet)
    drain: Drain | None = None
    is_new: bool = True
    warming: bool = False

    @property
    def url(self) -> str:
        """The engine's identity."""
        return self.settings.url

    @property
    def leaves(self) -> bool:
        """Whether it is on its way out."""
        return self.drain is not None and self.drain.removes

    def state(self, engine: LedgerEngine) -> MemberState:
        """Return its state. `engine`: the ledger's entry of the engine."""
        if self.drain is not None:
            return MemberState.DRAINED if self.drain.over else MemberState.DRAINING
        if engine.evidence is None:
            return MemberState.PROBING if engine.probed else MemberState.JOINING
        return MemberState.WARMING if self.warming and engine.slow_until else MemberState.SERVING

    def begin_drain(self, drain: Drain) -> bool:
        """Begin to leave. Return whether it was not draining before.

        A second drain only adds to the first: it may remove the engine, and end it earlier.
        """
        if self.drain is None:
            self.drain = drain
            return True
        if drain.removes and not self.drain.removes:
            self.drain.removes, self.drain.by = True, drain.by
        self.drain.deadline = min(self.drain.deadline, drain.deadline)
        return False

    def end_drain(self) -> None:
        """Serve again.

        Raises:
            MembershipError: it is not being drained.
        """
        if self.drain is None:
            raise MembershipError(f"{self.url} is not being drained")
        self.drain = None

    def is_wanted_by(self, source: str) -> bool:
        """Return whether a source wants it in the pool."""
        return source in self.heirs or (source == self.source and not self.leaves)

    def claim(self, source: str) -> None:
        """Note that a source wants it, too."""
        if source != self.source:
            self.heirs.add(source)

    def disclaim(self, source: str) -> bool:
        """Note that a source does not want it any more. Return whether nobody does.

        Raises:
            MembershipError: the source never wanted it.
        """
        if source in self.heirs:
            self.heirs.discard(source)
            return False
        if source != self.source:
            raise MembershipError(
                f"{self.url} was added by {self.source}: {source} can't remove it", self.source
            )
        if not self.heirs:
            return True
        self.source = next(iter(self.heirs))
        self.heirs.discard(self.source)
        return False
