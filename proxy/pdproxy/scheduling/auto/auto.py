"""The placement `auto`: least predicted cost against the SLO, over all sensible choices for a request.

For each engine: how long a prompt waits and takes there, what its own tokens would take, and how much likelier the sequences that
decode there are to miss the SLO because of it. A request goes whole to one engine, or is split between two: whichever costs
least. Where there are many engines, only those are looked at that have least to do, or that have the prompt's prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from pdproxy.engine_model.hardware import Hardware
from pdproxy.scheduling.auto.correction import Error
from pdproxy.scheduling.auto.costs import Costs, Look
from pdproxy.scheduling.auto.demand import Meter
from pdproxy.scheduling.auto.goal import WEIGHTS, Goal, Weights
from pdproxy.scheduling.auto.loads import EngineLoad, Leg
from pdproxy.scheduling.auto.outputs import Outputs, limit_of
from pdproxy.scheduling.auto.roles import REVIEW_S, Kept
from pdproxy.scheduling.auto.times import Times
from pdproxy.scheduling.auto.view import View
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.nodes import Node, Role
from pdproxy.scheduling.placement import Candidates, Placed, Placement
from pdproxy.scheduling.policy import Ask

_BYTES_PER_TOKEN = 4
_MAX_VIEWS = 64
_MAX_GOALS = 64
"""Clients can name any limits."""
_NOTHING: Mapping[str, int] = {}
_NO_LEG = (None, None)


Cached = Callable[[Ask], Mapping[str, int]]
"""Returns how many tokens of a prompt engines should have in their caches, by URL; those without may be left out."""
OwnGoal = Callable[[Ask], Goal | None]
"""Returns the limits that a request has named itself, None if it has named none."""


class _Choice:
    """What may be done with a request: its engines, and what is predicted of it. `decode` is None where it is not split."""

    __slots__ = ("cost", "decode", "output", "prefill", "tpot_s", "ttft_s")

    def __init__(self, cost: float, prefill: Look, decode: Look | None, ttft_s: float, tpot_s: float) -> None:
        self.cost, self.prefill, self.decode = cost, prefill, decode
        self.ttft_s, self.tpot_s = ttft_s, tpot_s
        self.output = 0.0
        """The expected tokens of the answer."""


class Auto(Placement):
    """See the module. `times_of`: an engine's hardware and chunk size. `cached`: None if nothing is known of caches.

    `own_goal`: None if requests have no limits of their own. `assumed`: the times are generic ones; it behaves as `least_load`
    until legs have shown how wrong they are. `corrects`: whether predictions are corrected by what legs take. `refuses`: whether
    a request that no engine can begin in time is refused.
    """

    def __init__(
        self,
        times_of: Callable[[Node], tuple[Hardware, int]],
        goal: Goal,
        *,
        cached: Cached | None = None,
        own_goal: OwnGoal | None = None,
        weights: Weights = WEIGHTS,
        assumed: bool = False,
        corrects: bool = True,
        refuses: bool = False,
    ) -> None:
        self.goal = goal
        self.cached = cached
        """May be set later."""
        self._own_goal = own_goal
        self._times_of, self._weights = times_of, weights
        self._assumed, self._corrects, self._refuses = assumed, corrects, refuses
        self._costs = {goal: Costs(goal, weights)}
        """By the limits that requests have."""
        self._loads: dict[str, EngineLoad] = {}
        self._legs: dict[Lease, tuple[EngineLoad, Leg]] = {}
        self._views: dict[Candidates, View] = {}
        self._views_by_nodes: dict[tuple[tuple[Node, ...], ...], View] = {}
        self._reviewed = 0.0
        self._most_free = 0
        self._choice: _Choice | None = None
        self.outputs = Outputs()
        self.meter = Meter()
        self.kept = Kept(goal, weights)
        self.ttft_error, self.tpot_error = Error(), Error()
        self.splits = 0
        """Requests that were split."""

    def _load(self, node: Node) -> EngineLoad:
        load = self._loads.get(node.url)
        if load is None or load.node is not node:
            load = self._loads[node.url] = EngineLoad(node, Times(*self._times_of(node)), corrects=self._corrects)
        return load

    def _view(self, candidates: Candidates) -> View:
        view = self._views.get(candidates)
        if view is None:
            # Where engines are excluded or bounded, each request has candidates of its own, which are mostly the same engines.
            nodes = (candidates.whole, candidates.prefill, candidates.decode)
            view = self._views_by_nodes.get(nodes)
            for known in (self._views, self._views_by_nodes):
                if len(known) >= _MAX_VIEWS:
                    known.clear()
            if view is None:
                view = self._views_by_nodes[nodes] = View(candidates, self._load)
            self._views[candidates] = view
        return view

    # -- a decision

    def place(self, ask: Ask, candidates: Candidates) -> Placed | None:
        """See `Placement`."""
        now, view = ask.now, self._view(candidates)
        if self._assumed and (placed := self._as_least_load(view, candidates)) is not None:
            self._choice = None
            return placed
        tokens = ask.tokens or ask.prompt_bytes // _BYTES_PER_TOKEN or 1
        known = self.cached(ask) if self.cached is not None else _NOTHING
        if now - self._reviewed >= REVIEW_S and len(view.free) > 1 and self.goal.any:
            self._review(now, view)  # of those with as many engines as any: a request may exclude some
        if view.version != self.kept.changes:
            view.sort_roles(self.kept.changes)
        output = self.outputs.expected(tokens, limit_of(ask.parsed))
        costs = self._costs_of(ask)
        choice = self._least(costs, now, tokens, output, known, view, candidates)
        self._choice = choice
        if choice is not None:
            choice.output = output
        if choice is None or (self._refuses and costs.hopeless(choice.ttft_s)):
            return None
        load = choice.prefill.load
        self.meter.add(now, tokens, choice.prefill.cached, output)
        values = {"ttft": choice.ttft_s, "tpot": choice.tpot_s, "cost": choice.cost}
        if choice.decode is None:
            return Placed((load.node,), "cached" if choice.prefill.cached else "whole", values)
        self.splits += 1
        return Placed((load.node, choice.decode.load.node), "split", values)

    def _least(
        self,
        costs: Costs,
        now: float,
        tokens: int,
        output: float,
        known: Mapping[str, int],
        view: View,
        candidates: Candidates,
    ) -> _Choice | None:
        """Return the choice with the least cost, None if there is none."""
        share = self.kept.share
        looks: dict[EngineLoad, Look] = {}
        best: _Choice | None = None
        least, whole = math.inf, view.serve_whole

        def look(load: EngineLoad) -> Look:
            found = looks.get(load)
            if found is None:
                here = known.get(load.url, 0) if known else 0
                found = looks[load] = costs.look(load, now, tokens, here, output, share)
            return found

        prefills = view.worth_prefill(known)
        for load in (*view.worth_whole(known), *prefills):
            one = look(load)
            if load in whole:
                cost, ttft = costs.whole(one)
                if cost < least:
                    least, best = cost, _Choice(cost, one, None, ttft, one.tpot_s)
        if not prefills:
            return best
        compatible, paired = candidates.compatible, True
        decodes = [look(load) for load in view.worth_decode()]
        for load in prefills:
            prefill = looks[load]
            if prefill.cost >= least:
                continue
            for decode in decodes:
                if decode is prefill or prefill.cost + decode.tpot_cost >= least:
                    continue
                cost, ttft = costs.split(prefill, decode, tokens)
                if cost < least:
                    paired = compatible(load.node, decode.load.node)
                    if paired:
                        least, best = cost, _Choice(cost, prefill, decode, ttft, decode.tpot_s)
        if best is None or not paired:  # those that were worth a look may not work together
            for load, other in view.pairs(compatible):
                prefill, decode = look(load), look(other)
                cost, ttft = costs.split(prefill, decode, tokens)
                return _Choice(cost, prefill, decode, ttft, decode.tpot_s) if cost < least else best
        return best

    def _costs_of(self, ask: Ask) -> Costs:
        goal = self._own_goal(ask) if self._own_goal is not None else None
        if goal is None:
            goal = self.goal
        found = self._costs.get(goal)
        if found is None:
            if len(self._costs) >= _MAX_GOALS:
                self._costs.clear()
            found = self._costs[goal] = Costs(goal, self._weights)
        return found

    def _review(self, now: float, view: View) -> None:
        if len(view.free) < self._most_free:
            return
        self._most_free, self._reviewed = len(view.free), now
        times = view.free[0].times
        demand = self.meter.demand(now, times, times.pull_s)
        self.kept.review(now, view.free, demand, len(view.fixed_prefill), len(view.all) - len(view.free))

    def _as_least_load(self, view: View, candidates: Candidates) -> Placed | None:
        """Return the engines with the least load, None if enough was measured for predictions."""
        if all(load.prefill.known for load in view.all):
            self._assumed = False
            return None
        if view.fixed_prefill:
            prefills = sorted(view.fixed_prefill, key=lambda load: (load.node.prompt_bytes, load.node.requests))
            decodes = sorted(view.decode, key=lambda load: (load.node.requests, load.node.prompt_bytes))
            for prefill in prefills:
                for decode in decodes:
                    if prefill is not decode and candidates.compatible(prefill.node, decode.node):
                        return Placed((prefill.node, decode.node), "uncalibrated")
        if not view.whole:
            return None
        load = min(view.whole, key=lambda load: (load.node.requests, load.node.prompt_bytes, load.free_at))
        return Placed((load.node,), "uncalibrated")

    # -- what becomes of it

    def opened(self, lease: Lease, ask: Ask) -> None:
        """See `Placement`."""
        choice, now, node, role = self._choice, ask.now, lease.node, lease.role
        tokens = ask.tokens or ask.prompt_bytes // _BYTES_PER_TOKEN or 1
        look = None
        if choice is not None:
            if choice.prefill.load.node is node:
                look = choice.prefill
            elif choice.decode is not None and choice.decode.load.node is node:
                look = choice.decode
        if look is None or choice is None:
            load, choice = self._load(node), None
            output = self.outputs.expected(tokens, limit_of(ask.parsed))
        else:
            load, output = look.load, choice.output
        times = load.times
        if role is Role.DECODE:
            longer = times.pull_s
            leg = Leg(now, tokens, output, 0.0, 0.0, longer)
        else:
            if look is not None:
                seconds, longer = look.seconds, look.longer_s
            else:
                load.advance(now)
                seconds, longer = times.prefill_s(tokens, 0, load.decoding, load.context(), True)
            leg = Leg(now, tokens, output, seconds, seconds / times.prefill_factor, 0.0)
        answers = role is not Role.PREFILL
        if answers and choice is not None:
            leg.ttft_s, leg.tpot_s = choice.ttft_s, choice.tpot_s
            self._choice = None
        load.opened(leg, arrives_at=now + times.before_s, answers=answers, longer_s=longer)
        self._legs[lease] = (load, leg)

    def began(self, lease: Lease, now: float) -> None:
        """See `Placement`."""
        load, leg = self._legs.get(lease, _NO_LEG)
        if load is None or leg is None or leg.began_at is not None:
            return
        if leg.seconds:
            times = load.times
            load.computed(leg, leg.opened_at + times.before_s, now - times.to_client_s, now)
        load.began(leg, now)
        if leg.ttft_s:
            self.ttft_error.add(now - leg.opened_at, leg.ttft_s)

    def closed(self, lease: Lease, verdict: Verdict, now: float, tokens: int | None) -> None:
        """See `Placement`."""
        load, leg = self._legs.pop(lease, _NO_LEG)
        if load is None or leg is None:
            return
        if leg.began_at is not None:
            load.ended(leg, now, tokens)
            if tokens is not None:
                self.outputs.add(leg.tokens, tokens)
                if tokens > 1 and leg.tpot_s:
                    self.tpot_error.add((now - leg.began_at) / (tokens - 1), leg.tpot_s)
            return
        if leg.seconds:
            times = load.times
            done_at = now - times.between_s if verdict is Verdict.GOOD else 0.0
            load.computed(leg, leg.opened_at + times.before_s, done_at, now)
        if lease.role is not Role.PREFILL:
            load.never_began(leg)

    def engines_changed(self) -> None:
        """See `Placement`."""
        self._views.clear()
        self._views_by_nodes.clear()
        self._most_free = 0

    def status(self) -> str | None:
        """See `Placement`."""
        if not self._assumed:
            return None
        return "no profile: requests go to the least loaded engines until enough of them were measured"
