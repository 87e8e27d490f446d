"""Leases: the share of engines' load that a request holds while its legs run."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import msgspec

from pdproxy.observe.weighed import Weighed
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.prefix.prediction import Prediction
from pdproxy.scheduling.turn_before import FoundTurn


class Verdict(Enum):
    """What the end of one leg shows about its engine's health."""

    GOOD = "good"
    NEUTRAL = "neutral"  # the client left, or the request was refused: this shows nothing
    FAILED = "failed"
    DEAD = "dead"  # it said that its core has died: nothing more is sent until a probe succeeds
    # it refused the connection: nothing more is sent until a probe succeeds
    UNREACHABLE = "unreachable"


GOOD, NEUTRAL, FAILED = Verdict.GOOD, Verdict.NEUTRAL, Verdict.FAILED
"""For what each request does: a look-up in an enumeration costs ten times as much as one in a
module.
"""


class Lease(msgspec.Struct, eq=False):
    """One leg's share of an engine's load. Close it once, with `Ledger.close`.

    `role`: what the engine does for this request, never `ANY`. `prompt_bytes` is 0 where the leg
    gets the prompt's KV from another engine. `trial`: the number of the engine's trials that it
    belongs to, 0 if it is none; `proved`: whether the engine has passed it. `since`: when it was
    opened, in monotonic seconds. `expected`: whether anything is known of what the engine finds in
    its cache, as `prediction` says; `reports`: whether the engine is asked to report it.
    `beside_idle`: whether an engine for decode serves a whole request although one for prefill had
    none. `tokens`, `answering`, `begun_at`: see `WantedEngines`.
    """

    engine: LedgerEngine
    role: Role
    prompt_bytes: int
    closed: bool = False
    trial: int = 0
    proved: bool = False
    since: float = 0.0
    prediction: Prediction | None = None
    expected: bool = False
    reports: bool = False
    beside_idle: bool = False
    tokens: int = 0
    answering: Lease | None = None
    begun_at: float | None = None


class Space(Protocol):
    """Space for a prompt's KV in a decode engine's receive buffer."""

    def release(self) -> None:
        """Release the space. Calling it again changes nothing."""


class Assignment(msgspec.Struct, eq=False):
    """The leases that serve one request, the one that answers last. `reason`: why these, empty
    where nothing was decided.

    `weighed`: what the decision was based on, for those who ask for it; None where nothing was
    computed. `space`: what was taken for the prompt's KV, None where nothing has to be. `turn`: the
    turn before the prompt, None if none was found.
    """

    leases: tuple[Lease, ...]
    reason: str = ""
    weighed: Weighed | None = None
    space: Space | None = None
    turn: FoundTurn | None = None

    def __getitem__(self, role: Role) -> Lease:
        """Return the lease of a role.

        Raises:
            KeyError: this role was not asked for.
        """
        for lease in self.leases:
            if lease.role is role:
                return lease
        raise KeyError(role)
