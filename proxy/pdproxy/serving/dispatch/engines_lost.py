"""Requests that end engines: how many engines one request may take with it, and what follows for
the requests beside it.

The course of one request:

    under way     its connection breaks: the engine is asked whether it is still there
                  (`loss_detector`)
    lost one      others were there, and may be the cause as well: it is tried again behind them,
                  one at a time (`few_first`). If it is the only suspect (`loss`), it does not get
                  the last engine of the role, and where a cause was found in the last `BURST`
                  seconds, it gets none
    lost two      it is the cause: no other engine is tried, and both losses count for its
                  fingerprint
    comes again   what was counted limits it from the beginning, or its client (`suspects`)
    answered      it is not the cause, nor is its client: both are forgotten as suspects

    losses   of a fingerprint                          of a client
    1        few requests at a time (`few_first`);     -
             for a minute, not the last engine of
             the role that has lost one
    2        one engine, and no role's last one        the same, for each of its requests
    3        refused for a time, twice as long behind  few requests at a time, and only roles of
             which more than half of the each further loss; then as with 2         engines answer

The first loss of a request counts only if the request was the only suspect, and for its client if
all suspects were the client's. A request whose client has left is a suspect as any other
(`abandoned`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from itertools import count
from typing import Protocol

from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import ConnectionLostError, EngineError, EnginesLostError
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.description import Label, MergeRule, Samples, counter, gauge
from pdproxy.observe.events import EngineLost, Event, NodeChanged, Observers
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.scheduler import Scheduler
from pdproxy.serving.dispatch.abandoned import UNDER_WAY, AbandonedRequest, AbandonedRequests
from pdproxy.serving.dispatch.failure_class import verdict_of
from pdproxy.serving.dispatch.few_first import FewFirst, Permit
from pdproxy.serving.dispatch.fingerprint import Fingerprint, keyed
from pdproxy.serving.dispatch.loss import SOON, BrokenLeg, Loss, RequestLosses
from pdproxy.serving.dispatch.loss_detector import LossDetector
from pdproxy.serving.dispatch.suspects import REFUSED_AT, Suspect, Suspects
from pdproxy.settings.limits import Limits
from pdproxy.wire.fields import Fields

MOST = 2
"""Engines that may be lost under one request. As many losses of a suspect leave it one engine."""
LIMITED_AT = 3
"""Losses behind which a client is limited."""
BURST = 10.0
"""Seconds behind the second loss of a request in which others may have been sent that end engines,
too.
"""
WAITING = 2
"""Requests of a limited client that wait for their turn. Each holds a place that others could
have.
"""
_ROLES = frozenset(Role)
ENGINES_LOST = counter(
    "pdproxy_engines_lost_total",
    "engines",
    "Engines that disappeared under a request, once for each request that was under way there",
    Label(
        "requests",
        (("one", "no other request was under way there"), ("several", "others were, too")),
    ),
    of=EngineLost,
    counts=lambda event: [(("several" if event.several else "one",), 1)],
)
SUSPECTED = gauge(
    "pdproxy_suspected",
    "entries",
    "What is remembered since engines disappeared under it alone, time and again",
    Label(
        "what",
        (
            (
                "one_engine",
                "requests with two such engines: each gets one engine when it comes again",
            ),
            ("refused", "requests with three or more: they are refused"),
            ("client", "clients with three or more: few of their requests run at a time"),
        ),
    ),
    workers=MergeRule.SUM,
)


class RequestAtRisk(Protocol):
    """A request, as far as it matters here. `lost` is empty until an engine may be lost under it;
    then it has one element.
    """

    @property
    def request_id(self) -> str:
        """Its id."""

    @property
    def path(self) -> str:
        """The path of its route."""

    @property
    def client(self) -> bytes | str:
        """The name of its client."""

    @property
    def lost(self) -> list[RequestLosses]:
        """What was lost under it."""


class EnginesLost:
    """Those of one pool and process. `is_alive` asks the engine of a URL for its health."""

    def __init__(
        self,
        scheduler: Scheduler,
        engines: EngineRegistry,
        is_alive: Callable[[str], Awaitable[bool]],
        observers: Observers,
        tasks: TaskOwner,
        clock: Clock,
        now: Callable[[], float],
        limits: Limits,
    ) -> None:
        self._engines = engines
        self._observers = observers
        self._clock = clock
        self._now = now
        self._limits = limits
        self._fingerprint = keyed()
        self._numbers = count()
        self._detector = LossDetector(
            scheduler, engines, is_alive, observers, tasks, clock, now, self._count_abandoned
        )
        self._abandoned = AbandonedRequests()
        self._fingerprints: Suspects[Fingerprint] = Suspects()
        self._clients: Suspects[bytes | str] = Suspects()
        self._retries = FewFirst(clock)
        """For all requests that have lost an engine."""
        self._burst_until = 0.0
        self._waiting = 0
        """Requests that wait for their turn."""
        self.remembers = False
        """Whether any request is treated otherwise than all. An attribute: every request reads
        it.
        """
        observers.show(SUSPECTED, self._suspected)

    def __repr__(self) -> str:
        return f"<EnginesLost {len(self._fingerprints)} fingerprints, {len(self._clients)} clients>"

    # -- a request that is under way

    def broke(
        self,
        sender: RequestAtRisk,
        engine: LedgerEngine,
        error: EngineError,
        since: float,
        *,
        streamed: bool,
        beside: bool = False,
    ) -> bool:
        """Note a leg that has failed. Return whether its engine may be lost.

        `since`: when it was sent; `streamed`: data had come.

        `beside`: the leg was ended only since the one beside it had failed, so that its own engine
        may be lost, too.
        """
        broken = isinstance(error, ConnectionLostError) or verdict_of(error) is Verdict.DEAD
        if not broken and not (beside and sender.lost):
            return False
        self._forget_old()
        now = self._now()
        loss = self._detector.suspect(engine, now)
        if loss is None:
            return False
        request, suspect = self._of(sender), not streamed and now - since <= SOON
        loss.note(request.number, sender.client, suspect=suspect)
        request.broken.append(BrokenLeg(loss, streamed, suspect))
        return True

    def left(
        self,
        sender: RequestAtRisk,
        leases: Iterable[Lease],
        fields: Fields,
        known: Fingerprint | None,
    ) -> None:
        """Note that a client has left before any data: its request may still end the engines at
        which it was under way.
        """
        fingerprint = self._fingerprint_of(sender, fields, known) if fields else None
        if fingerprint is None:
            return
        self._forget_old()
        request, until = self._of(sender), self._now() + UNDER_WAY
        for lease in leases:
            one = AbandonedRequest(
                sender.request_id, sender.client, request, fingerprint, lease.since, until
            )
            self._abandoned.add(lease.engine, one)
            loss = self._detector.at(lease.engine)
            if loss is not None and loss.is_lost:  # it has left as that was found out
                self._count_abandoned(loss)

    async def look_back(self, sender: RequestAtRisk) -> None:
        """Find out which engines are lost where parts of a request were under way that were ended:
        another part has failed.
        """
        (request,) = sender.lost
        engines = [engine.in_ledger for engine in self._engines.values()]
        at = [
            ledger_engine
            for ledger_engine in engines
            if any(one.losses is request for one in self._abandoned.at(ledger_engine, self._now()))
        ]
        losses = [self._detector.suspect(ledger_engine, None) for ledger_engine in at]
        for known in [self._detector.find_out(loss) for loss in losses if loss is not None]:
            await known.wait()

    only = (NodeChanged,)
    """What `notify` wants."""

    def notify(self, event: Event) -> None:
        """Probes have found an engine down: find out whether it is lost, if only abandoned requests
        were under way there.
        """
        if not isinstance(event, NodeChanged) or event.up or event.state != "down":
            return
        engine = self._engines.get(event.node)
        if (
            engine is None
            or not self._abandoned.at(engine.in_ledger, self._now())
            or self._detector.at(engine.in_ledger)
        ):
            return
        loss = self._detector.suspect(engine.in_ledger, None)
        if loss is not None:
            self._detector.find_out(loss)

    def _of(self, sender: RequestAtRisk) -> RequestLosses:
        """Return what was lost under a request."""
        if not sender.lost:
            sender.lost.append(RequestLosses(next(self._numbers)))
        return sender.lost[0]

    def _fingerprint_of(
        self, sender: RequestAtRisk, fields: Fields, known: Fingerprint | None
    ) -> Fingerprint | None:
        """Return a request's fingerprint, None where its fields were dropped before anything had
        asked for it.
        """
        return known or (self._fingerprint(sender.path, fields) if fields else None)

    # -- an engine is lost

    async def judge(
        self, sender: RequestAtRisk, fields: Fields, known: Fingerprint | None
    ) -> EnginesLostError | None:
        """Find out which engines are lost under a request. Return why it is not tried again, None
        if it may be.

        `fields`: the request's, empty if they were dropped; `known`: its fingerprint, if it was
        computed before.
        """
        (request,) = sender.lost
        for leg in list(request.broken):
            await self._detector.find_out(leg.loss).wait()
            if leg in request.broken:  # else another prompt of the request has counted it meanwhile
                request.broken.remove(leg)
                if leg.loss.is_lost and leg.loss not in request.engines:
                    fingerprint = self._fingerprint_of(sender, fields, known)
                    self._count(sender.request_id, sender.client, request, fingerprint, leg)
        number = len(request.engines)
        if not number or number + request.earlier < MOST:
            return None
        engines = "an engine" if number == 1 else f"{number} engines"
        return EnginesLostError(
            f"{engines} disappeared while this request was under way: no other one is tried"
        )

    def _count_abandoned(self, loss: Loss) -> None:
        """Count a lost engine for abandoned requests, as for those that were under way there to the
        end.
        """
        abandoned = self._abandoned.at(loss.engine, self._now())
        legs = [
            BrokenLeg(loss, False, loss.broke_at is None or loss.broke_at - one.since <= SOON)
            for one in abandoned
        ]
        for one, leg in zip(abandoned, legs, strict=True):
            loss.note(one.losses.number, one.client, suspect=leg.suspect)
        for one, leg in zip(abandoned, legs, strict=True):
            if loss not in one.losses.engines:
                self._count(one.request_id, one.client, one.losses, one.fingerprint, leg)

    def _count(
        self,
        request_id: str,
        client: bytes | str,
        request: RequestLosses,
        fingerprint: Fingerprint | None,
        leg: BrokenLeg,
    ) -> None:
        """Count a lost engine: for its request, and if that may be the cause, for its fingerprint
        and its client.
        """
        loss, now, before = leg.loss, self._now(), tuple(request.engines)
        request.engines[loss] = leg.suspect
        is_cause = bool(before) or request.earlier > 0
        if is_cause:
            self._retries.again()
            if leg.suspect:
                self._burst_until = now + BURST
        for one in before:
            if one.is_of_client(client):
                self._clients.add(client, one, None, now, streamed=leg.streamed)
            if fingerprint is not None:
                self._fingerprints.add(fingerprint, one, None, now, streamed=leg.streamed)
            one.explained |= leg.suspect and request.engines[one]
        losses = 0
        if fingerprint is not None and (is_cause or loss.is_of_request(request.number)):
            counts = None if is_cause else partial(loss.is_of_request, request.number)
            losses = self._fingerprints.add(fingerprint, loss, counts, now, streamed=leg.streamed)
        if is_cause or loss.is_of_client(client):
            counts = None if is_cause else partial(loss.is_of_client, client)
            self._clients.add(client, loss, counts, now, streamed=leg.streamed)
        self.remembers = bool(self._fingerprints or self._clients)
        name = "" if fingerprint is None else fingerprint.hex()[:12]
        self._observers.notify(
            EngineLost(request_id, loss.engine.url, name, losses, loss.requests.several)
        )

    # -- the request is tried again

    async def permit(self, seconds: float) -> Permit | None:
        """Wait until a request that has lost an engine may be tried again. None if that does not
        come within `seconds`.
        """
        return await self._retries.enter(seconds)

    def forbidden(self, sender: RequestAtRisk) -> tuple[str, ...]:
        """Return the engines that a request must not get: the last ones of a role, or too many of
        those that are left.
        """
        if not sender.lost:
            return ()
        (request,) = sender.lost
        burst = self._now() < self._burst_until
        suspected = [
            loss for loss, suspect in request.engines.items() if suspect and not loss.explained
        ]
        alone = [loss for loss in suspected if loss.suspects.is_only(request.number)]
        if burst and alone:
            return tuple(self._engines)
        found: list[str] = []
        for role in request.protected.union(
            loss.engine.role for loss in (suspected if burst else alone)
        ):
            engines = [
                engine.in_ledger
                for engine in self._engines.values()
                if engine.in_ledger.role is role
            ]
            answering = [ledger_engine.url for ledger_engine in engines if ledger_engine.available]
            least = max(1, len(engines) // 2) if request.limited else 1
            if len(answering) <= least and len(engines) > 1:
                found += answering
        return tuple(found)

    def protects(self) -> EnginesLostError:
        """Return the error of a request that could get only engines that it must not get."""
        return EnginesLostError(
            "an engine disappeared under this request: it gets none of those that are left"
        )

    # -- a request begins, while something is remembered

    def admit(self, sender: RequestAtRisk, fields: Fields) -> Fingerprint:
        """Look at a request that begins, and return its fingerprint.

        Raises:
            EnginesLostError: it is refused.
        """
        self._forget_old()
        fingerprint = self._fingerprint(sender.path, fields)
        self._limit(sender, fingerprint)
        return fingerprint

    def _limit(self, sender: RequestAtRisk, fingerprint: Fingerprint) -> None:
        """Limit what a request may get by what is known of it. Raises as `admit`."""
        now = self._now()
        losses, of_client = (
            self._fingerprints.losses(fingerprint),
            self._clients.losses(sender.client),
        )
        if losses >= REFUSED_AT and (seconds := self._fingerprints[fingerprint].refused_for(now)):
            text = (
                f"{losses} engines disappeared under this request, one after the other: it is "
                f"not served now"
            )
            raise EnginesLostError(text, retry_after=seconds)
        if max(losses, of_client) >= MOST:
            request = self._of(sender)
            request.earlier, request.protected, request.limited = 1, _ROLES, of_client >= LIMITED_AT
        elif losses and (roles := self._fingerprints.fresh_roles(fingerprint, now)):
            self._of(sender).protected = roles

    async def in_turn(
        self, sender: RequestAtRisk, fingerprint: Fingerprint, seconds: float
    ) -> Permit | None:
        """Wait for the turn of a request whose client is limited, or whose fingerprint has a loss.
        None: it is neither.

        The requests of one fingerprint take turns whoever sends them: sent at once, they would all
        have their engines before the first of these is lost. The permit is left `SOON` behind the
        moment at which the request is sent to its last engine: until then, the request may be the
        cause of a loss.

        Raises:
            EnginesLostError: its turn did not come within `seconds`, or too many others wait.
        """
        until = self._now() + seconds
        permit: Permit | None = None
        try:
            client = self._clients.get(sender.client)
            if client is not None and client.losses >= LIMITED_AT:
                permit = await self._turn(client, permit, until, "requests of this client", WAITING)
            alike = self._fingerprints.get(fingerprint)
            if alike is not None and alike.losses:
                permit = await self._turn(
                    alike, permit, until, "requests like this", self._limits.max_inflight
                )
            if permit is not None:
                self._limit(sender, fingerprint)  # more may be known now
        except BaseException:
            if permit is not None:
                permit.leave(harmless=False)
            raise
        return permit

    async def _turn(
        self, suspect: Suspect, permit: Permit | None, until: float, whose: str, most: int
    ) -> Permit:
        """Wait for one turn, and return a permit with it: `permit`, if there is one. `most`: how
        many like it may wait.

        As all who wait keep their places, at most half of the places do. Raises as `in_turn`.
        """
        turns = suspect.turns = suspect.turns or FewFirst(self._clock, singly=1, moment=None)
        waits = turns.waiting < most and self._waiting < self._limits.max_inflight // 2
        self._waiting += 1
        try:
            found = await turns.enter(until - self._now(), permit, waits=waits)
        finally:
            self._waiting -= 1
        if found is None:
            raise EnginesLostError(
                f"engines disappeared under {whose}: few of them are served at once"
            )
        return found

    # -- a request is answered, while something is remembered

    def began(
        self, sender: RequestAtRisk, fields: Fields, known: Fingerprint | None
    ) -> Fingerprint | None:
        """Note the first data of a stream. Return the fingerprint: what it is made of may be
        dropped now.
        """
        return self._clear(sender, fields, known, whole=False)

    def answered(self, sender: RequestAtRisk, fields: Fields, known: Fingerprint | None) -> None:
        """Note a whole answer: neither the request nor its client is the cause."""
        self._clear(sender, fields, known, whole=True)

    def _clear(
        self, sender: RequestAtRisk, fields: Fields, known: Fingerprint | None, *, whole: bool
    ) -> Fingerprint | None:
        fingerprint = self._fingerprint_of(sender, fields, known)
        if self._fingerprints.losses(fingerprint) >= MOST:
            self._burst_until = 0.0  # it has lost them by chance
        self._fingerprints.answered(fingerprint, whole=whole)
        self._clients.answered(sender.client, whole=whole)
        self._forget_old()
        return fingerprint

    def _forget_old(self) -> None:
        now = self._now()
        self._detector.forget_old()
        for kept in (self._abandoned, self._fingerprints, self._clients):
            kept.forget_old(now)
        self.remembers = bool(self._fingerprints or self._clients)

    # -- for operators

    def _suspected(self) -> Samples:
        self._forget_old()
        now, suspects = (
            self._now(),
            [one for one in self._fingerprints.values() if one.losses >= MOST],
        )
        refused = sum(one.refused_for(now) > 0 for one in suspects)
        return [
            (("one_engine",), len(suspects) - refused),
            (("refused",), refused),
            (("client",), self._limited),
        ]

    def shortcomings(self) -> list[str]:
        """Return a sentence on each request that is refused, and one on clients that are
        limited.
        """
        self._forget_old()
        now = self._now()
        found = [
            f"{one.losses} engines disappeared under the request with the fingerprint "
            f"{key.hex()[:12]}, one after the other: it "
            f"is refused for {seconds:.0f} s"
            for key, one in self._fingerprints.items()
            if (seconds := one.refused_for(now))
        ]
        if limited := self._limited:
            found.append(
                f"engines disappeared under requests of {limited} clients: few requests of each "
                f"are served at a time"
            )
        return found

    @property
    def _limited(self) -> int:
        return sum(one.losses >= LIMITED_AT for one in self._clients.values())
