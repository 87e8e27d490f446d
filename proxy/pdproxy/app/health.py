"""Wiring of what watches a pool's engines: probes, the audit, the stall watch, outliers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdproxy.app.capacity import Scraped
from pdproxy.app.share import PoolShare
from pdproxy.app.watching import Probing, Watching
from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.exclusions import Exclusions
from pdproxy.fleet.health_canary import HealthCanary
from pdproxy.fleet.prober import Prober
from pdproxy.fleet.stalls import Stalls
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.outliers import Outliers
from pdproxy.settings.schema import Settings
from pdproxy.transfer.contract import Contract
from pdproxy.upstream.admin import EngineAdmin
from pdproxy.wire.route import Route

if TYPE_CHECKING:
    from pdproxy.app.process import Process


def build_watching(
    settings: Settings,
    process: Process,
    ledger: Ledger,
    engines: EngineRegistry,
    admin: EngineAdmin,
    contract: Contract,
    own: PoolShare | None,
) -> Watching:
    """Return what watches the engines of the pool of these settings. Nothing is asked yet. `own`:
    see `build_ledger`.
    """
    observers, tasks = process.observers, process.tasks
    auditor = (
        Auditor(engines, ledger, observers)
        if own is None
        else own.auditor(engines, ledger, observers, tasks)
    )
    canary = HealthCanary(admin, observers, contract.capabilities.canary_on, settings.health)
    outliers = Outliers(settings.outliers)
    probing: Probing | None = None
    if process.share.chooses:
        probing = _probing(
            settings, process, ledger, engines, admin, contract, auditor, outliers, canary, own
        )
    made = Watching(auditor=auditor, canary=canary, outliers=outliers, probing=probing)
    if own is not None:
        own.share_states(made, engines, ledger, observers)
    return made


def _probing(
    settings: Settings,
    process: Process,
    ledger: Ledger,
    engines: EngineRegistry,
    admin: EngineAdmin,
    contract: Contract,
    auditor: Auditor,
    outliers: Outliers,
    canary: HealthCanary,
    own: PoolShare | None,
) -> Probing:
    observers, tasks, now = process.observers, process.tasks, process.now
    scraped = Scraped(auditor, ledger, observers, now)
    derenders = bool(settings.limits.continuations) and settings.continuations.parsed == "auto"
    prober = Prober(
        engines,
        ledger,
        admin,
        scraped,
        observers,
        tasks,
        settings.probes,
        now,
        derenders=derenders,
        messages=Route.MESSAGES in contract.capabilities.routes,
    )
    exclusions = Exclusions(engines, ledger, outliers, observers, tasks, now, settings.outliers)
    stalls = Stalls(
        engines,
        ledger,
        canary,
        admin.scrape,
        observers,
        tasks,
        process.clock,
        settings.health,
        settings.deadlines,
        None if own is None or own.legs is None else own.legs.hear,
    )
    return Probing(scraped=scraped, prober=prober, stalls=stalls, exclusions=exclusions)
