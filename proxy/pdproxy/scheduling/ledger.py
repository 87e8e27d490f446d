"""The ledger: all engines of a pool and their load. It chooses the engines for each request.

Owns every open `Lease`, and is the only writer of what is known of engines (`engine_states`).
Choosing and leasing are one synchronous step, so that two requests can't both see the same free
engine. A lease is closed once. Only this changes the breaker, and reduces the load, of its engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pdproxy.scheduling import readiness
from pdproxy.scheduling.breakers import Breakers
from pdproxy.scheduling.choice import Choice
from pdproxy.scheduling.compatibility import Compatibility, prefill_and_decode
from pdproxy.scheduling.engine_states import EngineStates
from pdproxy.scheduling.leases import FAILED, GOOD, Assignment, Lease, Verdict
from pdproxy.scheduling.ledger_engine import (
    DECODE,
    ENCODE,
    PREFILL,
    EngineSpec,
    Evidence,
    LedgerEngine,
    Role,
)
from pdproxy.scheduling.placement import Placement
from pdproxy.scheduling.policies import Policies
from pdproxy.scheduling.policy import Ask, Cached, PolicyFactory, no_chance
from pdproxy.scheduling.releasing import ReleaserChoice
from pdproxy.scheduling.revision_choice import RevisionChoice
from pdproxy.scheduling.revisions import Revisions
from pdproxy.scheduling.runs import RunNumbers
from pdproxy.scheduling.transfer_faults import KnownTransfers, TransferFault, TransferFaults
from pdproxy.scheduling.wanted_engines import WantedEngines

ALONE = (Role.AGGREGATED, Role.DECODE)
"""The roles that usually serve a request by themselves, the first choice first."""
_BYTES_PER_TOKEN = 4
DOWN = {Verdict.UNREACHABLE: "connection refused", Verdict.DEAD: "its engine core has died"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerOptions:
    """How a ledger of any kind chooses. `breaker_failures`, `breaker_cooldown`, `slow_start`: see
    `Breakers`.

    `policies` rank the engines of each role: `LeastLoad` where none is given, and decode's for
    aggregated engines. `alone`: the roles whose engines may serve a request by themselves, the
    first choice first. `placement` decides for each request whether it is split, and chooses its
    engines; None: it is split if it may be, and the policies choose. `placed_elsewhere`: whether
    another process, which chooses, has a placement. `windows`: whether engines may
    have windows (`LedgerEngine.window`); then those with room come first. `wanted`: is told of all
    leases, None where nobody asks how many engines are needed.
    """

    breaker_failures: int
    breaker_cooldown: float
    slow_start: float = 0.0
    policies: Mapping[Role, PolicyFactory] = field(default_factory=dict)
    alone: Sequence[Role] = ALONE
    placement: Placement | None = None
    placed_elsewhere: bool = False
    chance: Callable[[], float] = no_chance
    cached: Cached | None = None
    windows: bool = False
    wanted: WantedEngines | None = None


class Ledger(EngineStates):
    """All engines of one pool."""

    def __init__(self, specs: Iterable[EngineSpec], options: LedgerOptions) -> None:
        failures, cooldown = options.breaker_failures, options.breaker_cooldown
        super().__init__(options.alone)
        self.runs = RunNumbers()
        self.transfers = TransferFaults(failures, cooldown)
        """Between which engines KV does not move. Written only here; read by those who show it."""
        self.when_noted: Callable[[str], None] = lambda _: None
        """Called with an engine's URL when something of its health was noted."""
        self.when_forgiven: Callable[[TransferFault], None] = lambda _: None
        """Called with each fault that is over because its engine was removed or started again."""
        self._engines.update({spec.url: self._engine(spec) for spec in specs})
        self.placement = options.placement
        """Read only."""
        self.wanted = options.wanted
        """How many engines the load needs. Told here of leases."""
        if self.wanted is not None:
            self.wanted.engines_changed(self._engines.values())
        self._ranking = Policies(options.chance, options.cached)
        self._policies, self._interested = self._ranking.by_role, self._ranking.by_uses
        self.has_placement = self.placement is not None or options.placed_elsewhere
        self.needs_details = self._ranking.use(options.policies) or self.has_placement
        self._not_paired: list[str] | None = None
        """Sentences on engines that are not paired, None if they have to be looked for."""
        self.breakers = Breakers(failures, cooldown, options.slow_start)
        self.breakers.changed = lambda engine: self.when_noted(engine.url)
        self._compatibility = Compatibility()
        self._choice = Choice(
            self._engines.values(),
            self._policies,
            self._alone,
            self._compatibility,
            self._is_faulty,
        )
        self.revisions = Revisions(
            self._engines, self._policies, self._alone, self._compatibility, options.cached
        )
        """Read only."""
        self._in_revisions = RevisionChoice(
            self.revisions, self._choice, self._engines, self.breakers
        )
        self.releasing = ReleaserChoice(self._engines, self._choice.eligibility, self.breakers)
        self._windows = self._has_places = options.windows
        """The second: whether any engine's requests are bounded, by a window or by its places."""

    def __repr__(self) -> str:
        busy = ", ".join(
            f"{n.role.value} {n.url} {n.down_because or 'up'} x{n.requests}"
            for n in self._engines.values()
        )
        return f"<Ledger {busy}>"

    def use_policies(self, policies: Mapping[Role, PolicyFactory]) -> None:
        """Have other policies rank engines from now on."""
        self.needs_details = self._ranking.use(policies) or self.has_placement
        self._changed()

    # -- what probes and audits report

    def mark_up(self, url: str, evidence: Evidence) -> bool:
        """Note that an engine answered its probe. Return whether it is new: first seen, restarted
        or changed.
        """
        engine = self._engines[url]
        was_down = engine.down_because is not None
        new = engine.evidence != evidence or was_down
        if engine.evidence is not None and engine.evidence != evidence:
            self._pardon(engine)
        another_run = engine.evidence is None or not engine.evidence.same_run(
            evidence, was_down=was_down
        )
        started_again = another_run and engine.evidence is not None
        if another_run:
            engine.run_number = self.runs.of(engine, evidence)
        if was_down:
            self.breakers.reset(engine)
        if another_run and self.transfers.suspects:
            self._forgive(url)
        if was_down or started_again:
            engine.stalled = None
        engine.evidence, engine.down_because, engine.probed = evidence, None, True
        if new:
            self._changed()
        if started_again:
            self._when_lost(url)
        if another_run:
            self._when_up(url, started_again)
        if new:
            self.when_noted(url)
        return new

    def mark_down(self, url: str, reason: str, now: float) -> bool:
        """Note that an engine can't serve. Return whether it could before."""
        if (engine := self._engines.get(url)) is None:
            return False  # it was removed
        was_up = engine.down_because is None
        is_new = not engine.probed or engine.down_because != reason
        if was_up or not engine.probed:
            engine.down_since = now
        engine.down_because, engine.probed = reason, True
        self._changed()
        if was_up:
            self._when_lost(url)
        if is_new:
            self.when_noted(url)
        return was_up

    def mark_stalled(self, url: str, why: str) -> bool:
        """Note that an engine stands still although it may answer probes. Return whether that is
        new.
        """
        engine = self._engines.get(url)
        if engine is None or engine.down_because is not None or engine.stalled is not None:
            return False
        engine.stalled = why
        self._changed()
        self._when_lost(url)
        self.when_noted(url)
        return True

    def let_in(self, url: str, now: float) -> bool:
        """Note that an engine moves again: one request shows whether it serves. Return whether it
        was stalled before.
        """
        engine = self._engines.get(url)
        if engine is None or engine.stalled is None:
            return False
        engine.stalled = None
        self.breakers.let_in(engine, now)
        self._changed()
        self.when_noted(url)
        return True

    def exclude(self, url: str, why: str, until: float, now: float) -> bool:
        """Have an engine get requests only if there is no other, until a time. Return whether it
        got some before.
        """
        engine = self._engines.get(url)
        if engine is not None and (in_use := engine.usable(now)):
            self.breakers.exclude(engine, why, until)
            self.when_noted(url)
        return engine is not None and in_use

    def mark_asleep(self, url: str, how: str | None) -> bool:
        """Note how an engine sleeps; None: it is awake. Return whether that changed."""
        engine = self._engines.get(url)
        if engine is None or engine.asleep == how:
            return False
        engine.asleep = how
        self._changed()
        self.when_noted(url)
        return True

    def lost_model(self, url: str, model: str) -> bool:
        """Note that an engine has refused a model that it does not have. Return whether it had
        listed that.
        """
        engine = self._engines.get(url)
        if engine is None or engine.evidence is None or not engine.serves(model):
            return False
        left, adapters = engine.evidence.models - {model}, engine.evidence.adapters - {model}
        engine.evidence = replace(engine.evidence, models=left, adapters=adapters)
        self._changed()
        self.when_noted(url)
        return True

    def mark_draining(self, url: str, why: str | None) -> None:
        """Note why an engine gets no more leases although it serves those that are open; None: it
        gets some again.
        """
        if (engine := self._engines.get(url)) is not None:
            engine.draining = why
            self._changed()

    def mark_kv(
        self, url: str, not_ready: str | None, mode: str | None = None, tp_size: int | None = None
    ) -> bool:
        """Note why an engine can't take part in KV transfer yet; None: it can. Return whether that
        changed.

        `mode`: the direction of its transfers, which both engines of a pair must have; None: the
        connector has only one. `tp_size`: its tensor-parallel size, if the engine reports it.
        """
        engine = self._engines.get(url)
        if engine is None or (engine.kv_not_ready, engine.kv_mode, engine.kv_tp_size) == (
            not_ready,
            mode,
            tp_size,
        ):
            return False
        engine.kv_not_ready, engine.kv_mode, engine.kv_tp_size = not_ready, mode, tp_size
        self._changed()
        return True

    def mark_removed(self, engine: LedgerEngine, down_because: str | None, now: float) -> None:
        """Note whether a removed engine is up, for the legs to it that are under way.
        `down_because` None: it is up.
        """
        was_up = engine.down_because is None
        if was_up:
            engine.down_since = now
        engine.down_because = down_because
        if was_up and down_because is not None:
            self._when_lost(engine.url)
        self.when_noted(engine.url)

    def eject(self, prefill: str, decode: str) -> None:
        """Never pair these two again, until one of them changes."""
        if prefill not in self._engines or decode not in self._engines:
            return  # it was removed
        self._engines[prefill].ejected.add(decode)
        self._engines[decode].ejected.add(prefill)
        self._changed()
        self.when_noted(decode)

    def _pardon(self, engine: LedgerEngine) -> None:
        for url in engine.ejected:
            self._engines[url].ejected.discard(engine.url)
        engine.ejected.clear()

    # -- what legs and counters show of KV that moves

    def transfer_failed(
        self, prefill: str, decode: str, now: float, *, first: bool = True
    ) -> TransferFault | None:
        """Note that a decode engine could not use a prefill engine's KV. As
        `TransferFaults.failed`.
        """
        if (more := self._more(prefill, decode)) is None:
            return None
        found = self.transfers.failed(
            prefill, decode, now, more_prefills=more[0], more_decodes=more[1], first=first
        )
        return self._noted(found)

    def left_out(self, prefill: str, decode: str, failed: Sequence[tuple[str, str]]) -> str:
        """Return which of two engines is left out of a prompt's next attempt: see
        `TransferFaults.left_out`.
        """
        if (more := self._more(prefill, decode)) is None:
            return decode
        return self.transfers.left_out(
            prefill, decode, failed, more_prefills=more[0], more_decodes=more[1]
        )

    def _more(self, prefill: str, decode: str) -> tuple[bool, bool] | None:
        """Return whether a decode engine could be paired with other prefill engines, and whether
        the prefill engine could with other decode engines; None if one of the two was removed.
        """
        p, d = self._engines.get(prefill), self._engines.get(decode)
        if p is None or d is None:
            return None
        others = [
            engine
            for engine in self._engines.values()
            if engine is not p and engine is not d and engine.available
        ]
        more_prefills = any(
            PREFILL in engine.uses and prefill_and_decode(engine, d) is None for engine in others
        )
        more_decodes = any(
            DECODE in engine.uses and prefill_and_decode(p, engine) is None for engine in others
        )
        return more_prefills, more_decodes

    def kv_not_made(self, prefill: str, now: float) -> TransferFault | None:
        """Note that a prefill engine gave no KV that can be used, and no error. Return the fault
        that this shows.
        """
        return (
            self._noted(self.transfers.not_made(prefill, now)) if prefill in self._engines else None
        )

    def transfer_loaded(self, prefill: str, decode: str, since: float) -> list[TransferFault]:
        """Note that KV was loaded for a prompt that was sent at `since`. Return the faults that are
        over.
        """
        over = self.transfers.loaded(prefill, decode, since)
        if over:
            self._changed()
        return over

    def transfers_counted(
        self, decode: str, moved: int, computed: int, now: float
    ) -> TransferFault | None:
        """Note what a decode engine's counters show: see `TransferFaults.counted`."""
        return (
            self._noted(self.transfers.counted(decode, moved, computed, now))
            if decode in self._engines
            else None
        )

    def follow_transfers(self, known: KnownTransfers) -> None:
        """Note what the process that chooses engines knows."""
        self.transfers.follow(known)
        self._changed()

    def _noted(self, fault: TransferFault | None) -> TransferFault | None:
        if fault is not None:
            self._changed()
        return fault

    def _forgive(self, url: str) -> None:
        for fault in self.transfers.forget(url):
            self.when_forgiven(fault)
        self._changed()

    # -- engines come and go

    def _engine(self, spec: EngineSpec) -> LedgerEngine:
        return LedgerEngine(spec, run_number=self.runs.next(), transfers=self.transfers)

    def add(self, spec: EngineSpec) -> LedgerEngine:
        """Add an engine. Nothing is sent to it before it has answered a probe."""
        engine = self._engines[spec.url] = self._engine(spec)
        self._changed()
        return engine

    def remove(self, url: str) -> None:
        """Remove an engine: it gets no more leases. Open leases are closed as usual, without effect
        on others.
        """
        engine = self._engines.pop(url)
        self.runs.removed(engine)
        self._pardon(engine)
        self._forgive(url)
        self.breakers.reset(engine)
        for policy in self._policies.values():
            policy.forget(engine)
        # so that legs which still run neither open nor close its breaker
        engine.open_until = math.inf
        self._changed()

    # -- what a request asks

    def assign(
        self,
        roles: Sequence[Role],
        ask: Ask,
        *,
        without: Collection[str] = (),
        near: str | None = None,
    ) -> Assignment | None:
        """Lease one engine for each role, all compatible, none of them full or in `without`, None
        if there are none.

        `roles` are different. The order counts: where the best engines are not compatible, the
        first role has its best one that has compatible partners. `near`: the URL of an engine whose
        revision had better serve the request, None: it makes no difference.
        """
        roles, bounded, breakers = tuple(roles), self._has_places, self.breakers
        if ask.now >= self.transfers.due:
            self._try_transfers(ask.now)
        plain = not without and not (breakers.opened and breakers.any_left(ask.now))
        if self.revisions.several and len(roles) > 1:
            engines = self._in_revisions.each(
                roles, ask, without, plain=plain, bounded=bounded, near=near
            )
        else:
            engines = self._choice.each(roles, ask, without, plain=plain, bounded=bounded)
        if engines is None:
            return None
        if self.transfers.faults and len(engines) > 1:
            self._tried(engines, ask.now)
        alone, size = len(engines) == 1, ask.prompt_bytes
        leases: list[Lease] = []
        for role, engine in zip(roles, engines, strict=True):
            # A decode engine that gets the prompt's KV has no work with the prompt.
            leases.append(self._open(engine, role, size if alone or role is not DECODE else 0, ask))
        if self.wanted is not None:
            self.wanted.opened(leases, ask)
        return Assignment(tuple(leases))

    def place(
        self,
        ask: Ask,
        *,
        split: bool,
        without: Collection[str] = (),
        avoid: Collection[str] = (),
        near: str | None = None,
    ) -> Assignment | None:
        """Lease the engines that the placement chooses: one that serves the request whole, or a
        prefill and a decode engine.

        `split`: whether two may share the work. Engines in `avoid`, and then those in `without`,
        are used only if no others can serve the request. `near`: as for `assign`. None: there are
        no engines for it, or, if it `is_placeable`, none that the placement would have serve it
        now.

        Raises:
            NotYetError: the placement has the request wait.
            RuntimeError: the pool has no placement.
        """
        if self.placement is None:
            raise RuntimeError("the pool has no placement")
        if self._windows:
            avoid = (*avoid, *[engine.url for engine in self._engines.values() if engine.crowded])
        if ask.now >= self.transfers.due:
            self._try_transfers(ask.now)
        cached = self._is_plain(ask.now)
        if self.revisions.several:
            placed = self._in_revisions.place(
                self.placement, ask, split, without, avoid, cached=cached, near=near
            )
        else:
            candidates = self._choice.of(ask, split, without, avoid, cached=cached)
            placed = None if candidates is None else self.placement.place(ask, candidates)
        if placed is None:
            return None
        if len(placed.engines) == 1:
            leases: tuple[Lease, ...] = (
                self._open(placed.engines[0], Role.AGGREGATED, ask.prompt_bytes, ask),
            )
        else:
            prefill, decode = placed.engines
            self._tried(placed.engines, ask.now)
            prefill_lease = self._open(prefill, Role.PREFILL, ask.prompt_bytes, ask)
            leases = (prefill_lease, self._open(decode, Role.DECODE, 0, ask))
        if self.wanted is not None:
            self.wanted.opened(leases, ask)
        return Assignment(leases, placed.reason, placed.weighed)

    def is_placeable(self, ask: Ask, *, split: bool, without: Collection[str] = ()) -> bool:
        """Return whether `place` has any engines to choose from."""
        return self._choice.of(ask, split, without, cached=self._is_plain(ask.now)) is not None

    def _is_plain(self, now: float) -> bool:
        """Return whether all engines that are up may get any number of requests."""
        return not (self.breakers.opened and self.breakers.any_left(now)) and not self._has_places

    def assign_alone(self, ask: Ask, *, without: Collection[str] = ()) -> Lease | None:
        """Lease one engine that serves a request by itself, of the first role that may and has one,
        None if there is none.
        """
        choice = self._in_revisions if self.revisions.several else self._choice
        plain = not without and not (self.breakers.opened and self.breakers.any_left(ask.now))
        engine = choice.alone(ask, without, plain=plain)
        if engine is None:
            return None
        lease = self._open(engine, Role.AGGREGATED, ask.prompt_bytes, ask)
        if self.wanted is not None:
            self.wanted.opened((lease,), ask)
        return lease

    def restore(self, url: str, role: Role, prompt_bytes: int, since: float) -> Lease | None:
        """Open a lease as one that an earlier ledger had given. None: there is no such engine."""
        engine = self._engines.get(url)
        if engine is None:
            return None
        lease = self._open(engine, role, prompt_bytes, Ask(None, prompt_bytes, since))
        if self.wanted is not None:
            self.wanted.restored(lease)
        return lease

    def began(self, lease: Lease, now: float) -> None:
        """Note that the engine that answers has made its first token: for trials, and for the
        placement.
        """
        if lease.trial and not lease.closed:
            self.breakers.proved(lease, now)
        if self.placement is not None and not lease.closed:
            self.placement.began(lease, now)

    def poor_encoders(self, now: float) -> list[str]:
        """Return the URLs of encoder engines that are worse than none: their breaker is open, or
        one request shows now whether they work again.
        """
        return [
            engine.url
            for engine in self._encoders
            if now < engine.open_until or (engine.half_open(now) and engine.trials)
        ]

    def close(self, lease: Lease, verdict: Verdict, now: float, tokens: int | None = None) -> bool:
        """End a lease. Closing twice changes nothing. Return whether this took the engine out of
        use.

        `tokens`: how many the client got from this engine, None where unknown.
        """
        if lease.closed:
            return False
        lease.closed = True
        engine = lease.engine
        engine.requests -= 1
        engine.prompt_bytes -= lease.prompt_bytes
        if lease.trial:
            self.breakers.over(lease)
        for policy in self._interested[engine.uses]:
            policy.closed(lease, verdict, now)
        if self.placement is not None and lease.role is not ENCODE:
            self.placement.closed(lease, verdict, now, tokens)
        if self.wanted is not None:
            self.wanted.closed(lease, verdict, now, tokens)
        if verdict is GOOD:
            if engine.failures or engine.trial_places:
                self.breakers.good(lease, now)
        elif verdict is FAILED:
            return self.breakers.failed(lease, now)
        elif (why := DOWN.get(verdict)) is not None and self._engines.get(engine.url) is engine:
            return self.mark_down(engine.url, why, now)
        return False

    def failed(self, lease: Lease, now: float) -> bool:
        """Count a leg as failed whose lease is closed: only now it is known that its engine was the
        cause. Return as `close`.
        """
        return self.breakers.failed(lease, now)

    def _try_transfers(self, now: float) -> None:
        """Let prompts be split again where KV did not move and the time for that is over."""
        if self.transfers.try_due(now):
            self._changed()

    def _tried(self, engines: Sequence[LedgerEngine], now: float) -> None:
        """Note that a prompt is sent to a prefill and a decode engine, in this order."""
        if self.transfers.faults and self.transfers.taken(engines[0].url, engines[-1].url, now):
            self._changed()

    def _is_faulty(self, ask: Ask) -> bool:
        """Return whether engines between which KV does not move are better than none: nobody serves
        the request whole.
        """
        return bool(self.transfers.faults) and not self.serves_alone(
            ask.model, spares_decode=self._spares_decode(ask)
        )

    def _spares_decode(self, ask: Ask) -> bool:
        """Return whether no engine of role decode would serve a prompt whole, as far as its size is
        known.
        """
        tokens = ask.prompt_bytes // _BYTES_PER_TOKEN if ask.tokens is None else ask.tokens
        return self.alone_up_to is not None and tokens > self.alone_up_to

    def _open(self, engine: LedgerEngine, role: Role, prompt_bytes: int, ask: Ask) -> Lease:
        engine.requests += 1
        engine.prompt_bytes += prompt_bytes
        lease = Lease(engine, role, prompt_bytes, since=ask.now)
        if self.breakers.opened:
            self.breakers.leased(lease)
        for policy in self._interested[engine.uses]:
            policy.opened(lease, ask)
        if self.placement is not None and role is not ENCODE:
            self.placement.opened(lease, ask)
        return lease

    def _changed(self) -> None:
        """Forget all that was computed from the engines' state."""
        self._compatibility.changed()
        self._choice.changed()
        self.revisions.changed()
        self._not_paired = None
        engines = self._engines.values()
        if self.placement is not None:
            others = [engine for engine in engines if engine.role is not ENCODE]
            self.placement.engines_changed(others)
        if self.wanted is not None:
            self.wanted.engines_changed(engines)
        self._has_places = self._windows or any(
            engine.spec.places is not None for engine in engines
        )
        super()._changed()

    # -- what an operator asks

    def works_beside_idle(self, url: str, now: float) -> bool:
        """Return whether an engine is for decode, while one for prefill that is in use has no
        request, not even one of other replicas, as estimated.
        """
        engine = self._engines.get(url)
        return (
            engine is not None
            and engine.role is DECODE
            and any(
                one.role is PREFILL and not one.requests and one.usable(now)
                for one in self._engines.values()
            )
        )

    def shortcomings(self, now: float) -> list[str]:
        """Return what is wrong although requests are served, a sentence each."""
        told = [one.status() for one in self._policies.values()]
        if self.placement is not None:
            told.insert(0, self.placement.status(now))
        if self._not_paired is None:
            self._not_paired = readiness.not_paired(self.engines)
        return [
            *readiness.shortcomings(self.engines, now),
            *readiness.not_encoding(self.engines, now),
            *readiness.not_moving(self.transfers.faults.values(), now),
            *self._not_paired,
            *self.revisions.shortcomings(),
            *dict.fromkeys(text for text in told if text is not None),
        ]
