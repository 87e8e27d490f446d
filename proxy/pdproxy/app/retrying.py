"""What a pool's requests ask before they are tried again, and where engines are lost under them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pdproxy.deciding.comebacks import Comebacks
from pdproxy.deciding.engines_lost import EnginesLost
from pdproxy.deciding.local_scheduler import LocalScheduler
from pdproxy.deciding.retry_slots import RetrySlots
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.losses import KnownSuspects, Losses, RequestAtRisk, Slot
from pdproxy.settings.schema import Settings
from pdproxy.upstream.admin import EngineAdmin

if TYPE_CHECKING:
    from pdproxy.app.process import Process
    from pdproxy.app.share import PoolShare


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


def build_retrying(
    settings: Settings,
    process: Process,
    local: LocalScheduler,
    ledger: Ledger,
    engines: EngineRegistry,
    admin: EngineAdmin,
    own: PoolShare | None,
) -> Retrying:
    """Make what decides, unless another process does, and return what requests ask."""
    if own is not None and not own.chooses:
        return own.retrying(engines)
    observers, clock = process.observers, process.clock
    lost = EnginesLost(
        local.found_gone,
        engines,
        partial(admin.answers, path="/health", late=True),
        observers,
        process.tasks,
        clock,
        process.now,
        settings.limits,
    )
    observers.add(lost)
    slots = RetrySlots(process.retries, lost, settings.deadlines)
    decided = Decided(slots, Comebacks(ledger, clock, observers, settings.limits), lost)
    if own is not None:
        own.decides(decided, ledger)
    return decided.here
