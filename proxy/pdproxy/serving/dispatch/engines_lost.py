"""Engines that disappear under requests: how many one request may take with it, and what is remembered of such requests.

An engine is lost under a request if its process ends while the request is under way there, or up to `TOGETHER` seconds behind the
moment at which its client has left without data: its connection breaks, or it says that
its core has died, and behind that it does not answer `/health`. An engine that is slow, silent, or answers another error is not
lost, nor is one that is drained.

    one request        may lose two engines, of all roles together; then its client gets an error
    the last engine    of several of a role does not get a request that has lost another one there, was alone at that engine,
                       and had been sent to that engine just before: it may be the cause
    others beside it   the requests that were under way at the lost engine are tried again few at a time (`few_first`)
    the same again     behind two losses of its fingerprint, a request gets one engine, and no role's last one; behind three it
                       is refused
    the same client    behind two losses, each of its requests gets one engine, and no role's last one; behind three they are
                       served one after the other, by roles of which more than half of the engines answer

The first engine that a request loses counts for its fingerprint only if no other request was under way there, and for its client
only if no other client's was. The second one counts in any case, and then so does the first: the request was tried again nearly
alone, and those that were under way at the second engine have lost one only. An answer clears its request and its client: whoever
was there by chance is cleared by the next success. The memory is bounded, and each entry ends some time behind its last loss.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from itertools import count
from typing import Protocol, TypeVar

import msgspec

from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import ConnectionLostError, EngineError, EnginesLostError
from pdproxy.kit.one_shot_event import OneShotEvent
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import EngineLost, Event, NodeChanged, Observers
from pdproxy.scheduling.leases import Verdict
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.nodes import Node, Role
from pdproxy.serving.dispatch.failure_class import verdict_of
from pdproxy.serving.dispatch.few_first import FewFirst, Permit
from pdproxy.serving.dispatch.fingerprint import Fingerprint, keyed
from pdproxy.wire.fields import Fields

MOST = 2
"""Engines that may be lost under one request."""
REFUSED_AT = LIMITED_AT = 3
"""Losses behind which a fingerprint is refused, and a client limited."""
TOGETHER = 10.0
"""Seconds in which legs to one run of an engine break together."""
SOON = 1.0
"""Seconds behind its beginning in which a request that ends engines does so. Behind them, an engine disappears by itself."""
KEPT = 600.0
"""Seconds behind its last loss for which a fingerprint or a client is remembered."""
MOST_LEFT = 64
"""Requests of one engine whose clients have left."""
MOST_KEPT = 1024
"""Fingerprints, clients, and lost engines, of each: the oldest is forgotten."""
WAITING = 2
"""Requests of a limited client that wait for their turn. Each holds a place that others could have."""
ASK = 0.5
"""Seconds for the answer of an engine whose connection has broken. One that takes longer is not lost, as far as is known."""
_GONE = "it has disappeared under a request"
_ROLES = frozenset(Role)
_K = TypeVar("_K")
_V = TypeVar("_V", bound="_Kept")


class Under(msgspec.Struct, eq=False):
    """What was lost under one request of a client; its prompts, if it has several, share it.

    `number`: no other has it. `unproven`: engines to which only the connection is known to be lost, each with whether data had
    come, and whether that was `SOON`; `engines`: those that were lost. `before`: losses that count from the beginning, since its
    fingerprint or its client has some. `protected`: roles whose last engine it does not get. `limited`: whether its client is.
    `beside`: the last lost engine, if other requests were under way there.
    """

    number: int
    unproven: list[tuple[_Lost, bool, bool]] = []
    engines: dict[_Lost, None] = {}
    before: int = 0
    protected: frozenset[Role] = frozenset()
    limited: bool = False
    beside: _Lost | None = None


class Sender(Protocol):
    """A request, as far as it matters here. `lost` is empty until something was lost under it; then it has one `Under`."""

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
    def lost(self) -> list[Under]:
        """What was lost under it."""


class _Kept(msgspec.Struct, eq=False):
    until: float


class _Suspect(_Kept, eq=False):
    """A fingerprint. `streamed`: an engine was lost behind the first data of a stream, so that data clears nobody."""

    losses: int = 0
    streamed: bool = False


class _Client(_Suspect, eq=False):
    """A client. `in_turn`: not None while it is limited."""

    in_turn: FewFirst | None = None


class _Lost(_Kept, eq=False):
    """One run of an engine, to which legs have broken at about the same time. `under`, `client`: of the first request.

    `several`: other requests broke there, too; `of_several`: these were of other clients. `is_lost`: None before that is known,
    which `known` announces. `suspect`, `counted`: where it was counted, as long as nobody else was there. `clients`: for whom it
    counts though others were there. `again`: how those that were there are tried again.
    """

    node: Node
    under: int
    client: bytes | str
    several: bool = False
    of_several: bool = False
    is_lost: bool | None = None
    known: OneShotEvent | None = None
    suspect: _Suspect | None = None
    counted: _Client | None = None
    clients: set[bytes | str] = set()
    again: FewFirst | None = None


class _Leaver(msgspec.Struct, eq=False):
    """A request whose client has left before any data, as `Sender`. It may still be under way at its engine until `until`."""

    request_id: str
    path: str
    client: bytes | str
    lost: list[Under]
    mark: Fingerprint
    until: float


class _Left(_Kept, eq=False):
    """Those of one run of an engine."""

    leavers: list[_Leaver] = []


class EnginesLost:
    """Those of one pool and process. `is_alive` asks the engine of a URL for its health."""

    def __init__(
        self,
        ledger: Ledger,
        engines: EngineRegistry,
        is_alive: Callable[[str], Awaitable[bool]],
        observers: Observers,
        tasks: TaskOwner,
        clock: Clock,
        now: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._engines = engines
        self._is_alive = is_alive
        self._observers = observers
        self._tasks = tasks
        self._clock = clock
        self._now = now
        self._fingerprint = keyed()
        self._numbers = count()
        self._seen: OrderedDict[tuple[str, int], _Lost] = OrderedDict()
        self._left: OrderedDict[tuple[str, int], _Left] = OrderedDict()
        self._suspects: OrderedDict[Fingerprint, _Suspect] = OrderedDict()
        self._clients: OrderedDict[bytes | str, _Client] = OrderedDict()
        self.remembers = False
        """Whether any request is treated otherwise than all. An attribute: every request reads it."""

    def __repr__(self) -> str:
        return f"<EnginesLost {len(self._suspects)} fingerprints, {len(self._clients)} clients>"

    # -- when a leg has failed

    def broke(
        self, sender: Sender, node: Node, error: EngineError, since: float, *, streamed: bool, beside: bool = False
    ) -> None:
        """Note a leg that has failed, if its engine may be lost. `since`: when it was sent; `streamed`: data had come.

        `beside`: the leg was ended only since the one beside it had failed, so that its own engine may be lost, too.
        """
        broken = isinstance(error, ConnectionLostError) or verdict_of(error) is Verdict.DEAD
        if not broken and not (beside and sender.lost):
            return
        engine = self._engines.get(node.url)
        if engine is None or engine.node is not node or node.draining is not None:
            return  # it is meant to go
        if not sender.lost:
            sender.lost.append(Under(next(self._numbers)))
        (under,) = sender.lost
        self._forget_old()
        now = self._now()
        seen = self._seen.get((node.url, node.run_number))
        if seen is None or seen.until <= now:
            seen = _Lost(now + TOGETHER, node, under.number, sender.client)
            _keep(self._seen, (node.url, node.run_number), seen)
        elif seen.under != under.number:
            self._has_several(seen, sender.client)
        under.unproven.append((seen, streamed, now - since <= SOON))

    def left(self, sender: Sender, nodes: Iterable[Node], fields: Fields, known: Fingerprint | None) -> None:
        """Note that a client has left before any data: its request may still end the engines at which it was under way."""
        if not fields:
            return
        self._forget_old()
        if not sender.lost:
            sender.lost.append(Under(next(self._numbers)))
        mark = known or self._fingerprint(sender.path, fields)
        until = self._now() + TOGETHER
        leaver = _Leaver(sender.request_id, sender.path, sender.client, sender.lost, mark, until)
        for node in nodes:
            key = (node.url, node.run_number)
            there = self._left.get(key) or _Left(until)
            there.until = until
            there.leavers = [*there.leavers[1 - MOST_LEFT :], leaver]
            _keep(self._left, key, there)

    only = (NodeChanged,)
    """What `notify` wants."""

    def notify(self, event: Event) -> None:
        """Probes have found an engine down: find out whether it is lost, if clients have left it just before."""
        if not isinstance(event, NodeChanged) or event.up or event.state != "down":
            return
        engine = self._engines.get(event.node)
        if engine is None or engine.node.draining is not None:
            return
        node, now = engine.node, self._now()
        key = (node.url, node.run_number)
        there, seen = self._left.get(key), self._seen.get(key)
        if there is None or there.until <= now or (seen is not None and seen.until > now):
            return
        first = there.leavers[0]
        seen = _Lost(now + TOGETHER, node, first.lost[0].number, first.client)
        _keep(self._seen, key, seen)
        self._find_out(seen)

    def _count_leavers(self, seen: _Lost) -> None:
        """Count a lost engine for those whose clients had left, as for those that were there to the end."""
        there, now = self._left.pop((seen.node.url, seen.node.run_number), None), self._now()
        leavers = [] if there is None else [one for one in there.leavers if one.until > now]
        for one in leavers:
            if one.lost[0].number != seen.under:
                self._has_several(seen, one.client)
        for one in leavers:
            if seen not in one.lost[0].engines:
                self._count(one, one.lost[0], seen, {}, one.mark, streamed=False, soon=True)

    def _has_several(self, seen: _Lost, client: bytes | str) -> None:
        """Another request has broken there: the loss counts for the fingerprint of none, and perhaps for no client."""
        seen.several = True
        if seen.suspect is not None:
            seen.suspect.losses -= 1
            seen.suspect = None
        if client != seen.client:
            seen.of_several = True
            if seen.counted is not None:
                seen.counted.losses -= 1
                seen.counted = None

    async def judge(self, sender: Sender, fields: Fields, known: Fingerprint | None) -> EnginesLostError | None:
        """Find out which engines are lost under a request. Return why it is not tried again, None if it may be.

        `fields`: the request's, empty if they were dropped; `known`: its fingerprint, if it was computed before.
        """
        (under,) = sender.lost
        for one in list(under.unproven):
            seen, streamed, soon = one
            is_lost = await self._is_lost(seen)
            if one in under.unproven:  # else another prompt of the request has counted it meanwhile
                under.unproven.remove(one)
                if is_lost and seen not in under.engines:
                    self._count(sender, under, seen, fields, known, streamed=streamed, soon=soon)
        if len(under.engines) + under.before < MOST or not under.engines:
            return None
        number = len(under.engines)
        engines = "an engine" if number == 1 else f"{number} engines"
        return EnginesLostError(f"{engines} disappeared while this request was under way: no other one is tried")

    async def _is_lost(self, seen: _Lost) -> bool:
        """Ask an engine whether it is still there: once for all requests that were under way there."""
        await self._find_out(seen).wait()
        return seen.is_lost is True

    def _find_out(self, seen: _Lost) -> OneShotEvent:
        if seen.known is None:
            seen.known = OneShotEvent()
            self._tasks.spawn(self._ask(seen, seen.known), f"is {seen.node.url} still there")
        return seen.known

    async def _ask(self, seen: _Lost, known: OneShotEvent) -> None:
        try:
            with self._clock.within(ASK):
                seen.is_lost = not await self._is_alive(seen.node.url)
            if seen.is_lost:
                self._count_leavers(seen)
        except TimeoutError:
            seen.is_lost = False
        finally:
            known.set()
        if seen.is_lost:
            self._take_out(seen.node)
        else:  # what breaks there later is another matter
            seen.until = 0.0

    def _take_out(self, node: Node) -> None:
        """No other request has to find out that the engine is gone, where another engine of its role can serve them."""
        engine = self._engines.get(node.url)
        if engine is None or engine.node is not node:
            return
        others = (one.node for one in self._engines.values() if one is not engine)
        if not any(other.role is node.role and other.available for other in others):
            return  # it may be back in a moment: requests try it as ever
        if self._ledger.mark_down(node.url, _GONE, self._now()):
            self._observers.notify(NodeChanged(node.url, node.role.value, up=False, reason=_GONE, state="down"))

    def _count(
        self,
        sender: Sender,
        under: Under,
        seen: _Lost,
        fields: Fields,
        known: Fingerprint | None,
        *,
        streamed: bool,
        soon: bool,
    ) -> None:
        if under.beside is not None and under.beside.again is not None:
            under.beside.again.again()
        shared = sum(one.several for one in under.engines) if len(under.engines) == 1 else 0
        is_second = bool(under.engines) or under.before > 0
        under.engines[seen] = None
        under.beside = seen if seen.several else None
        losses = 0
        mark = known or (self._fingerprint(sender.path, fields) if fields else None)
        if is_second or not seen.several:
            if not streamed and (is_second or soon):  # what has data is done with its prompt
                under.protected |= {seen.node.role}
            if mark is not None and (is_second or seen.suspect is None):
                suspect = self._suspect(mark, 1 + shared, streamed=streamed)
                losses = suspect.losses
                if not is_second:
                    seen.suspect = suspect
        if is_second:
            if sender.client not in seen.clients and (seen.counted is None or seen.client != sender.client):
                seen.clients.add(sender.client)
                self._count_client(sender.client, streamed=streamed)
        elif not seen.of_several and seen.counted is None:
            seen.counted = self._count_client(sender.client, streamed=streamed)
        self.remembers = bool(self._suspects or self._clients)
        name = "" if mark is None else mark.hex()[:12]
        self._observers.notify(EngineLost(sender.request_id, seen.node.url, name, losses, seen.several))

    def _suspect(self, mark: Fingerprint, losses: int, *, streamed: bool) -> _Suspect:
        """Add losses to those of a fingerprint."""
        suspect = self._suspects.get(mark) or _Suspect(0.0)
        suspect.losses += losses
        suspect.streamed |= streamed
        suspect.until = self._now() + KEPT
        _keep(self._suspects, mark, suspect)
        return suspect

    def _count_client(self, name: bytes | str, *, streamed: bool) -> _Client:
        """Add a loss to those of a client."""
        client = self._clients.get(name) or _Client(0.0)
        client.losses += 1
        client.streamed |= streamed
        client.until = self._now() + KEPT
        if client.losses >= LIMITED_AT and client.in_turn is None:
            client.in_turn = FewFirst(self._clock, singly=True)
        _keep(self._clients, name, client)
        return client

    async def permit(self, sender: Sender, seconds: float) -> Permit | None:
        """Wait until a request may be tried again that was under way at a lost engine along with others.

        Return None if that does not come within `seconds`.
        """
        (under,) = sender.lost
        beside = under.beside
        if beside is None:
            return Permit(_nothing, self._clock, None)
        if beside.again is None:
            beside.again = FewFirst(self._clock)
        return await beside.again.enter(seconds)

    def forbidden(self, sender: Sender) -> tuple[str, ...]:
        """Return the engines that a request must not get: the last ones of a role, or too many of those that are left."""
        if not sender.lost:
            return ()
        (under,) = sender.lost
        found: list[str] = []
        for role in under.protected:
            nodes = [engine.node for engine in self._engines.values() if engine.node.role is role]
            answering = [node.url for node in nodes if node.available]
            least = max(1, len(nodes) // 2) if under.limited else 1
            if len(answering) <= least and len(nodes) > 1:
                found += answering
        return tuple(found)

    def protects(self) -> EnginesLostError:
        """Return the error of a request that could get only engines that it must not get."""
        return EnginesLostError("engines disappeared under this request: it does not get the last one that is left")

    # -- while something is remembered

    def admit(self, sender: Sender, fields: Fields) -> Fingerprint:
        """Look at a request that begins, and return its fingerprint.

        Raises:
            EnginesLostError: it is refused.
        """
        self._forget_old()
        mark = self._fingerprint(sender.path, fields)
        suspect, client = self._suspects.get(mark), self._clients.get(sender.client)
        losses = 0 if suspect is None else suspect.losses
        if suspect is not None and losses >= REFUSED_AT:
            text = f"{losses} engines disappeared under this request, one after the other: it is not served now"
            raise EnginesLostError(text, retry_after=suspect.until - self._now())
        of_client = 0 if client is None else client.losses
        if max(losses, of_client) >= MOST:
            if not sender.lost:
                sender.lost.append(Under(next(self._numbers)))
            (under,) = sender.lost
            under.before, under.protected, under.limited = 1, _ROLES, of_client >= LIMITED_AT
        return mark

    async def in_turn(self, sender: Sender, seconds: float) -> Permit | None:
        """Wait for the turn of a client's request, if its client is limited. None: it is not.

        Raises:
            EnginesLostError: its turn did not come within `seconds`, or too many of its client wait.
        """
        client = self._clients.get(sender.client)
        if client is None or client.in_turn is None:
            return None
        turns = client.in_turn
        permit = await turns.enter(seconds) if turns.waiting < WAITING else None
        if permit is None:
            text = "engines disappeared under requests of this client: they are served one after the other"
            raise EnginesLostError(text)
        return permit

    def began(self, sender: Sender, fields: Fields, known: Fingerprint | None) -> Fingerprint | None:
        """Note the first data of a stream. Return the fingerprint: what it is made of may be dropped now."""
        mark = known or (self._fingerprint(sender.path, fields) if fields else None)
        client = self._clients.get(sender.client)
        if client is None or not client.streamed:
            self._clear_client(sender.client)
        if mark is not None and (suspect := self._suspects.get(mark)) is not None and not suspect.streamed:
            self._suspects.pop(mark)
        self._forget_old()
        return mark

    def answered(self, sender: Sender, fields: Fields, known: Fingerprint | None) -> None:
        """Note a whole answer: neither the request nor its client is the cause."""
        mark = known or (self._fingerprint(sender.path, fields) if fields else None)
        self._clear_client(sender.client)
        if mark is not None:
            self._suspects.pop(mark, None)
        self._forget_old()

    def _clear_client(self, name: bytes | str) -> None:
        client = self._clients.pop(name, None)
        if client is not None and client.in_turn is not None:
            client.in_turn.open()

    def _forget_old(self) -> None:
        now = self._now()
        for kept in (self._seen, self._left, self._suspects, self._clients):
            while kept and next(iter(kept.values())).until <= now:
                kept.popitem(last=False)
        self.remembers = bool(self._suspects or self._clients)

    # -- for operators

    def counts(self) -> list[tuple[tuple[str, ...], float]]:
        """Return how many fingerprints get one engine or are refused, and how many clients are limited."""
        self._forget_old()
        refused = sum(one.losses >= REFUSED_AT for one in self._suspects.values())
        suspected = sum(one.losses == MOST for one in self._suspects.values())
        limited = sum(one.losses >= LIMITED_AT for one in self._clients.values())
        return [(("one_engine",), suspected), (("refused",), refused), (("client",), limited)]

    def shortcomings(self) -> list[str]:
        """Return a sentence on each request that is refused, and one on clients that are limited."""
        self._forget_old()
        now = self._now()
        found = [
            f"{one.losses} engines disappeared under the request with the fingerprint {mark.hex()[:12]}, one after the other: it "
            f"is refused for {one.until - now:.0f} s"
            for mark, one in self._suspects.items()
            if one.losses >= REFUSED_AT
        ]
        if limited := sum(one.losses >= LIMITED_AT for one in self._clients.values()):
            found.append(
                f"engines disappeared under requests of {limited} clients: each is served one request at a time"
            )
        return found


def _nothing() -> None:
    """Do nothing."""


def _keep(kept: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    """Keep a value as the newest, and forget the oldest if there are too many."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > MOST_KEPT:
        kept.popitem(last=False)
