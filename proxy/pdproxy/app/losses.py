"""Wiring of what decides on retries, and on requests under which engines are lost."""

from __future__ import annotations

from functools import partial

from pdproxy.app.process import Process
from pdproxy.app.retrying import Decided, Retrying
from pdproxy.app.share import PoolShare
from pdproxy.deciding.comebacks import Comebacks
from pdproxy.deciding.engines_lost import EnginesLost
from pdproxy.deciding.local_scheduler import LocalScheduler
from pdproxy.deciding.retry_slots import RetrySlots
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.scheduling.ledger import Ledger
from pdproxy.settings.schema import Settings
from pdproxy.upstream.admin import EngineAdmin


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
