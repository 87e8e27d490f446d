"""The placement `auto`: least predicted cost against the SLO, over all sensible choices for a request.

For each engine: how long a prompt waits and takes there, what its own tokens would take, and how much likelier the sequences that
decode there are to miss the SLO because of it. A request goes whole to one engine, or is split between two: whichever costs
least. Where there are many engines, only those are looked at that have least to do, or that have the prompt's prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from pdproxy.engine_model.hardware import Hardware
from pdproxy.scheduling.auto.correction import Error
from pdproxy.scheduling.auto.demand import Meter
from pdproxy.scheduling.auto.goal import WEIGHTS, Goal, Weights, step
from pdproxy.scheduling.auto.loads import EngineLoad, Leg
from pdproxy.scheduling.auto.outputs import Outputs
from pdproxy.scheduling.auto.roles import Kept
from pdproxy.scheduling.auto.times import Times
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.nodes import Node, Role
from pdproxy.scheduling.placement import Candidates, Placed, Placement
from pdproxy.scheduling.policy import Ask

_BYTES_PER_TOKEN = 4
_ALL = 6
"""Up to so many engines are all looked at."""
_FEW = 3
"""Engines of a shortlist by each order."""
_LINE = 0.5
"""How much of the transfers that are to come a transfer waits for."""
_COLLIDES = 0.3
"""How likely a pull is to begin in the same step as another one that is to come."""


class Prefixes(Protocol):
    """What is known of the engines' prefix caches."""

    def cached(self, ask: Ask) -> Mapping[str, int]:
        """Return the tokens of a prompt that engines have, by URL; engines without any may be left out."""


class _View:
    """The engines of a `Candidates`, as loads."""

    __slots__ = ("all", "decode", "free", "prefill", "whole")

    def __init__(self, candidates: Candidates, load_of: Callable[[Node], EngineLoad]) -> None:
        self.whole = frozenset(load_of(node) for node in candidates.whole)
        self.prefill = frozenset(load_of(node) for node in candidates.prefill)
        self.decode = frozenset(load_of(node) for node in candidates.decode)
        nodes = dict.fromkeys((*candidates.whole, *candidates.prefill, *candidates.decode))
        self.all = [load_of(node) for node in nodes]
        self.free = [load for load in self.all if load.node.role is Role.ANY]


class Auto(Placement):
    """See the module. `times_of`: the engine's hardware and chunk size."""

    def __init__(
        self,
        times_of: Callable[[Node], tuple[Hardware, int]],
        goal: Goal,
        *,
        prefixes: Prefixes | None = None,
        weights: Weights = WEIGHTS,
        corrects: bool = True,
        keeps: bool = True,
    ) -> None:
        self._times_of, self.goal, self._weights, self._prefixes = times_of, goal, weights, prefixes
        self._corrects, self._keeps = corrects, keeps
        self._loads: dict[str, EngineLoad] = {}
        self._legs: dict[Lease, Leg] = {}
        self._views: dict[Candidates, _View] = {}
        self._turn = 0
        self._decided: tuple[EngineLoad, EngineLoad, float, float, float, float, float] | None = None
        self.outputs = Outputs()
        self.meter = Meter()
        self.kept = Kept(goal, weights)
        self.ttft_error, self.tpot_error = Error(), Error()
        self.strict = True
        self.counts = {"whole": 0, "split": 0}

    def _load(self, node: Node) -> EngineLoad:
        load = self._loads.get(node.url)
        if load is None or load.node is not node:
            load = self._loads[node.url] = EngineLoad(node, Times(*self._times_of(node)))
            load.corrects = self._corrects
        return load

    def _view(self, candidates: Candidates) -> _View:
        view = self._views.get(candidates)
        if view is None:
            if len(self._views) > 16:
                self._views.clear()
            view = self._views[candidates] = _View(candidates, self._load)
        return view

    def engines_changed(self) -> None:
        """See `Placement`."""
        self._views.clear()

    # -- a decision

    def place(self, ask: Ask, candidates: Candidates) -> Placed | None:
        """See `Placement`."""
        now, goal, weights = ask.now, self.goal, self._weights
        tokens = ask.tokens or max(ask.prompt_bytes // _BYTES_PER_TOKEN, 1)
        view = self._view(candidates)
        output = self.outputs.expected(None)
        known = self._prefixes.cached(ask) if self._prefixes is not None else {}
        kept_share = self.kept.share
        self._turn += 1
        engines = view.all
        turn = self._turn % len(engines)
        ttft_limit, tpot_limit, gap_limit = goal.ttft, goal.tpot, goal.gap
        ttft_scale = 1 / ttft_limit if ttft_limit is not None else 1.0
        tpot_inverse = 1 / (tpot_limit * weights.tpot_width) if tpot_limit is not None else 0.0
        best_cost, best = float("inf"), None
        prefills, decodes = [], []
        shown = tokens + output / 2
        for load in (*engines[turn:], *engines[:turn]):
            load.advance(now)
            times, decoding = load.times, load.decoding
            hardware = times.hardware
            context = load.context()
            here = known.get(load.node.url, 0)
            busy = load.busy_s(now)
            seconds, longer = times.prefill_s(tokens - here, here, decoding, context, queued=busy > 0)
            share = load.delay_share(now)
            if load.kept and share < kept_share:
                share = kept_share
            count = decoding + load.expected
            bare = times.step_s(count + 1, context + load.expected_tokens + shown)
            full = times.full_step_s(times.chunk if busy else tokens - here, decoding, context)
            tpot = bare / (1.0 - share)
            if tpot > full and share > 0.0:
                tpot = max(min(tpot, times.full_step_s(times.chunk, count, context)), bare)
            # Sequences there: all with the mean age and the mean length.
            harm = pull_harm = 0.0
            pull = 0.0
            if load in view.decode:
                pull = _pull_s(hardware)
            if decoding:
                if tpot_limit is not None:
                    made = load.mean_made()
                    left = max(output - made, 0.25 * output)
                    length = made + left
                    ends = (load.mean_age_s(now) + left * tpot + busy) / length
                    distance = (ends - tpot_limit) * tpot_inverse
                    before = step(distance)
                    rise = weights.delay / (length * tpot_limit)
                    harm = count * (step(distance + longer / length * tpot_inverse) - before + longer * rise)
                    if pull:
                        pull_harm = count * (step(distance + pull / length * tpot_inverse) - before + pull * rise)
                if gap_limit is not None and full > gap_limit:
                    harm += count
            lead = busy - hardware.before_engine_s
            first = hardware.before_engine_s + seconds + (lead if lead > 0.0 else 0.0)
            if decoding and not busy:
                first += 0.5 * bare
            used = longer if decoding else seconds
            cost = harm + weights.engine_s * used
            if load in view.prefill and (load.kept or not self.strict or load.node.role is not Role.ANY):
                prefills.append((cost + weights.ttft * first * ttft_scale, cost, first, load, seconds, longer, full))
            tpot_cost = 0.0
            if tpot_limit is not None:
                tpot_cost = step((tpot - tpot_limit) * tpot_inverse) + weights.tpot * tpot / tpot_limit
            if load in view.whole:
                if load.kept:
                    cost += weights.kept
                ttft = first + hardware.to_client_s
                cost += tpot_cost + weights.ttft * ttft * ttft_scale
                if ttft_limit is not None:
                    cost += step((ttft - ttft_limit) / (ttft_limit * weights.ttft_width))
                if gap_limit is not None and full > gap_limit:
                    cost += share
                if cost < best_cost:
                    best_cost, best = cost, (load, load, seconds, longer, 0.0, ttft, tpot)
            if load in view.decode and not load.kept:
                moves = pull + 0.5 * bare + bare + hardware.transfer_s(tokens - here) * (1.0 + _LINE * load.pulls)
                cost = pull_harm + tpot_cost + weights.engine_s * pull
                if gap_limit is not None and full > gap_limit:
                    cost += share if share > 0.2 else 0
                decodes.append((cost + weights.ttft * moves * ttft_scale, cost, moves, load, pull, tpot))
        if prefills and decodes:
            prefills.sort(key=_first)
            decodes.sort(key=_first)
            for _, cost_there, first, prefill, seconds, longer, _ in prefills[:4]:
                for _, cost_here, moves, decode, pull, tpot in decodes[:4]:
                    if prefill is decode:
                        continue
                    hardware = decode.times.hardware
                    ttft = first + hardware.between_engines_s + moves + hardware.to_client_s
                    cost = cost_there + cost_here + weights.ttft * ttft * ttft_scale
                    if ttft_limit is not None:
                        cost += step((ttft - ttft_limit) / (ttft_limit * weights.ttft_width))
                    if cost < best_cost and candidates.compatible(prefill.node, decode.node):
                        best_cost, best = cost, (prefill, decode, seconds, longer, pull, ttft, tpot)
        assert best is not None
        self._decided = best
        if self._keeps and len(view.free) > 1:
            self._note(now, tokens, known, output, best, view)
        prefill, decode = best[0], best[1]
        if prefill is decode:
            self.counts["whole"] += 1
            return Placed((prefill.node,), "cost", None)
        self.counts["split"] += 1
        return Placed((prefill.node, decode.node), "cost", None)

    def _note(self, now, tokens, known, output, best, view) -> None:
        load = best[0]
        times, here = load.times, known.get(load.node.url, 0)
        hardware = times.hardware
        alone, _ = times.prefill_s(tokens - here, here, 0, 0, queued=True)
        beside, longer = times.prefill_s(tokens - here, here, 8, 8 * tokens, queued=True)
        moves = hardware.between_engines_s + hardware.pull_s + hardware.transfer_s(tokens) + 1.5 * times.step_s(8, 8 * tokens)
        self.meter.add(now, alone, beside, longer, _pull_s(hardware), moves, tokens, tokens - here, output)
        self.kept.review(now, view.free, self.meter.demand(now))

    # -- what becomes of it

    def opened(self, lease: Lease, ask: Ask) -> None:
        """See `Placement`."""
        load = self._load(lease.node)
        decided, now = self._decided, ask.now
        answers, prefills = lease.role is not Role.PREFILL, lease.role is not Role.DECODE
        tokens = ask.tokens or max(ask.prompt_bytes // _BYTES_PER_TOKEN, 1)
        if decided is not None and load in decided[:2]:
            _, _, seconds, longer, pull, ttft, tpot = decided
        else:
            seconds, longer = load.times.prefill_s(tokens, 0, load.decoding, load.context(), queued=True)
            pull, ttft, tpot = load.times.hardware.pull_s, 0.0, 0.0
        if not prefills:
            seconds, longer = 0.0, pull
        leg = Leg(now, tokens, seconds, seconds / load.times.prefill_factor, 0.0 if prefills else pull)
        if answers:
            leg.ttft_s, leg.tpot_s = ttft, tpot
        load.opened(leg, arrives_at=now + load.times.hardware.before_engine_s, answers=answers, prefills=prefills)
        load.delayed(longer, now)
        self._legs[lease] = leg

    def began(self, lease: Lease, now: float) -> None:
        """See `Placement`."""
        leg = self._legs.get(lease)
        if leg is None or leg.began_at is not None:
            return
        load = self._load(lease.node)
        if leg.seconds:
            hardware = load.times.hardware
            load.computed(leg, leg.opened_at + hardware.before_engine_s, now - hardware.to_client_s, now)
        load.began(leg, now)
        self.ttft_error.add(now - leg.opened_at, leg.ttft_s)

    def closed(self, lease: Lease, verdict: Verdict, now: float, tokens: int | None) -> None:
        """See `Placement`."""
        leg = self._legs.pop(lease, None)
        if leg is None:
            return
        load = self._load(lease.node)
        if leg.began_at is not None:
            load.ended(leg, now, tokens)
            if tokens is not None:
                self.outputs.add(tokens)
                if tokens > 1:
                    self.tpot_error.add((now - leg.began_at) / (tokens - 1), leg.tpot_s)
            return
        if leg.seconds:
            hardware = load.times.hardware
            good = verdict is Verdict.GOOD
            done_at = now - hardware.between_engines_s if good else 0.0
            load.computed(leg, leg.opened_at + hardware.before_engine_s, done_at, now)
        if lease.role is not Role.PREFILL:
            load.never_began(leg)


def _pull_s(hardware: Hardware) -> float:
    """Return how long a pull stops a decode engine's sequences, on average."""
    return hardware.pull_s + _COLLIDES * max(hardware.further_pull_s - hardware.pull_s, 0.0)


def _first(row: tuple[float, ...]) -> float:
    return row[0]
