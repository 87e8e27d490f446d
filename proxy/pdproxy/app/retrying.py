"""What a pool's requests ask before they are tried again, and where engines are lost under them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from pdproxy.deciding.comebacks import Comebacks
from pdproxy.deciding.engines_lost import EnginesLost
from pdproxy.deciding.retry_slots import RetrySlots
from pdproxy.scheduling.losses import KnownSuspects, Losses, RequestAtRisk, Slot


@dataclass(frozen=True, slots=True)
class Retrying:
    """See `ExchangeResources`. `shortcomings`: sentences on requests that are not served now."""

    slot: Callable[[RequestAtRisk], Awaitable[Slot | None]]
    engines_change: Callable[[str | None, float], Awaitable[bool]]
    lost: Losses
    suspects: KnownSuspects
    shortcomings: Callable[[], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Decided:
    """What decides that, in the process that does."""

    slots: RetrySlots
    comebacks: Comebacks
    lost: EnginesLost

    @property
    def here(self) -> Retrying:
        """What requests of this process ask."""
        lost = self.lost
        return Retrying(self.slots.enter, self.comebacks.wait, lost, lost.known, lost.shortcomings)
