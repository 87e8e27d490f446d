"""Wiring of what watches a pool's engines: probes, the audit, the stall watch, outliers; and of
what workers share of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdproxy.app.capacity import Scraped
from pdproxy.app.share import PoolShare, Share
from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.exclusions import Exclusions
from pdproxy.fleet.findings import Findings
from pdproxy.fleet.health_canary import HealthCanary
from pdproxy.fleet.life_signs import LifeSigns
from pdproxy.fleet.prober import Prober
from pdproxy.fleet.stalls import Stalls
from pdproxy.kit.leading import ALWAYS, Lead
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.outliers import Outliers
from pdproxy.settings.schema import Settings
from pdproxy.transfer.contract import Contract
from pdproxy.upstream.admin import EngineAdmin
from pdproxy.wire.route import Route

if TYPE_CHECKING:
    from pdproxy.app.process import Process


@dataclass(slots=True, kw_only=True)
class Watching:
    """What watches the engines of a pool. `findings`: what workers share of it, None for a process
    that is alone.
    """

    auditor: Auditor
    scraped: Scraped
    prober: Prober
    canary: HealthCanary
    stalls: Stalls
    outliers: Outliers
    exclusions: Exclusions
    findings: Findings | None

    def start(self) -> None:
        """Begin to watch."""
        self.prober.start()
        self.stalls.start()
        self.exclusions.start()


class _Wishes:
    """Asks the process that probes for a probe, once there are `findings`."""

    def __init__(self) -> None:
        self.findings: Findings | None = None

    def wish(self, url: str) -> None:
        if self.findings is not None:
            self.findings.wish(url)


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
    observers, tasks, now, probes = process.observers, process.tasks, process.now, settings.probes
    share = process.share.several
    lead: Lead = ALWAYS if share is None else share.lead
    wishes = _Wishes()
    auditor = (
        Auditor(engines, ledger, observers)
        if own is None
        else own.auditor(engines, ledger, observers, tasks)
    )
    scraped = Scraped(auditor, ledger, observers, now)
    derenders = bool(settings.limits.continuations) and settings.continuations.parsed == "auto"
    prober = Prober(
        engines,
        ledger,
        admin,
        scraped,
        observers,
        tasks,
        probes,
        now,
        derenders=derenders,
        messages=Route.MESSAGES in contract.capabilities.routes,
        lead=lead,
        pass_on=wishes.wish,
    )
    canary = HealthCanary(admin, observers, contract.capabilities.canary_on, settings.health)
    signs = None if own is None else LifeSigns(*own.signs)
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
        lead,
        signs,
    )
    outliers = Outliers(settings.outliers)
    exclusions = Exclusions(
        engines, ledger, outliers, observers, tasks, now, settings.outliers, lead
    )
    made = Watching(
        auditor=auditor,
        scraped=scraped,
        prober=prober,
        canary=canary,
        stalls=stalls,
        outliers=outliers,
        exclusions=exclusions,
        findings=None,
    )
    if share is not None:
        made.findings = wishes.findings = scraped.findings = _findings(
            made, share, settings, process, engines, ledger
        )
    return made


def _findings(
    watching: Watching,
    share: Share,
    settings: Settings,
    process: Process,
    engines: EngineRegistry,
    ledger: Ledger,
) -> Findings:
    topic, siblings = f"findings {settings.pool.name}", share.siblings

    def probe(engine: Engine) -> None:
        watching.prober.soon(engine)

    found = Findings(
        share.lead,
        lambda body: siblings.tell(topic, body),
        engines,
        ledger,
        watching.auditor,
        watching.outliers,
        watching.stalls,
        watching.scraped,
        process.observers,
        process.now,
        probe,
        succeeds=share.succeeds,
    )
    found.is_behind = lambda: siblings.is_behind()
    siblings.hears[topic] = found.received
    share.findings.append(found)
    return found
