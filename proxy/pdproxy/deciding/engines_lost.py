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

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from itertools import count

from pdproxy.deciding.abandoned import UNDER_WAY, AbandonedRequest, AbandonedRequests
from pdproxy.deciding.few_first import FewFirst, Permit
from pdproxy.deciding.loss import BrokenLeg, Loss, RequestLosses
from pdproxy.deciding.loss_detector import LossDetector
from pdproxy.deciding.suspects import REFUSED_AT, Suspect, Suspects
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.clock import Clock, Timer
from pdproxy.kit.errors import EnginesLostError
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.description import Label, MergeRule, Samples, counter, gauge
from pdproxy.observe.events import EngineLost, Event, NodeChanged, Observers
from pdproxy.scheduling.leases import Lease
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.losses import SOON, Fingerprint, KnownSuspects, RequestAtRisk
from pdproxy.settings.limits import Limits

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
FORGETS_EVERY = 60.0
"""Seconds behind which what is remembered is looked at, if nothing else has looked at it."""
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


class EnginesLost:
    """The `scheduling.losses.Losses` of one pool. `found_gone`: `Scheduler.found_gone`; `is_alive`
    asks the engine of a URL for its health.
    """

    def __init__(
        self,
        found_gone: Callable[[str, str, float], None],
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
        self._numbers = count()
        self._detector = LossDetector(
            found_gone, engines, is_alive, observers, tasks, clock, now, self._count_abandoned
        )
        self._abandoned = AbandonedRequests()
        self._fingerprints: Suspects[Fingerprint] = Suspects()
        self._clients: Suspects[bytes | str] = Suspects()
        self._retries = FewFirst(clock)
        """For all requests that have lost an engine."""
        self._burst_until = 0.0
        self._waiting = 0
        """Requests that wait for their turn."""
        self.known = KnownSuspects(self._fingerprints, self._clients)
        """The requests and clients that are treated otherwise than all others."""
        self.changed: Callable[[], None] = _nothing
        """Called when other ones are known than before, or may be."""
        self._forgetting: Timer | None = None
        observers.show(SUSPECTED, self._suspected)

    def __repr__(self) -> str:
        return f"<EnginesLost {len(self._fingerprints)} fingerprints, {len(self._clients)} clients>"

    # -- a request that is under way

    def broke(
        self,
        sender: RequestAtRisk,
        engine: LedgerEngine,
        since: float,
        *,
        streamed: bool,
        at: float | None = None,
    ) -> bool:
        """See `Losses`. `at`: when it has broken, None: now."""
        self._forget_old()
        now = self._now() if at is None else at
        loss = self._detector.suspect(engine, now)
        if loss is None:
            return False
        request, suspect = self._of(sender), not streamed and now - since <= SOON
        loss.note(request.number, sender.client, suspect=suspect)
        request.broken.append(BrokenLeg(loss, streamed, suspect))
        return True

    def left(
        self, sender: RequestAtRisk, leases: Iterable[Lease], fingerprint: Fingerprint
    ) -> None:
        """See `Losses`."""
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

    async def _look_back(self, request: RequestLosses) -> None:
        """Find out which engines are lost where parts of a request were under way that were ended:
        another part has failed.
        """
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
        request = sender.lost[0]
        assert isinstance(request, RequestLosses)
        return request

    def restore(self, sender: RequestAtRisk, number: int) -> None:
        """Note how many engines were lost under a request of which nothing is known any more."""
        self._of(sender).earlier = number

    def lost_under(self, sender: RequestAtRisk) -> int:
        """Return how many engines were lost under a request."""
        return len(self._of(sender).engines)

    # -- an engine is lost

    async def judge(
        self, sender: RequestAtRisk, fingerprint: Fingerprint | None, *, looks_back: bool = False
    ) -> EnginesLostError | None:
        """See `Losses`."""
        request = self._of(sender)
        if looks_back:
            await self._look_back(request)
        for leg in list(request.broken):
            await self._detector.find_out(leg.loss).wait()
            if leg in request.broken:  # else another prompt of the request has counted it meanwhile
                request.broken.remove(leg)
                if leg.loss.is_lost and leg.loss not in request.engines:
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
        self._remember()
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

    async def forbidden(self, sender: RequestAtRisk) -> Sequence[str]:
        """See `Losses`."""
        if not sender.lost:
            return ()
        request = self._of(sender)
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

    # -- a request begins, while something is remembered

    def _limit(self, sender: RequestAtRisk, fingerprint: Fingerprint) -> None:
        """Limit what a request may get by what is known of it.

        Raises:
            EnginesLostError: it is refused.
        """
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

    async def turn(
        self, sender: RequestAtRisk, fingerprint: Fingerprint, seconds: float
    ) -> Permit | None:
        """See `Losses`.

        The requests of one fingerprint take turns whoever sends them: sent at once, they would all
        have their engines before the first of these is lost. The permit is left `SOON` behind the
        moment at which the request is sent to its last engine: until then, the request may be the
        cause of a loss.
        """
        self._forget_old()
        self._limit(sender, fingerprint)
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

        As all who wait keep their places, at most half of the places do. Raises as `turn`.
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

    def answered(
        self, client: bytes | str, fingerprint: Fingerprint | None, *, whole: bool
    ) -> None:
        """See `Losses`."""
        if self._fingerprints.losses(fingerprint) >= MOST:
            self._burst_until = 0.0  # it has lost them by chance
        self._fingerprints.answered(fingerprint, whole=whole)
        self._clients.answered(client, whole=whole)
        self._forget_old()
        self._remember()

    def _forget_old(self) -> None:
        now = self._now()
        self._detector.forget_old()
        before = len(self._fingerprints) + len(self._clients)
        for kept in (self._abandoned, self._fingerprints, self._clients):
            kept.forget_old(now)
        if len(self._fingerprints) + len(self._clients) != before:
            self._remember()

    def _remember(self) -> None:
        """Note whether anything is remembered, and forget it in time."""
        self.known.remembers = bool(self._fingerprints or self._clients)
        if self.known.remembers and self._forgetting is None:
            self._forgetting = self._clock.after(FORGETS_EVERY, self._forget_again)
        self.changed()

    def _forget_again(self) -> None:
        self._forgetting = None
        self._forget_old()
        self._remember()

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


def _nothing() -> None:
    """Do nothing: nobody follows what is known."""
