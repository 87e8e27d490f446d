"""The placement `auto`: least predicted cost against the SLO, over all sensible choices for a
request.

For each engine: how long a prompt waits and takes there, what its own tokens would take, and how
much likelier the sequences that decode there are to miss the SLO because of it. A request goes
whole to one engine, or is split between two: whichever costs least. Where there are many engines,
only those are looked at that have least to do, or that have the prompt's prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pdproxy.engine_model.fitted import FittedRanges
from pdproxy.engine_model.hardware import Hardware
from pdproxy.observe.weighed import Option
from pdproxy.scheduling.auto.correction import Error, Handoff, Handoffs
from pdproxy.scheduling.auto.costs import Choice, Costs, Look
from pdproxy.scheduling.auto.demand import Demand, DemandMeter
from pdproxy.scheduling.auto.loads import PredictedLeg, PredictedLoad
from pdproxy.scheduling.auto.roles import REVIEW_S, SETTLED_S, KeptEngines, typical
from pdproxy.scheduling.auto.times import WorkTimes
from pdproxy.scheduling.auto.traffic import SeenTraffic
from pdproxy.scheduling.auto.view import EnginesView, Group, models_of
from pdproxy.scheduling.auto.weights import WEIGHTS, Weights
from pdproxy.scheduling.decisions import LATE
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.outputs import Outputs
from pdproxy.scheduling.placement import (
    Candidates,
    NotYetError,
    Placed,
    Placement,
    PlacementState,
)
from pdproxy.scheduling.policy import Ask, Cached
from pdproxy.scheduling.slo import Slo

_BYTES_PER_TOKEN = 4
_MOST_WAITS, _MOST_WAIT_S = 10.0, 30.0
"""How long a request waits that is late anyway: so many times its limit, and so many seconds."""
_LEAST_LOOK_S, _LOOK_S = 0.005, 0.25
"""Seconds from one look at such a request to the next: an engine may be free sooner than was
predicted.
"""
_MAX_VIEWS = 64
_LOOK_BACK = 64
"""Decisions."""
_MAX_SLOS = 64
"""Clients can name any."""
_NOTHING: Mapping[str, int] = {}
_NO_LEG = (None, None)
_UNKNOWN = Handoff()
"""Where no prompt can be split."""


class _Group:
    """Engines of one revision that serve the same models: the demand for them, and which of them
    are kept for prefill.
    """

    __slots__ = ("kept", "meter", "most_free", "reviewed", "settled_until")

    def __init__(self, slo: Slo, weights: Weights) -> None:
        self.meter, self.kept = DemandMeter(steps=True), KeptEngines(slo, weights)
        self.reviewed = -math.inf
        self.settled_until = -math.inf
        """Until then which engines are kept is not computed anew, unless the load has a step."""
        self.most_free = 0
        """The most engines of role `any` that a request could choose from: others exclude some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoOptions:
    """How an `Auto` of any kind decides. `times_of`: an engine's hardware and chunk size. `slo`:
    bounds above 0.

    A request's own bounds go before. `cached`: None if nothing is known of caches. `assumed`:
    whether the times of an engine are generic ones; as long as one of these was not measured,
    requests go to the engines with the least load. `fitted`: what an engine's times were fitted to,
    None where nobody says. `corrects`: whether predictions are corrected by what legs take.
    `refuses`: whether a request that no engine can begin in time is refused.
    """

    times_of: Callable[[LedgerEngine], tuple[Hardware, int]]
    slo: Slo
    cached: Cached | None = None
    weights: Weights = WEIGHTS
    assumed: Callable[[LedgerEngine], bool] = lambda _: False
    fitted: Callable[[LedgerEngine], FittedRanges | None] = lambda _: None
    corrects: bool = True
    refuses: bool = False


class Auto(Placement):
    """See the module."""

    def __init__(self, options: AutoOptions) -> None:
        slo = options.slo
        self.slo, self._refuses = slo, options.refuses
        self._cached = options.cached
        self._times_of, self._weights = options.times_of, options.weights
        self._assumed, self._corrects = options.assumed, options.corrects
        self._costs: dict[tuple[Slo, float], Costs] = {}
        """By the bounds that requests have, and by what their misses count."""
        self._usual = self._costs_by_slo(slo)
        self._engines: Sequence[LedgerEngine] = ()
        self._loads: dict[str, PredictedLoad] = {}
        self._legs: dict[Lease, tuple[PredictedLoad, PredictedLeg]] = {}
        self._views: dict[Candidates, EnginesView] = {}
        self._views_by_engines: dict[tuple[tuple[LedgerEngine, ...], ...], EnginesView] = {}
        self._groups: dict[Group, _Group] = {}
        self._choice: Choice | None = None
        self._output = 0.0
        """The expected tokens of its answer."""
        self._number = 0
        """Of decisions."""
        self.outputs = Outputs()
        self._handoffs = Handoffs()
        self._whole_ttft, self._whole_tpot = Error(), Error()
        self._split_ttft, self._split_tpot = Error(), Error()
        self._looked_back = 0.0
        self._traffic = SeenTraffic(options.fitted)
        self.splits = 0
        """Requests that were split."""

    def configure(self, slo: Slo, *, refuses: bool) -> None:
        """See `Placement`. Which engines are kept for prefill is decided anew."""
        self.slo, self._refuses = slo, refuses
        self._usual = self._costs_by_slo(slo)
        self._groups.clear()
        self._views.clear()
        self._views_by_engines.clear()

    def _load(self, engine: LedgerEngine) -> PredictedLoad:
        load = self._loads.get(engine.url)
        if load is None or load.engine is not engine:
            load = self._loads[engine.url] = PredictedLoad(
                engine,
                WorkTimes(*self._times_of(engine)),
                assumed=self._assumed(engine),
                corrects=self._corrects,
            )
        return load

    def _seen(self, engine: LedgerEngine) -> PredictedLoad:
        """Return an engine's load as decisions see it: here, as our own leases make it."""
        return self._load(engine)

    def _view(self, candidates: Candidates) -> EnginesView:
        view = self._views.get(candidates)
        if view is None:
            # Where engines are excluded or bounded, each request has candidates of its own, which
            # are mostly the same engines.
            engines = (candidates.whole, candidates.prefill, candidates.decode)
            view = self._views_by_engines.get(engines)
            for known in (self._views, self._views_by_engines):
                if len(known) >= _MAX_VIEWS:
                    known.clear()
            if view is None:
                view = self._views_by_engines[engines] = EnginesView(candidates, self._seen)
                if view.group not in self._groups:
                    self._groups[view.group] = _Group(self.slo, self._weights)
            self._views[candidates] = view
        return view

    # -- a decision

    def place(self, ask: Ask, candidates: Candidates) -> Placed | None:
        """See `Placement`."""
        now, view = ask.now, self._view(candidates)
        if not self._number % _LOOK_BACK:
            self._look_back(now)
        if not view.measured and (placed := self._as_least_load(view, candidates)) is not None:
            self._choice = None
            return placed
        tokens = ask.tokens or ask.prompt_bytes // _BYTES_PER_TOKEN or 1
        known = self._cached(ask) if self._cached is not None else _NOTHING
        group = self._groups[view.group]
        if now - group.reviewed >= REVIEW_S and len(view.free) > 1 and self.slo:
            self._review(now, view, group)
        if view.version != group.kept.changes:
            view.sort_roles(group.kept.changes)
        output = self.outputs.expected(tokens, ask.limit)
        costs = self._costs_of(ask, tokens)
        self._number += 1
        choice, other = self._least(
            costs, now, tokens, output, known, view, candidates, group.kept.share
        )
        if choice is None:
            self._choice = None
            return None
        if choice.option.ttft_s > costs.longest_s or ask.waited:
            self._choice = None
            if self._refuses and costs.hopeless(choice.option.ttft_s):
                return None
            self._may_begin(ask, choice.prefill, costs.longest_s)
        self._choice, self._output = choice, output
        prefill, decode = choice.prefill, choice.decode
        group.meter.add(now, tokens, prefill.cached, output)
        weighed = costs.weighed(choice, other)
        if decode is None:
            reason = LATE if ask.waited else "cached" if prefill.cached else "whole"
            return Placed((prefill.load.engine,), reason, weighed)
        self.splits += 1
        reason = LATE if ask.waited else "split"
        return Placed((prefill.load.engine, decode.load.engine), reason, weighed)

    def _may_begin(self, ask: Ask, prefill: Look, limit: float) -> None:
        """Raise `NotYetError` if a request that is late anyway would come before prompts that are
        still to come in time. `limit`: of its TTFT.
        """
        busy = prefill.busy - prefill.load.times.before_s
        left = min(_MOST_WAITS * limit, _MOST_WAIT_S) - ask.waited
        if busy > 0.0 and left > 0.0:
            at = ask.now + max(min(busy, left, _LOOK_S), _LEAST_LOOK_S)
            raise NotYetError(at, ask.now + left)

    def _least(
        self,
        costs: Costs,
        now: float,
        tokens: int,
        output: float,
        known: Mapping[str, int],
        view: EnginesView,
        candidates: Candidates,
        share: float,
    ) -> tuple[Choice | None, Choice | None]:
        """Return the choice with the least cost, None if there is none, and the next best one of
        those that were computed. `share`: of the time that kept engines work.
        """
        looks: dict[PredictedLoad, Look] = {}

        def look(load: PredictedLoad) -> Look:
            found = looks.get(load)
            if found is None:
                cached = known.get(load.url, 0) if known else 0
                found = looks[load] = costs.look(load, now, tokens, cached, output, share)
            return found

        cached: Sequence[PredictedLoad] = view.cached(known) if known else ()
        prefills = view.worth_prefill(cached)
        decodes: list[Look] = []
        least = second = bound = math.inf
        best: Choice | None = None
        other: Choice | None = None
        first: Choice | None = None
        handoff = _UNKNOWN
        if prefills:
            handoff = self._handoffs.by_bits[tokens.bit_length()]
            for load in view.worth_decode():
                decode = look(load)
                if not decode.tpot_s:
                    costs.answer(decode, now, tokens, output)
                decodes.append(decode)
        if decodes:  # there may be none: all are full, or down
            prefill, decode = look(prefills[0]), decodes[0]
            if prefill is not decode and candidates.compatible(
                prefill.load.engine, decode.load.engine
            ):
                option = costs.split(prefill, decode, tokens, handoff.ratio)
                first = Choice(option, prefill, decode, handoff)
                bound = option.cost  # what costs as much is not chosen
        whole = view.serve_whole
        for load in (*view.worth_whole(cached), *prefills):
            if load not in whole:
                continue
            one = look(load)
            cost, ttft, part = costs.whole(one)
            worth = cost < bound
            if worth and not one.tpot_s:
                costs.answer(one, now, tokens, output)
            both = one.late * one.slow
            cost += one.tpot_cost - both
            if cost >= second or (best is not None and best.prefill is one):
                continue
            choice = Choice(
                Option(
                    cost,
                    ttft,
                    one.tpot_s,
                    part - both,
                    one.tpot_cost,
                    one.cost,
                    one.longer_s,
                    0.0,
                    one.cached,
                ),
                one,
            )
            if cost < least and worth:
                second, other, least, best = least, best, cost, choice
                if cost < bound:
                    bound = cost
            else:
                second, other = cost, choice
        if first is not None:
            cost = first.option.cost
            if cost < least:
                if least < second:
                    second, other = least, best
                least, best = cost, first
            elif cost < second:
                second, other = cost, first
        paired = True
        for load in prefills if decodes else ():
            prefill = look(load)
            if prefill.cost >= least:
                continue
            for decode in decodes:
                if decode is prefill or prefill.cost + decode.tpot_cost >= least:
                    continue
                if first is not None and prefill is first.prefill and decode is first.decode:
                    continue
                option = costs.split(prefill, decode, tokens, handoff.ratio)
                if option.cost < least:
                    paired = candidates.compatible(prefill.load.engine, decode.load.engine)
                    if paired:
                        if least < second:
                            second, other = least, best
                        least, best = option.cost, Choice(option, prefill, decode, handoff)
        # those that were worth a look may not work together
        if prefills and (best is None or not paired):
            for load, decoder in view.pairs(candidates.compatible):
                prefill, decode = look(load), look(decoder)
                if not decode.tpot_s:
                    costs.answer(decode, now, tokens, output)
                option = costs.split(prefill, decode, tokens, handoff.ratio)
                if option.cost < least:
                    other, best = best or other, Choice(option, prefill, decode, handoff)
                break
        return best, other

    def _costs_by_slo(self, slo: Slo) -> Costs | None:
        """Return the costs of all requests without bounds of their own, None if they differ."""
        return Costs(slo, self._weights) if slo.long_prompt is None else None

    def _costs_of(self, ask: Ask, tokens: int) -> Costs:
        if ask.slo is None and (usual := self._usual) is not None:
            return usual
        slo = self.slo if ask.slo is None else ask.slo.over(self.slo)
        asked = slo, 1.0 if slo.long_prompt is None else slo.weight(tokens)
        found = self._costs.get(asked)
        if found is None:
            if len(self._costs) >= _MAX_SLOS:
                self._costs.clear()
            found = self._costs[asked] = Costs(slo, self._weights, asked[1])
        return found

    def _review(self, now: float, view: EnginesView, group: _Group) -> None:
        if len(view.free) < group.most_free:
            return
        group.most_free = len(view.free)
        settled = group.meter.settled(now)
        if settled and now < group.settled_until:
            group.reviewed = now
            return
        times = typical(view.free)
        demand = self._of_all(group.meter.demand(now, times, self._handoffs))
        if demand is None:
            return
        group.reviewed, changes = now, group.kept.changes
        group.kept.review(
            now, view.free, demand, times, len(view.fixed_prefill), len(view.all) - len(view.free)
        )
        if settled and group.kept.changes == changes:
            group.settled_until = now + SETTLED_S

    def _of_all(self, demand: Demand | None) -> Demand | None:
        """Return what all requests ask of the engines. `demand`: what those that were placed here
        ask.
        """
        return demand

    def _look_back(self, now: float) -> None:
        """Do what is to be done now and then, while requests come."""
        self._handoffs.forget(now, now - self._looked_back)
        self._looked_back = now
        loads = (self._seen(load.engine) for load in self._loads.values())
        self._traffic.look(now, loads, self.outputs)

    def _as_least_load(self, view: EnginesView, candidates: Candidates) -> Placed | None:
        """Return the engines with the least load, None if enough was measured for predictions."""
        view.measured = all(load.known for load in view.all)
        if view.measured:
            return None
        if view.fixed_prefill:
            prefills = sorted(
                view.fixed_prefill,
                key=lambda load: (load.engine.prompt_bytes, load.engine.requests),
            )
            decodes = sorted(
                view.decode, key=lambda load: (load.engine.requests, load.engine.prompt_bytes)
            )
            for prefill in prefills:
                for decode in decodes:
                    if prefill is not decode and candidates.compatible(
                        prefill.engine, decode.engine
                    ):
                        return Placed((prefill.engine, decode.engine), "uncalibrated")
        if not view.whole:
            return None
        load = min(
            view.whole,
            key=lambda load: (load.engine.requests, load.engine.prompt_bytes, load.free_at),
        )
        return Placed((load.engine,), "uncalibrated")

    # -- what becomes of it

    def opened(self, lease: Lease, ask: Ask) -> None:
        """See `Placement`."""
        choice, now, engine, role = self._choice, ask.now, lease.engine, lease.role
        tokens = ask.tokens or ask.prompt_bytes // _BYTES_PER_TOKEN or 1
        look = None
        if choice is not None:
            look = choice.decode if role is Role.DECODE else choice.prefill
        if look is None or choice is None or look.load.engine is not engine:
            load, look, choice = self._load(engine), None, None
            output = self.outputs.expected(tokens, ask.limit)
        else:
            load, output = look.load.own, self._output
        times = load.times
        if role is Role.DECODE:
            longer = times.pull_s(tokens - look.cached if look is not None else tokens)
            leg = PredictedLeg(now, tokens, output, 0.0, 0.0, 0.0, longer)
            if (
                choice is not None
                and choice.leg is not None
                and (handoff := choice.handoff) is not None
            ):
                choice.leg.decode, leg.handoff = leg, handoff
                leg.handoff_s = (choice.option.ttft_s - choice.prefill.first_s) / handoff.ratio
        else:
            if look is not None:
                seconds, longer, steps = look.seconds, look.longer_s, look.steps
            else:
                load.advance(now)
                seconds, longer, steps = times.prefill_s(
                    tokens, 0, load.decoding, load.context(), True
                )
            leg = PredictedLeg(
                now, tokens, output, seconds, seconds / times.prefill_factor, steps, 0.0
            )
            if role is Role.PREFILL and choice is not None:
                choice.leg = leg
        answers = role is not Role.PREFILL
        if self.slo.long_prompt is not None:
            leg.weight = self.slo.weight(tokens)
        if answers and choice is not None:
            leg.ttft_s, leg.tpot_s = choice.option.ttft_s, choice.option.tpot_s
            self._choice = None
        load.opened(leg, arrives_at=now + times.before_s, answers=answers, longer_s=longer)
        if answers and ask.is_silent:
            # Nothing is seen of it before its end: it begins when it was predicted to.
            load.begins_unseen(leg, now + leg.ttft_s if leg.ttft_s else max(load.free_at, now))
        self._legs[lease] = (load, leg)

    def began(self, lease: Lease, now: float) -> None:
        """See `Placement`."""
        load, leg = self._legs.get(lease, _NO_LEG)
        if load is None or leg is None or leg.began_at is not None or leg.unseen:
            return
        at, error = leg.opened_at, self._split_ttft
        if leg.seconds:
            times, error = load.times, self._whole_ttft
            load.computed(leg, at + times.before_s, now - times.to_client_s, now)
        elif leg.handoff is not None and leg.prefilled_at:
            leg.handoff.add(now, now - leg.prefilled_at, leg.handoff_s)
        load.began(leg, now)
        if leg.ttft_s:
            error.add(now - at, leg.ttft_s)

    def closed(self, lease: Lease, verdict: Verdict, now: float, tokens: int | None) -> None:
        """See `Placement`."""
        load, leg = self._legs.pop(lease, _NO_LEG)
        if load is None or leg is None:
            return
        if leg.unseen:
            load.advance(now)  # it may have begun by now
        if leg.began_at is not None:
            load.ended(leg, now, tokens)
            if tokens is not None:
                self.outputs.add(leg.tokens, tokens)
                if tokens > 1 and leg.tpot_s and not leg.unseen:
                    error = self._whole_tpot if leg.seconds else self._split_tpot
                    error.add((now - leg.began_at) / (tokens - 1), leg.tpot_s)
            return
        leg.unseen = False  # it does not begin any more
        if leg.seconds:
            times = load.times
            done_at = 0.0
            if lease.role is Role.PREFILL and verdict is Verdict.GOOD:
                done_at = now - times.between_s
                if leg.decode is not None:
                    leg.decode.prefilled_at = done_at
            load.computed(leg, leg.opened_at + times.before_s, done_at, now)
        if tokens is not None and lease.role is not Role.PREFILL:
            self.outputs.add(leg.tokens, tokens)
        if lease.role is not Role.PREFILL:
            load.never_began(leg)

    def engines_changed(self, engines: Sequence[LedgerEngine]) -> None:
        """See `Placement`."""
        self._engines = engines
        present = {engine.url: engine for engine in engines}
        for url in [
            url for url, load in self._loads.items() if present.get(url) is not load.engine
        ]:
            del self._loads[url]
        self._views.clear()
        self._views_by_engines.clear()
        groups = {(models_of(engine), engine.revision) for engine in engines}
        self._groups = {key: group for key, group in self._groups.items() if key in groups}
        for group in self._groups.values():
            group.most_free = 0

    def status(self, now: float) -> str | None:
        """See `Placement`."""
        unknown = [engine.url for engine in self._engines if not self._load(engine).known]
        if not unknown:
            return self._traffic.said(now)
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        return (
            f"no profile of {unknown[0]}{more}: until enough of their answers were measured, "
            f"requests go to the engines"
            " with the least load"
        )

    def state(self) -> PlacementState:
        """See `Placement`."""
        loads = self._loads.values()
        return PlacementState(
            errors={
                ("ttft", "whole"): self._whole_ttft.both,
                ("tpot", "whole"): self._whole_tpot.both,
                ("ttft", "split"): self._split_ttft.both,
                ("tpot", "split"): self._split_tpot.both,
            },
            corrections={
                (load.url, work): value
                for load in loads
                for work, value in (
                    ("prefill", load.times.prefill_factor),
                    ("step", load.times.step_factor),
                )
            },
            kept=sum(group.kept.count for group in self._groups.values()),
            late={load.url: load.prefill.value for load in loads if load.prefill.known},
        )
