"""Engines behind the proxy's scheduling, in virtual time: the ledger and its policies choose, as
they do for requests over HTTP.

A request takes the steps that `serving.dispatch` has for it with contract `nixl` and order
`sequential`: both engines are leased when it comes, the prefill lease is closed when the decode
engine is asked, the decode lease at the end. Engines don't fail here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from random import Random
from typing import Any, TypeVar

from pdproxy.engine_model.hardware import Hardware
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.scheduling.placement import NotYetError, Placement
from pdproxy.scheduling.policies import POLICIES
from pdproxy.scheduling.policy import Ask, Cached, PolicyFactory
from pdproxy.scheduling.split import why_alone
from pdproxy.wire.request import Parsed
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Prompt
from pdproxy_lab.simulate.engine import ModelledEngine
from pdproxy_lab.simulate.gaps import Histogram
from pdproxy_lab.simulate.memories import EngineMemories
from pdproxy_lab.simulate.records import RequestTimes
from pdproxy_lab.simulate.shape import Fleet, Shape
from pdproxy_lab.simulate.work import Work

TEXT_BYTES = 4
"""Bytes of a prompt per token: the ledger counts prompt bytes."""
_SPLIT = (Role.PREFILL, Role.DECODE)
_L = TypeVar("_L", bound=Ledger)
_MODEL = "simulated"
_NO_PROGRESS = 1_000_000
"""Events. A step of the engines is one; the longest answers end after fewer."""


class NoProgressError(ValueError):
    """The engines preempt requests again and again, and end none."""


class Call:
    """A client's request: when it is due, in seconds, its tokens, and the keys of its prompt's
    whole units.
    """

    __slots__ = (
        "due",
        "keys",
        "lease",
        "ledger",
        "number",
        "output",
        "prefill",
        "prefill_lease",
        "prompt",
        "session",
    )
    ledger: Ledger
    """That of the proxy that serves it."""

    def __init__(
        self,
        number: int,
        due: float,
        prompt: int,
        output: int,
        keys: Sequence[int] = (),
        session: str | None = None,
    ) -> None:
        self.number, self.due, self.prompt, self.output, self.keys = (
            number,
            due,
            prompt,
            output,
            keys,
        )
        self.session = session
        self.lease: Lease | None = None
        self.prefill_lease: Lease | None = None
        self.prefill: Work | None = None


class Cluster:
    """A fleet in virtual time (seconds from 0). `shapes`: what the engines of a role are. Run once.

    `policies`: by role, names or what makes them; those that ask what engines have in their caches
    know it exactly. `placement` makes what decides for each request whether it is split, from the
    cluster; None: all are split that can be.
    """

    def __init__(
        self,
        fleet: Fleet,
        hardware: Hardware,
        shapes: Mapping[Role, Shape],
        policies: Mapping[Role, str | PolicyFactory],
        placement: Callable[[Cluster], Placement] | None = None,
    ) -> None:
        self.fleet, self.hardware, self.shapes = fleet, hardware, shapes
        self.itl = Histogram()
        self.now = 0.0
        self.events = 0
        """How many events there were."""
        self._progress = 0
        """`events` when a request came, its KV was moved, or an engine ended it."""
        self._heap: list[tuple[float, int, Callable[[Any, float], None], Any]] = []
        self._number = 0
        self.records = RequestTimes()
        self.splits = 0
        """How many requests got two engines."""
        counts = {
            Role.PREFILL: fleet.prefill,
            Role.DECODE: fleet.decode,
            Role.AGGREGATED: fleet.aggregated,
            Role.ANY: fleet.any,
        }
        specs = [
            EngineSpec(f"{role.value}-{i}", role)
            for role, count in counts.items()
            for i in range(count)
        ]
        self.engines: dict[str, ModelledEngine] = {}
        self.roles: dict[str, Role] = {}
        self.memories = EngineMemories()
        for spec in specs:
            self._make_engine(spec)
        self.specs, self._policies = specs, policies
        self._make_placement, self._placed = placement, placement is not None
        self.ledger = self.make_ledger()
        self._parsed = Parsed(Route.CHAT, {}, _MODEL, True, False, False, (), None, 0)
        self._calls: Iterable[Call] = iter(())
        self._late: dict[Ledger, deque[Call]] = {}
        """Requests that a placement has wait, as `deciding.local_scheduler` does: by their
        proxy's ledger, one of which at a time is placed again.
        """

    def _make_engine(self, spec: EngineSpec) -> None:
        shape = self.shapes[spec.role]
        engine = ModelledEngine(self.hardware, shape, self._at, self, self.itl)
        self.engines[spec.url], self.roles[spec.url] = engine, spec.role
        self.memories.add(spec.url, engine.memory, shape.unit_tokens)

    def join(self, spec: EngineSpec) -> None:
        """Add an engine that is up, while requests are served."""
        self._make_engine(spec)
        self.specs.append(spec)
        self.ledger.add(spec)
        self._up(self.ledger, spec)

    def make_ledger(self) -> Ledger:
        """Return a ledger that knows all engines."""
        return self.all_up(Ledger(self.specs, self.ledger_options()))

    def ledger_options(self, *, seed: int = 0, cached: Cached | None = None) -> LedgerOptions:
        """Return how ledgers choose. `cached`: what one knows of engines' caches; None: all."""
        return LedgerOptions(
            breaker_failures=3,
            breaker_cooldown=10.0,
            policies={
                role: POLICIES[one] if isinstance(one, str) else one
                for role, one in self._policies.items()
            },
            chance=Random(seed).random,
            cached=cached or self.memories.cached,
            placement=None if self._make_placement is None else self._make_placement(self),
        )

    def all_up(self, ledger: _L) -> _L:
        """Return a ledger that has heard of all engines."""
        for spec in self.specs:
            self._up(ledger, spec)
        return ledger

    def _up(self, ledger: Ledger, spec: EngineSpec) -> None:
        block = self.shapes[spec.role].block_size
        ledger.mark_up(spec.url, Evidence(frozenset({_MODEL}), "", block, (), 0, 1.0))

    def ledger_for(self, call: Call) -> Ledger:
        """Return the ledger of the proxy that gets a request."""
        return self.ledger

    def run(self, calls: Iterable[Call]) -> RequestTimes:
        """Serve all calls, which are in the order in which they are due. Return what was
        measured.
        """
        self._calls = iter(calls)
        self._next_call()
        heap = self._heap
        while heap:
            self.now, _, what, argument = heappop(heap)
            self.events += 1
            if self.events - self._progress > _NO_PROGRESS:
                raise NoProgressError(
                    f"no request came or ended in {_NO_PROGRESS} steps: --kv-tokens is too low "
                    f"for this load"
                )
            what(argument, self.now)
        return self.records

    def _at(self, time: float, what: Callable[[Any, float], None], argument: Any) -> None:
        self._number += 1
        heappush(self._heap, (time, self._number, what, argument))

    def _next_call(self) -> None:
        call = next(iter(self._calls), None)
        if call is not None:
            self._at(call.due, self._arrived, call)

    # -- the course of a request

    def _arrived(self, call: Call, now: float) -> None:
        """The proxy leases engines for a request."""
        self._progress = self.events
        self._next_call()
        call.ledger = ledger = self.ledger_for(call)
        self.records.arrived(call.number, call.due, call.prompt, call.output)
        try:
            self._lease(call, now)
        except NotYetError as later:
            late = self._late.setdefault(ledger, deque())
            late.append(call)
            if len(late) == 1:
                self._at(later.at, self._lease_late, late)

    def _lease_late(self, late: deque[Call], now: float) -> None:
        """The proxy tries again to lease engines for requests that wait."""
        try:
            while late:
                self._lease(late[0], now)
                late.popleft()
        except NotYetError as later:
            self._at(later.at, self._lease_late, late)

    def _lease(self, call: Call, now: float) -> None:
        """Lease engines for a request. Raises `NotYetError`."""
        ledger, size = call.ledger, call.prompt * TEXT_BYTES
        split = self._split(ledger, call, size)
        if ledger.needs_details:
            ask = Ask(
                _MODEL,
                size,
                now,
                call.prompt,
                keys=call.keys,
                session=call.session,
                waited=now - call.due,
            )
        else:
            ask = Ask(_MODEL, size, now)
        if self._placed:
            placed = ledger.place(ask, split=split)
            leases = () if placed is None else placed.leases
        else:
            assignment = ledger.assign(_SPLIT, ask) if split else None
            if assignment is not None:
                leases = assignment.leases
            else:
                alone = ledger.assign_alone(ask)
                leases = () if alone is None else (alone,)
        if not leases:
            self._refused(call, now)
            return
        call.lease = leases[-1]
        if len(leases) > 1:
            call.prefill_lease = leases[0]
            self.splits += 1
        if not self._fits(call.lease, call) or (
            call.prefill_lease and not self._fits(call.prefill_lease, call)
        ):
            self._refused(call, now)
            return
        before = self.hardware.before_engine_s
        if call.prefill_lease is None:
            self._at(now + before, self._alone, call)
        else:
            call.prefill = Work(call, call.prompt, 1, call.keys)
            self._at(now + before, self._prefill, call)

    def _split(self, ledger: Ledger, call: Call, size: int) -> bool:
        prompt = Prompt(None, call.prompt, size)
        block, template = ledger.block_size, ledger.template_tokens
        return why_alone(self._parsed, prompt, block_size=block, template_tokens=template) is None

    def _fits(self, lease: Lease, call: Call) -> bool:
        output = 1 if lease.role is Role.PREFILL else call.output
        return self.shapes[lease.engine.role].fits(call.prompt, output)

    def _refused(self, call: Call, now: float) -> None:
        """A request that is too long for an engine's memory: an engine refuses it."""
        for lease in (call.prefill_lease, call.lease):
            if lease is not None:
                call.ledger.close(lease, Verdict.NEUTRAL, now)
        self.records.refused(call.number)

    def _prefill(self, call: Call, now: float) -> None:
        assert call.prefill_lease is not None
        assert call.prefill is not None
        self.engines[call.prefill_lease.engine.url].submit(call.prefill, now)

    def _alone(self, call: Call, now: float) -> None:
        assert call.lease is not None
        self.engines[call.lease.engine.url].submit(
            Work(call, call.prompt, call.output, call.keys), now
        )

    def _decode(self, call: Call, now: float) -> None:
        assert call.lease is not None
        assert call.prefill_lease is not None
        call.ledger.close(call.prefill_lease, Verdict.GOOD, now)
        work = Work(call, call.prompt, call.output, call.keys, pulls=True)
        self.engines[call.lease.engine.url].submit(work, now)

    def _answered(self, call: Call, now: float) -> None:
        assert call.lease is not None
        call.ledger.close(call.lease, Verdict.GOOD, now, call.output)

    def _first(self, call: Call, now: float) -> None:
        assert call.lease is not None
        call.ledger.began(call.lease, now)

    # -- what engines report

    def pulled(self, work: Work, now: float) -> None:
        """See `engine.Listener`."""
        self._progress = self.events
        call: Call = work.call
        assert call.prefill is not None
        assert call.prefill_lease is not None
        self.engines[call.prefill_lease.engine.url].release(call.prefill, now)
        call.prefill = None

    def began(self, work: Work, now: float) -> None:
        """See `engine.Listener`."""
        call: Call = work.call
        if self._placed and work is not call.prefill:
            self._at(now + self.hardware.to_client_s, self._first, call)

    def ended(self, work: Work, now: float) -> bool:
        """See `engine.Listener`."""
        self._progress = self.events
        call: Call = work.call
        if work is call.prefill:
            self._at(now + self.hardware.between_engines_s, self._decode, call)
            return True
        late = self.hardware.to_client_s
        assert work.first_at is not None
        self.records.ended(call.number, work.first_at + late, now + late, work.worst_s)
        self._at(now + late, self._answered, call)
        return False
