"""How many engines each runtime gets, from what the load needs. Pure: `now` is an argument, and all
that is remembered between two looks is in `ScalingState`.

The rules, for the runtimes of one budget:

- **Up at once**, to as many as the demand needs. Where the demand is above the engines by less than
  `TOLERANCE`, they are enough. At most twice as many as are ready, or `MORE_AT_ONCE` more.
- **Down one at a time**, once fewer have been enough for `scale_down_seconds`, to no fewer than
  have been enough all that time. Engines are `PACE_S` apart.
- **A demand that is not known changes nothing.** If only some proxies say theirs, the load needs at
  least their sum: engines are added for that, none is taken away. Where nothing was known for
  longer than `GAP_S`, the time in which fewer must be enough begins again; also where the clock
  went back.
- **Engines that stay Pending** for longer than `LONGEST_PENDING_S` can't be had: their runtime asks
  for no more, and gives those back that are not needed. Others are not held up by them.
- **The budget holds at each moment.** An engine holds its GPUs until its pod is gone, also one that
  is Pending. So GPUs that change their runtime are freed first.
- **Where the budget is too small**, each further engine goes to the runtime that has the smallest
  part of the engines that its load needs. A request needs a prefill engine and a decode engine, so
  the role with the smallest part limits how many requests are served within the SLO.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from pdproxy_operator.resources import Autoscaling, Role, ScalingState

TOLERANCE = 0.05
"""Demand above the engines by no more than this part asks for no further engine."""
MORE_AT_ONCE = 4
PACE_S = 60.0
GAP_S = 60.0
LONGEST_PENDING_S = 300.0
NOTED_S = 10.0
"""Seconds for which a time that the demand was known is not written anew. Each write has the
runtime looked at again, which must come to an end however slow the API server is.
"""
_ROUNDING = 1e-9


class Scaled(NamedTuple):
    """A runtime as it is.

    Args:
        pool: the name of its pool.
        autoscaling: None: its user says how many engines it has.
        replicas: engines that it should have now.
        pods: engines that exist and do not end, of all revisions.
        ready: how many of them are ready.
        pending: how many of them have no node yet.
        pending_s: for how many seconds the oldest of these has had none.
        ending: further engines that end, and are not gone yet.
        gpus: of one engine.
        demand: engines that the load needs of its pool and role, of all runtimes together; None: it
            is not known.
        complete: whether all proxies have said their part of `demand`.
    """

    runtime: str
    pool: str
    role: Role
    autoscaling: Autoscaling | None
    replicas: int
    pods: int
    ready: int
    pending: int
    pending_s: float
    ending: int
    gpus: int
    demand: float | None
    complete: bool
    state: ScalingState | None

    @property
    def held(self) -> int:
        """The engines that have GPUs, or may get some at any moment."""
        return max(self.replicas, self.pods) + self.ending

    @property
    def stuck(self) -> bool:
        """Whether some of its engines can't be had."""
        return self.pending > 0 and self.pending_s > LONGEST_PENDING_S


class Limited(NamedTuple):
    """Why a runtime does not get what its load needs. `reason`: a word in CamelCase; `message`: a
    sentence.
    """

    reason: str
    message: str


class Decision(NamedTuple):
    """What becomes of a runtime. `replicas`: engines that it should have from now on; `state`: to
    be remembered, None without autoscaling; `limited`: None: it gets what its load needs.
    """

    replicas: int
    state: ScalingState | None
    limited: Limited | None = None


class _Need(NamedTuple):
    """What a runtime needs. `demand`: its share of its role's demand, None: not known; `engines`:
    how many it should get, if the budget suffices.
    """

    of: Scaled
    demand: float | None
    engines: int
    limited: Limited | None


def decide(scaled: Sequence[Scaled], gpus: int | None, now: float) -> dict[str, Decision]:
    """Return what becomes of each runtime, by name.

    Args:
        scaled: all runtimes of one budget, their names all different.
        gpus: that they may hold together; None: any number.
        now: seconds since 1970.
    """
    shares = _shares(scaled)
    needs = [_need(one, shares[one.runtime]) for one in scaled]
    targets = _within(needs, gpus)
    over = gpus is not None and sum(one.replicas * one.gpus for one in scaled) > gpus
    downs = {
        need.of.runtime: _down(need, targets[need.of.runtime], math.floor(now), at_once=over)
        for need in needs
    }
    free = math.inf if gpus is None else gpus - sum(one.held * one.gpus for one in scaled)
    ups = _ups(needs, targets, free)
    return {
        need.of.runtime: _decision(
            need, targets[need.of.runtime], *downs[need.of.runtime], ups[need.of.runtime], gpus
        )
        for need in needs
    }


# -- what each runtime needs


def _known(demand: float | None) -> float | None:
    return demand if demand is not None and math.isfinite(demand) and demand >= 0 else None


def _shares(scaled: Sequence[Scaled]) -> dict[str, float | None]:
    """Return each runtime's share of its role's demand.

    Runtimes without autoscaling serve what their ready engines can; the others share the rest as
    their engines are.
    """
    groups: dict[tuple[str, Role], list[Scaled]] = {}
    for one in scaled:
        groups.setdefault((one.pool, one.role), []).append(one)
    shares: dict[str, float | None] = {}
    for group in groups.values():
        demands = [_known(one.demand) for one in group]
        fixed = sum(one.ready for one in group if one.autoscaling is None)
        weights = {one.runtime: max(one.replicas, 1) for one in group if one.autoscaling}
        for one in group:
            if one.autoscaling is None:
                shares[one.runtime] = None
                continue
            known = [demand for demand in demands if demand is not None]
            rest = max(max(known) - fixed, 0.0) if known else None
            part = weights[one.runtime] / sum(weights.values())
            shares[one.runtime] = None if rest is None else rest * part
    return shares


def _need(one: Scaled, demand: float | None) -> _Need:
    if one.autoscaling is None:
        return _Need(one, None, one.replicas, None)
    least = one.autoscaling.min_replicas
    most = one.autoscaling.max_replicas
    engines, limited = one.replicas, None
    if demand is None:
        limited = Limited(
            "DemandUnknown",
            "No proxy says how many engines the load needs: their number is not changed.",
        )
    elif (more := math.ceil(demand / (1 + TOLERANCE) - _ROUNDING)) > one.replicas:
        engines = more
    else:
        engines = min(math.ceil(demand - _ROUNDING), one.replicas)
    if demand is not None and not one.complete:
        limited = Limited(
            "ProxiesMissing",
            "Not all proxies say how many engines the load needs: no engine is taken away.",
        )
    if engines > most:
        limited = Limited(
            "MaxReplicas", f"The load needs {_engines(engines)}: maxReplicas is {most}."
        )
    bound = max(2 * one.ready, one.ready + MORE_AT_ONCE, one.replicas, least)
    if min(engines, most) > bound:
        limited = Limited(
            "ScaleUpLimit",
            f"The load needs {_engines(engines)}: no more than {bound} are asked for while "
            f"{one.ready} can serve.",
        )
    return _Need(one, demand, max(min(engines, most, bound), least), limited)


# -- the budget


def _within(needs: Sequence[_Need], gpus: int | None) -> dict[str, int]:
    """Return how many engines each runtime should have by its need and the budget."""
    wanted = {need.of.runtime: need.engines for need in needs}
    if gpus is None or sum(need.engines * need.of.gpus for need in needs) <= gpus:
        return wanted
    given = {need.of.runtime: _least(need) for need in needs}
    left = gpus - sum(given[need.of.runtime] * need.of.gpus for need in needs)
    heap = [(_part(need, given[need.of.runtime]), place) for place, need in enumerate(needs)]
    heapify(heap)
    while heap:
        _, place = heappop(heap)
        need = needs[place]
        name = need.of.runtime
        if given[name] < need.engines and need.of.gpus <= left:
            given[name] += 1
            left -= need.of.gpus
            heappush(heap, (_part(need, given[name]), place))
    return given


def _least(need: _Need) -> int:
    """Return how many engines a runtime keeps, whatever the others need."""
    if need.demand is None or need.of.autoscaling is None or not need.of.gpus:
        return need.engines
    return min(need.of.autoscaling.min_replicas, need.engines)


def _part(need: _Need, engines: int) -> float:
    """Return which part of the engines that its load needs a runtime has with so many.

    It keeps an engine where another one's need is larger by less than `TOLERANCE`.
    """
    if not need.demand:
        return math.inf
    kept = engines < need.of.replicas
    return engines / need.demand / (1 + TOLERANCE if kept else 1)


def _ups(needs: Sequence[_Need], targets: Mapping[str, int], free: float) -> dict[str, int]:
    """Return how many engines each runtime should have that gets more, as far as GPUs are free; the
    number that it should have already for the others.
    """
    given = {need.of.runtime: need.of.replicas for need in needs}
    rising = [need for need in needs if not need.of.stuck]
    heap = [(_part(need, need.of.replicas), place) for place, need in enumerate(rising)]
    heapify(heap)
    while heap:
        _, place = heappop(heap)
        need = rising[place]
        name = need.of.runtime
        if given[name] < targets[name] and (not need.of.gpus or need.of.gpus <= free):
            given[name] += 1
            free -= need.of.gpus
            heappush(heap, (_part(need, given[name]), place))
    return given


# -- down


def _down(need: _Need, target: int, now: int, *, at_once: bool) -> tuple[int, ScalingState | None]:
    """Return to how many engines a runtime goes down, and what is to be remembered.

    `at_once`: all runtimes together should have more GPUs than the budget.
    """
    one, scaling = need.of, need.of.autoscaling
    if scaling is None:
        return one.replicas, None
    before = one.state or ScalingState()
    seen, since, stepped = (
        _seconds(text) for text in (before.seen_at, before.fewer_since, before.stepped_at)
    )
    if stepped is not None:
        stepped = min(stepped, now)
    enough, wanted = before.enough, before.wanted
    certain = need.demand is not None and one.complete
    if certain:
        wanted = round(need.demand or 0.0, 2)
        if seen is None or now - seen > GAP_S:
            since = None
        if target >= one.replicas:
            since = enough = None
        elif since is None or since > now or enough is None or enough >= one.replicas:
            since, enough = now, target
        else:
            enough = max(enough, target)
        if seen is None or not 0 <= now - seen < NOTED_S:
            seen = now
    replicas = least = one.replicas
    if replicas > scaling.max_replicas or (at_once and target < replicas):
        least = target
    elif certain and since is not None and now - since >= scaling.scale_down_seconds:
        least = replicas if enough is None else enough
    if least < replicas and one.stuck:
        replicas = max(least, replicas - one.pending)
    elif least < replicas and (stepped is None or now - stepped >= PACE_S):
        replicas, stepped = replicas - 1, now
    return replicas, ScalingState(wanted, enough, _text(since), _text(seen), _text(stepped))


def _seconds(text: str | None) -> int | None:
    """Return a time in seconds since 1970; None: it is none, or none that can be read."""
    try:
        return None if text is None else math.floor(datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError):
        return None


def _text(seconds: int | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# -- together


def _decision(
    need: _Need, target: int, down: int, state: ScalingState | None, up: int, gpus: int | None
) -> Decision:
    one = need.of
    if state is None:
        return Decision(one.replicas, None)
    replicas = down if down < one.replicas else up
    limited = need.limited
    if target < need.engines:
        limited = Limited(
            "Budget",
            f"The load needs {_engines(need.engines)}: the budget of {gpus} GPUs has room for "
            f"{target}.",
        )
    if replicas < target:
        limited = Limited(
            "GpusInUse",
            f"{_engines(target - replicas)} must wait until others have ended: they hold GPUs of "
            f"the {gpus} of the budget.",
        )
    if one.stuck and target >= one.replicas:
        limited = Limited(
            "EnginesPending",
            f"{_engines(one.pending)} can't be scheduled, for {one.pending_s / 60:.0f} minutes "
            f"now: no more are asked for.",
        )
    return Decision(replicas, state, limited)


def _engines(count: int) -> str:
    return f"{count} engine{'' if count == 1 else 's'}"
