"""What is remembered of the requests under which engines were lost: by their fingerprints, or by
their clients.

Pure: `now` is an argument. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeAlias, TypeVar

import msgspec

from pdproxy.deciding.few_first import FewFirst
from pdproxy.deciding.loss import Loss
from pdproxy.kit.expiring import Expiring
from pdproxy.scheduling.ledger_engine import Role

KEPT = 600.0
"""Seconds behind its last loss, or behind its last refusal, for which a suspect is remembered."""
REFUSED_AT = 3
"""Losses behind which a fingerprint is refused for a time."""
FIRST_REFUSAL = 15.0
"""Seconds of the first refusal behind the last loss, doubled by each further loss. Then the
fingerprint gets one engine, and no role's last one: engines that fail by themselves may all have
had the same prompt.
"""
LAST_REFUSAL = 3600.0
"""Seconds of the longest refusal."""
MOST_LOSSES = 16
"""Losses of one suspect: the oldest is forgotten. As many are refused for the longest time."""
FRESH = 60.0
"""Seconds behind its last loss for which a suspect with one loss is kept from the last engine of
that role.
"""
MOST_KEPT = 1024
"""Suspects of one kind: the oldest is forgotten."""
Counts: TypeAlias = Callable[[], bool] | None
K = TypeVar("K", bound=Hashable)


class Suspect(msgspec.Struct, eq=False):
    """A fingerprint or a client. `streamed`: an engine was lost behind the first data of a stream,
    so that data clears nobody.

    `engines`: each that was lost, with the question whether the loss counts, since it may turn out
    later that others were there; None: it counts in any case.
    `last`: when it has lost the last one. `turns`: of its requests, once they have some.
    """

    until: float = 0.0
    last: float = 0.0
    engines: dict[Loss, Counts] = {}
    streamed: bool = False
    turns: FewFirst | None = None

    @property
    def losses(self) -> int:
        """How many losses count."""
        return sum(counts is None or counts() for counts in self.engines.values())

    def refused_for(self, now: float) -> float:
        """Return the seconds for which the fingerprint is refused from now on, 0 if it is not."""
        losses = self.losses
        seconds = (
            0.0
            if losses < REFUSED_AT
            else min(FIRST_REFUSAL * 2.0 ** (losses - REFUSED_AT), LAST_REFUSAL)
        )
        return max(0.0, self.last + seconds - now)


class Suspects(Expiring[K, Suspect]):
    """The suspects of one kind."""

    def __init__(self) -> None:
        super().__init__(MOST_KEPT)

    def losses(self, key: K | None) -> int:
        """Return how many losses of a suspect count, 0 for any other key."""
        found = None if key is None else self.get(key)
        return 0 if found is None else found.losses

    def add(self, key: K, loss: Loss, counts: Counts, now: float, *, streamed: bool) -> int:
        """Add a loss, and return how many count."""
        suspect = self.get(key) or Suspect()
        suspect.engines = {
            one: still for one, still in suspect.engines.items() if still is None or still()
        }
        if counts is None or loss not in suspect.engines:
            suspect.engines[loss] = counts
        if len(suspect.engines) > MOST_LOSSES:
            del suspect.engines[next(iter(suspect.engines))]
        suspect.streamed |= streamed
        suspect.last = now
        suspect.until = now + suspect.refused_for(now) + KEPT
        if suspect.turns is not None:
            suspect.turns.again()
        self.keep(key, suspect)
        return suspect.losses

    def forget_old(self, now: float) -> None:
        """Forget those whose time is over: refusals have different lengths, so that the oldest may
        not be the first to end.
        """
        for key in [key for key, suspect in self.items() if suspect.until <= now]:
            del self[key]

    def fresh_roles(self, key: K, now: float) -> frozenset[Role]:
        """Return the roles of which a suspect has lost an engine just before, as it was begun
        there.
        """
        found = self.get(key)
        if found is None or now >= found.last + FRESH:
            return frozenset()
        return frozenset(
            loss.engine.role
            for loss, counts in found.engines.items()
            if loss.has_suspects and (counts is None or counts())
        )

    def answered(self, key: K | None, *, whole: bool) -> None:
        """A request was answered. `whole`: to its end; otherwise its stream has begun."""
        found = None if key is None else self.get(key)
        if key is None or found is None or (found.streamed and not whole):
            return
        del self[key]
        if found.turns is not None:
            found.turns.open()
