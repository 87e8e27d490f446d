"""The turn before a prompt, whose KV a decode engine keeps: what serves the prompt gives the KV to
the prefill engine, and tells the scheduler what came of it.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol


class TurnEnd(Enum):
    """What came of KV that was taken for a prefill engine."""

    USED = "used"  # it has answered: it has pulled the KV, or has had it
    UNUSED = "unused"  # it was not asked, or has refused the prompt: nobody will read the KV
    REFUSED = "refused"  # it has failed, perhaps because it could not pull
    LEFT = "left"  # nobody awaits its answer: it may still pull
    HUNG = "hung"  # it has not answered in time


class FoundTurn(Protocol):
    """The turn that a prompt continues, found for the prefill engine of one attempt. If it is
    taken, it is ended once.
    """

    @property
    def decode(self) -> str:
        """The URL of the decode engine that keeps the KV."""

    @property
    def params(self) -> bytes:
        """What the prefill engine is sent."""

    @property
    def tokens(self) -> int:
        """Whose KV that names."""

    def take(self) -> bool:
        """Take the turn: no other prompt gets it. Return False if it is not kept any more."""

    def is_there(self) -> bool:
        """Return whether the decode engine still keeps what was taken: not if it was restarted, or
        if the time is over.
        """

    def end(self, how: TurnEnd) -> None:
        """Tell what came of what was taken."""
