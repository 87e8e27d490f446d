"""What several workers share: tables in memory that the parent maps before it forks them.

`Shared` is made by the parent; `Share` is what one worker does with it: the parts of a proxy that differ from those of a process
that serves alone.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pdproxy.app.shown import Shown, ShownOfAll
from pdproxy.app.siblings import Siblings
from pdproxy.fleet import shared_audit, shared_signs
from pdproxy.fleet.findings import Findings
from pdproxy.fleet.shared_audit import SharedAuditor
from pdproxy.fleet.shared_signs import Signs
from pdproxy.kit import heirs, leading, shared_places
from pdproxy.kit.heirs import ADOPT, ADOPTED
from pdproxy.kit.leading import Leading
from pdproxy.kit.links import Message
from pdproxy.kit.shared_places import SharedPlaces
from pdproxy.kit.shared_records import SharedRecords
from pdproxy.kit.shared_table import SharedTable
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe import catalog_workers
from pdproxy.observe.metrics import Gauge, Metrics
from pdproxy.scheduling import shared_breakers, shared_ledger
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.shared_breakers import SharedBreakers
from pdproxy.scheduling.shared_ledger import SharedLedger
from pdproxy.serving.access import shared_quotas
from pdproxy.serving.access.quotas import Quotas
from pdproxy.serving.access.shared_quotas import SharedQuotas
from pdproxy.serving.kv import shared_custodian
from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.shared_custodian import SharedCustodian
from pdproxy.serving.request.admission import Admission
from pdproxy.serving.request.shared_admission import SharedAdmission
from pdproxy.settings.key_lines import KeyLimits
from pdproxy.web.app import Readiness

MAX_ENGINES = 4096
"""Engines whose load is shared: as many as a pool can have."""
MAX_KEYS = 8192
"""Names of keys whose use is shared. That of further ones counts in each worker by itself."""
REFRESH_EVERY = 0.25
"""Seconds between two looks at all that is shared: an engine that drains is looked at without a request, and a store that another
core saw late is found."""


class Shared:
    """The memory of so many workers."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.loads = SharedTable(workers, MAX_ENGINES, shared_ledger.MEASURES)
        self.breakers = SharedTable(workers, MAX_ENGINES, shared_breakers.MEASURES, shared_breakers.KEPT)
        self.moved = SharedTable(workers, MAX_ENGINES, shared_audit.MEASURES, shared_audit.KEPT)
        self.signs = SharedTable(workers, MAX_ENGINES, shared_signs.MEASURES)
        self.lead = SharedTable(workers, 1, leading.MEASURES)
        self.places = SharedTable(workers, 1, shared_places.MEASURES)
        self.quotas = SharedTable(workers, MAX_KEYS, shared_quotas.MEASURES, shared_quotas.KEPT)
        self.custody = SharedRecords(workers, shared_custodian.UNITS)
        # Where the system has no such counters, waiting workers look every few milliseconds.
        self.wakes = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(workers)] if hasattr(os, "eventfd") else []

    def clear(self, number: int) -> None:
        """Give back what a worker had that has ended."""
        for table in (self.loads, self.breakers, self.moved, self.signs, self.lead, self.places, self.quotas):
            table.clear(number)

    def of(self, number: int, send: Callable[[Message], None], now: Callable[[], float] = time.monotonic) -> Share:
        """Return a worker's part. `send`: sends its parent a message."""
        return Share(self, number, send, now)


class Alone:
    """The parts of a process that serves alone."""

    several = None
    """See `Share`."""
    ledger = Ledger
    admission = Admission
    quotas = Quotas
    custodian = Custodian
    shown = Shown

    def start(self, tasks: TaskOwner) -> None:
        """There is nobody to follow."""

    def stop(self) -> None:
        """There is nothing to stop."""


ALONE = Alone()


class Share:
    """A worker's part. `number`: of the worker; `send`: sends its parent a message."""

    def __init__(self, shared: Shared, number: int, send: Callable[[Message], None], now: Callable[[], float]) -> None:
        self.number = number
        self._shared = shared
        self._now = now

        self.siblings = Siblings(send)
        table = shared.lead
        self.lead = Leading(number, table.column(number), table.others(number))
        self.findings: list[Findings] = []
        """Those of each pool."""
        self._ledger: SharedLedger | None = None
        self._shown: ShownOfAll | None = None
        self._custodian: SharedCustodian | None = None
        self._send = send
        self._admission: SharedAdmission | None = None

    def __repr__(self) -> str:
        return f"<Share of worker {self.number}>"

    @property
    def several(self) -> Share:
        """Itself: there are several workers."""
        return self

    def start(self, tasks: TaskOwner) -> None:
        """Follow the other workers, in tasks of this owner."""
        self.lead.beat()
        for findings in self.findings:
            findings.start(tasks)
        if self._admission is not None:
            self._admission.start()
        if self._shown is not None:
            self._shown.start(tasks)
        tasks.keep(self._follow, "shared load")

    def stop(self) -> None:
        """Follow them no more."""
        self.lead.leave()
        if self._admission is not None:
            self._admission.stop()
        if self._shown is not None:
            self._shown.report()  # nothing is counted any more

    def received(self, message: Message) -> None:
        """Process a message of the parent that is not for the process itself."""
        if message.kind != ADOPT:
            self.siblings.received(message)
        elif self._custodian is not None:
            self._custodian.adopt(heirs.decode(message.body))
            self._send(Message(ADOPTED, message.number))

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_EVERY)
            self.lead.beat()
            if self._ledger is not None:
                self._ledger.refresh(all_of_it=True)
            if self._admission is not None:
                self._admission.look()

    def ledger(self, *arguments: Any, **options: Any) -> SharedLedger:
        """Return the worker's ledger. The arguments: those of `Ledger`."""
        loads, breakers, number = self._shared.loads, self._shared.breakers, self.number
        make = partial(SharedBreakers, column=breakers.column(number), others=breakers.others(number), number=number)
        column, others = loads.column(number), loads.others(number)
        self._ledger = SharedLedger(*arguments, column=column, others=others, breakers=make, **options)
        return self._ledger

    def auditor(self, *arguments: Any) -> SharedAuditor:
        """Return the worker's audit. The arguments: those of `Auditor`."""
        table = self._shared.moved
        return SharedAuditor(*arguments, column=table.column(self.number), others=table.others(self.number))

    def signs(self) -> Signs:
        """Return the signs of life that engines have shown to any worker."""
        table = self._shared.signs
        return Signs(table.column(self.number), table.others(self.number))

    def admission(self, *arguments: Any, **options: Any) -> SharedAdmission:
        """Return the worker's admission. The arguments: those of `Admission`."""
        table, number = self._shared.places, self.number
        places = SharedPlaces(number, table.column(number), table.others(number), self._shared.wakes, self._now)
        self._admission = SharedAdmission(*arguments, shared=places, **options)
        return self._admission

    def quotas(self, limits: Callable[[], Mapping[str, KeyLimits]], now: Callable[[], float]) -> Quotas:
        """Return the worker's limits of keys. The arguments: those of `Quotas`."""
        table = self._shared.quotas
        return SharedQuotas(limits, now, column=table.column(self.number), others=table.others(self.number))

    def custodian(self, *arguments: Any, **options: Any) -> SharedCustodian:
        """Return the worker's custodian. The arguments: those of `Custodian`."""
        self._custodian = SharedCustodian(*arguments, area=self._shared.custody.area(self.number), **options)
        return self._custodian

    def shown(self, admission: Admission, readiness: Callable[[], Readiness], metrics: Metrics) -> Shown:
        """Return what clients are shown of all workers. The arguments: those of `Shown`."""
        assert isinstance(admission, SharedAdmission)
        if (custodian := self._custodian) is not None:
            unshared = Gauge(catalog_workers.UNSHARED, lambda: [((), custodian.without_space)])
            metrics.add_gauges([unshared])
        self._shown = ShownOfAll(
            admission, readiness, metrics, self.siblings, self.number, lambda: admission.everywhere
        )
        return self._shown
