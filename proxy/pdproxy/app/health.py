"""Wiring of what watches a pool's engines: probes, the audit, the stall watch, outliers; and of
what workers share of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

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
from pdproxy.fleet.worker_audit import WorkerAuditor
from pdproxy.kit.leading import ALWAYS, Lead
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.outliers import Counted, Outliers
from pdproxy.settings.schema import Settings
from pdproxy.transfer.contract import Contract
from pdproxy.upstream.admin import EngineAdmin
from pdproxy.wire.route import Route

if TYPE_CHECKING:
    from pdproxy.app.process import Process

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Counted]).decode


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


class _Others:
    """What a pool's parts ask of the other workers: before there are `findings`, and where there
    are none, nothing.
    """

    def __init__(self, share: Share | None, name: str) -> None:
        self._share = share
        self._topic = f"outliers {name}"
        self.findings: Findings | None = None

    def wish(self, url: str) -> None:
        if self.findings is not None:
            self.findings.wish(url)

    async def counted(self) -> Sequence[Sequence[Counted]]:
        if self._share is None:
            return ()
        answers = await self._share.siblings.ask(self._topic)
        return [_decode(answer) for answer in answers.of.values()]


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
    others = _Others(share, settings.pool.name)
    audited = engines, ledger, observers
    auditor = Auditor(*audited) if own is None else WorkerAuditor(*audited, *own.moved)
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
        pass_on=others.wish,
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
        engines, ledger, outliers, observers, tasks, now, settings.outliers, lead, others.counted
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
        made.findings = others.findings = scraped.findings = _findings(
            made, share, settings, process, engines, ledger
        )
        share.siblings.answers[f"outliers {settings.pool.name}"] = lambda: _encode(
            outliers.counted(now())
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
    topic, siblings, auditor = f"findings {settings.pool.name}", share.siblings, watching.auditor
    assert isinstance(auditor, WorkerAuditor)

    def probe(engine: Engine) -> None:
        watching.prober.soon(engine)

    found = Findings(
        share.lead,
        lambda body: siblings.tell(topic, body),
        engines,
        ledger,
        auditor,
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
    engines.when_forgotten(auditor.forget)
    return found
