"""What one worker has found of an engine's health, for all workers: whole states, each with a
version.

One process leads (`kit.leading`): it probes, and sends each engine's state when it has read its
metrics, when anything has changed, and when a worker asks. Any worker whose own leg shows something
(an engine refuses connections, stands still, counts another prompt length) sends the state, too,
with the next version. Lower versions are old; of equal ones the leader's counts. It sends the state
again behind each one that it took, so all end with the leader's. A worker that starts knows
nothing, and asks until each of its engines is known. One that leads in place of a dead one asks all
others once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.engine import AuditAccount, Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.stalls import Stalls
from pdproxy.kit.leading import Lead
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import NodeChanged, Observers
from pdproxy.scheduling.breakers import BreakerState
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import Evidence
from pdproxy.scheduling.outliers import Outliers
from pdproxy.upstream.metrics_page import Scrape

AGAIN = 0.1
"""Seconds until states are sent that waited because too much else did."""
ASK_EVERY = 1.0
"""Seconds until a worker asks again for engines of which it knows nothing, and between two wishes
to have an engine probed.
"""


class HealthFinding(msgspec.Struct, array_like=True):
    """An engine's state. `down`, `stalled`: why, None if it is not. `left_out`: see
    `Outliers.left_out`.

    `ejected`: engines with which it is not paired. Of the leader, as it has sent them last:
    `scrape`, the engine's metrics, the audit's `account` and `blind`, and the `breaker`.
    """

    url: str
    version: int
    evidence: Evidence | None
    down: str | None
    stalled: str | None
    left_out: tuple[float, int] | None
    ejected: list[str]
    scrape: Scrape | None = None
    account: AuditAccount | None = None
    blind: bool = False
    breaker: BreakerState | None = None


class _Told(msgspec.Struct, array_like=True):
    """A message. `leads`: whether its sender does. `unknown`: engines of which it knows nothing;
    `wanted`: those to be probed.
    """

    leads: bool
    findings: list[HealthFinding] = []
    unknown: list[str] = []
    wanted: list[str] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Told).decode


class Reported(Protocol):
    """Takes what engines report of themselves, but for the audit."""

    def reported(self, engine: Engine, metrics: Scrape) -> None:
        """Take an engine's metrics, which the leader has read."""


class Findings:
    """The findings of one pool. `tell` sends a message to all other workers. A watcher of the
    registry. `succeeds`: whether this process takes the place of a dead one.
    """

    def __init__(
        self,
        lead: Lead,
        tell: Callable[[bytes], None],
        engines: EngineRegistry,
        ledger: Ledger,
        auditor: Auditor,
        outliers: Outliers,
        stalls: Stalls,
        reader: Reported,
        observers: Observers,
        now: Callable[[], float],
        probe: Callable[[Engine], None],
        *,
        succeeds: bool = False,
    ) -> None:
        self._lead = lead
        self._tell = tell
        self._engines = engines
        self._ledger = ledger
        self._auditor = auditor
        self._outliers = outliers
        self._stalls = stalls
        self._reader = reader
        self._observers = observers
        self._now = now
        self._probe = probe
        self._succeeds = succeeds
        self._lacks: set[str] = set()
        """Engines whose audit is to be gone on with, if another process knows it."""
        self._started = False
        self._versions: dict[str, int] = {}
        self._scrapes: dict[str, Scrape] = {}
        self._wished: dict[str, float] = {}
        self._due: dict[str, None] = {}
        """Engines whose states are sent when the event loop has nothing else to do."""
        self.is_behind: Callable[[], bool] = lambda: False
        """Whether so much waits to be sent that states wait here: of each engine the last one is
        enough.
        """
        ledger.tell = self._found
        engines.watch(self)

    def __repr__(self) -> str:
        return f"<Findings of {len(self._engines)} engines>"

    def start(self, tasks: TaskOwner) -> None:
        """Ask for what others know, and go on asking, in a task of this owner. Needs a running
        event loop.
        """
        self._started = True
        if self._lead.leads:
            self._go_on_with(list(self._engines))
        tasks.keep(self._ask, "findings")

    def added(self, engine: Engine) -> None:
        """Ask for what is known of an engine."""
        if self._started and self._lead.leads:
            self._go_on_with([engine.url])
        elif self._started:
            self._send(unknown=[engine.url])

    def removed(self, engine: Engine) -> None:
        """Forget an engine."""
        url = engine.url
        if url != self._engines.replaced:
            self._versions.pop(url, None)
        for known in (self._scrapes, self._wished, self._due):
            known.pop(url, None)
        self._lacks.discard(url)

    def scraped(self, engine: Engine, scrape: Scrape) -> None:
        """Send what the probe of the leader has found, changed or not."""
        self._scrapes[engine.url] = scrape
        self._post(engine.url)

    def wish(self, url: str) -> None:
        """Ask the leader to probe an engine soon."""
        now = self._now()
        if now - self._wished.get(url, -ASK_EVERY) >= ASK_EVERY:
            self._wished[url] = now
            self._send(wanted=[url])

    # -- sending

    def _go_on_with(self, urls: list[str]) -> None:
        """Ask what the process knew that led before: the legs of workers go on, and so must the
        audit.
        """
        if self._succeeds and urls:
            self._lacks.update(urls)
            self._send(unknown=urls)

    async def _ask(self) -> None:
        while True:
            unknown = [url for url, engine in self._engines.items() if not engine.in_ledger.probed]
            if unknown and not self._lead.leads:
                self._send(unknown=unknown)
            await asyncio.sleep(ASK_EVERY)

    def _found(self, url: str) -> None:
        """Something of an engine's health was noted by this worker itself."""
        self._versions[url] = self._versions.get(url, 0) + 1
        self._post(url)

    def _post(self, url: str) -> None:
        if not self._due:
            asyncio.get_running_loop().call_soon(self._send_due)
        self._due[url] = None

    def _send_due(self) -> None:
        if self.is_behind():
            asyncio.get_running_loop().call_later(AGAIN, self._send_due)
            return
        urls, self._due = list(self._due), {}
        self._send_known(urls)

    def _send_known(self, urls: Iterable[str]) -> None:
        known = [
            engine
            for url in urls
            if (engine := self._engines.get(url)) is not None and engine.in_ledger.probed
        ]
        if known:
            self._send(findings=[self._finding(engine) for engine in known])

    def _finding(self, engine: Engine) -> HealthFinding:
        ledger_engine, url = engine.in_ledger, engine.url
        made = HealthFinding(
            url,
            self._versions.get(url, 0),
            ledger_engine.evidence,
            ledger_engine.down_because,
            ledger_engine.stalled,
            self._outliers.left_out(url),
            sorted(ledger_engine.ejected),
        )
        made.scrape = self._scrapes.get(url)
        made.account, made.blind = engine.audit.account, engine.audit.blind
        made.breaker = self._ledger.breakers.state(ledger_engine)
        return made

    def _send(
        self,
        findings: list[HealthFinding] | None = None,
        unknown: list[str] | None = None,
        wanted: list[str] | None = None,
    ) -> None:
        self._tell(_encode(_Told(self._lead.leads, findings or [], unknown or [], wanted or [])))

    # -- taking

    def received(self, body: bytes) -> None:
        """Take what another worker has sent."""
        told = _decode(body)
        for finding in told.findings:
            engine = self._engines.get(finding.url)
            if engine is None:
                continue
            if finding.url in self._lacks and finding.account is not None:
                self._lacks.discard(finding.url)
                self._auditor.follow(engine, finding.account, blind=finding.blind)
            if self._counts(finding, leaders=told.leads):
                self._take(engine, finding, leaders=told.leads)
            elif told.leads and finding.version < self._versions.get(finding.url, 0):
                self._post(finding.url)  # the leader does not know yet, or was never told
        if told.leads:  # at once: what it finds itself comes behind its question
            self._send_known(told.unknown)
        elif self._lead.leads:
            self._answer(told.unknown, told.wanted)

    def _answer(self, unknown: Iterable[str], wanted: Iterable[str]) -> None:
        for url in unknown:
            self._post(url)
        for url in wanted:
            if (engine := self._engines.get(url)) is not None:
                self._probe(engine)

    def _counts(self, finding: HealthFinding, *, leaders: bool) -> bool:
        have = self._versions.get(finding.url, 0)
        return finding.version > have or (
            finding.version == have and leaders and not self._lead.leads
        )

    def _take(self, engine: Engine, finding: HealthFinding, *, leaders: bool) -> None:
        url = engine.url
        self._versions[url] = finding.version
        was_stalled, was_known = engine.in_ledger.stalled is not None, engine.in_ledger.probed
        tell, self._ledger.tell = self._ledger.tell, lambda _: None
        try:
            self._note(engine, finding)
        finally:
            self._ledger.tell = tell
        if engine.in_ledger.stalled is not None and not was_stalled:
            self._stalls.found(url)  # legs end: what they show is found here
        if finding.left_out is not None:
            self._outliers.follow(url, *finding.left_out)
        if finding.breaker is not None and (leaders or not was_known):
            self._ledger.breakers.follow(engine.in_ledger, finding.breaker)
        if leaders:
            self._auditor.follow(engine, finding.account, blind=finding.blind)
            if finding.scrape is not None:
                self._scrapes[url] = finding.scrape
                self._reader.reported(engine, finding.scrape)
        if self._lead.leads:
            self._post(url)

    def _note(self, engine: Engine, finding: HealthFinding) -> None:
        ledger_engine, url, now = engine.in_ledger, engine.url, self._now()
        is_first = not ledger_engine.probed
        if finding.down is not None:
            if self._ledger.mark_down(url, finding.down, now) or is_first:
                self._changed(engine, up=False, reason=finding.down)
            return
        if finding.evidence is not None and self._ledger.mark_up(url, finding.evidence):
            self._changed(engine, up=True, reason="it is up")
        for other in finding.ejected:
            if other not in ledger_engine.ejected:
                self._ledger.eject(url, other)
        if finding.stalled is None:
            if self._ledger.let_in(url, now):
                self._changed(engine, up=True, reason="it has shown a sign")
        elif self._ledger.mark_stalled(url, finding.stalled):
            self._changed(engine, up=False, reason=finding.stalled)

    def _changed(self, engine: Engine, *, up: bool, reason: str) -> None:
        self._observers.notify(
            NodeChanged(
                engine.url, engine.in_ledger.role.value, up=up, reason=reason, elsewhere=True
            )
        )
