"""In which steps the engines of a pool come to a new revision. Pure, and without memory: a step
follows from how many engines there are, so that it does not matter when the operator was killed.

GPUs are rare: an engine of an old revision ends, and one of the new revision starts in its place.
pdproxy sends requests to a revision by what its engines can do together (scheduling/revisions.py):
so prefill and decode engines are replaced in proportion, and one complete pair always stays.
Engines that have never served are replaced at once: nothing is lost with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from pdproxy_operator.resources import Order, Role

ROLES: tuple[Role, ...] = ("prefill", "decode", "any", "aggregated")
_FIRST: Mapping[Order, Role] = {
    "pairs": "prefill",
    "prefillFirst": "prefill",
    "decodeFirst": "decode",
}
_HALF = Fraction(1, 2)


class Part(NamedTuple):
    """The engines of a runtime that are of one revision: a Deployment.

    `replicas`: as its spec has it. `ready`: engines that serve; of the new revision: that all
    proxies know, too. `waiting`: why the others do not serve, a clause that begins with a pod's
    name, None: nothing is known. `waiting_s`: seconds for which the one that waits longest does.
    `unstarted`: of the others, those that have not served since their containers were started.
    """

    runtime: str
    role: Role
    revision: str
    replicas: int
    ready: int
    waiting: str | None = None
    waiting_s: float = 0.0
    unstarted: int = 0


class Wanted(NamedTuple):
    """How many engines a runtime is to have."""

    runtime: str
    role: Role
    replicas: int


class Step(NamedTuple):
    """`replicas`: by runtime and revision, of all Deployments that there are or should be; write
    the lower numbers first. `reason`: why engines of the new revision do not serve yet, a clause,
    None: all do. `stuck`: they have had the time for it.
    """

    replicas: Mapping[tuple[str, str], int]
    reason: str | None
    stuck: bool


def next_step(
    parts: Sequence[Part],
    wanted: Sequence[Wanted],
    revision: str,
    order: Order,
    start_seconds: float,
) -> Step:
    """Return how many engines each Deployment of a pool is to have now.

    `parts`: those that there are; those of runtimes that are not `wanted` are left alone.
    `revision`: the one to come to. `start_seconds`: in which an engine should serve.
    """
    pool = _Pool(parts, wanted, revision)
    its = {one.runtime for one in wanted}
    new = [one for one in parts if one.revision == revision and one.runtime in its]
    waiting = [one for one in new if one.ready < one.replicas]
    longest = max(waiting, key=lambda one: one.waiting_s, default=None)
    stuck = longest is not None and longest.waiting_s >= start_seconds
    if not waiting:
        pool.end_unstarted()
    pool.shrink()
    pool.grow(with_old=stuck)
    if not waiting and not pool.starts():
        pool.replace(order)
    reason = None
    if longest is not None:
        what = longest.waiting or f"an engine of {longest.runtime} does not serve"
        reason = f"{what}, for {duration(longest.waiting_s)}"
    return Step(pool.replicas(), reason, stuck)


def duration(seconds: float) -> str:
    """Return a time in words, so coarse that a text with it seldom changes."""
    minutes = int(seconds // 60)
    if minutes < 1:
        return "less than a minute"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h"


@dataclass(slots=True)
class _Engines:
    """The engines of a runtime and a revision, as the step will leave them."""

    runtime: str
    role: Role
    revision: str
    replicas: int = 0
    ready: int = 0
    unstarted: int = 0

    @property
    def all_ready(self) -> bool:
        """Whether one that ends has served. Kubernetes ends those that are not ready first."""
        return self.ready >= self.replicas

    def end(self, count: int) -> None:
        """End some of them."""
        self.replicas -= count
        self.ready = min(self.ready, self.replicas)


class _Pool:
    """The engines of a pool while a step is made."""

    def __init__(self, parts: Sequence[Part], wanted: Sequence[Wanted], revision: str) -> None:
        self._wanted = {one.runtime: one for one in wanted}
        self._new = {one.runtime: _Engines(one.runtime, one.role, revision) for one in wanted}
        self._old: dict[str, list[_Engines]] = {one.runtime: [] for one in wanted}
        for part in parts:
            if part.runtime not in self._wanted:
                continue
            ready = min(part.ready, part.replicas)
            unstarted = min(part.unstarted, part.replicas - ready)
            engines = _Engines(*part[:3], part.replicas, ready, unstarted)
            if part.revision == revision:
                self._new[part.runtime] = engines
            else:
                self._old[part.runtime].append(engines)

    def replicas(self) -> dict[tuple[str, str], int]:
        """Return what each Deployment is to have."""
        return {(one.runtime, one.revision): one.replicas for one in self._all()}

    def starts(self) -> bool:
        """Return whether an engine of the new revision does not serve yet."""
        return any(not one.all_ready for one in self._new.values())

    # -- what is done in any case

    def end_unstarted(self) -> None:
        """End those of old revisions that have never served: others start in their place."""
        for engines in self._olds():
            engines.end(engines.unstarted)

    def shrink(self) -> None:
        """End what a runtime has too many: first those that do not serve, then old ones."""
        for runtime, wanted in self._wanted.items():
            new, old = self._new[runtime], self._old[runtime]
            if wanted.replicas and self._is_single(wanted.role):
                # The old one stays until the new one has taken over.
                self._shrink_to(1, [new])
                self._shrink_to(1, old)
            else:
                self._shrink_to(wanted.replicas, [new, *old])

    def grow(self, *, with_old: bool) -> None:
        """Start what a runtime has too few. `with_old`: of an old revision that serves, since the
        new one does not.
        """
        for runtime, wanted in self._wanted.items():
            new, old = self._new[runtime], self._old[runtime]
            grows = max(old, key=lambda one: one.ready, default=new) if with_old else new
            grows = grows if grows.ready else new
            grows.replicas += max(0, wanted.replicas - sum(one.replicas for one in [new, *old]))

    def _shrink_to(self, most: int, some: Sequence[_Engines]) -> None:
        def cost(one: _Engines) -> tuple[bool, bool, bool, int, str]:
            is_new = one is self._new[one.runtime]
            # The last new one that does not serve yet would only be started again.
            serves = one.all_ready or (is_new and one.replicas - one.ready == 1)
            return serves, not self._may_end(one), is_new, one.ready, one.revision

        for _ in range(sum(one.replicas for one in some) - most):
            min((one for one in some if one.replicas), key=cost).end(1)

    # -- one by one

    def replace(self, order: Order) -> None:
        """Replace the next engine, or the next pair. All engines of the new revision serve."""
        if self._start_beside(order):
            return
        if self._turns(order):
            self._take_turns(order)
        else:
            self._end_beside()

    def _start_beside(self, order: Order) -> bool:
        """Start a new engine beside the only one of a role. Return whether there is one."""
        alone = [
            self._new[runtime]
            for runtime, old in self._old.items()
            if any(one.replicas for one in old)
            and self._is_single(self._wanted[runtime].role)
            and not self._new[runtime].replicas
        ]
        alone.sort(key=lambda one: (one.role != _FIRST[order], ROLES.index(one.role)))
        for new in alone if order == "pairs" else alone[:1]:
            new.replicas = 1
        return bool(alone)

    def _end_beside(self) -> None:
        """End the old engines beside which new ones were started: these serve, and no other one is
        to be replaced.
        """
        for engines in self._olds():
            engines.end(engines.replicas)

    def _take_turns(self, order: Order) -> None:
        """Replace an engine of the role whose turn it is; and one of the role that comes then, if
        it is another one: engines that share prompts start at the same time.
        """
        had: list[Role] = []
        while not had or order == "pairs":
            turns = self._turns(order)
            role = next((one for one in turns if one in had or self._replace_one(one)), None)
            if role is None or role in had:
                return
            had.append(role)

    def _turns(self, order: Order) -> list[Role]:
        """Return the roles with engines to replace, in the order in which they should be: so that
        the parts of them that are new stay as near to each other as can be.
        """
        new, of = self._count(self._new.values()), self._count(self._wanted.values())
        left = {one.role for one in self._olds() if one.replicas}
        roles = [role for role in ROLES if role in left and not self._is_single(role)]
        roles.sort(key=lambda role: (new[role] + _HALF) / of[role])
        first = _FIRST[order]
        second: Role = "decode" if first == "prefill" else "prefill"
        if order != "pairs" and first in roles and second in roles:
            # It goes ahead by one engine, of those of which there are fewer.
            ahead = Fraction(new[first] + 1, of[first]) - Fraction(new[second], of[second])
            behind = ahead > Fraction(1, min(of[first], of[second]))
            pair = [second, first] if behind else [first, second]
            roles = [*pair, *(role for role in roles if role not in pair)]
        return roles

    def _replace_one(self, role: Role) -> bool:
        """Replace an engine of a role. Return whether one may end."""

        def cost(one: _Engines) -> tuple[bool, bool, int, str]:
            return one.all_ready, one.revision in self._complete(), one.ready, one.revision

        of_role = [one for one in self._wanted.values() if one.role == role and one.replicas]
        of_role.sort(key=lambda one: (self._new[one.runtime].replicas + 0.5) / one.replicas)
        for runtime, _, _ in of_role:
            may = [one for one in self._old[runtime] if one.replicas and self._may_end(one)]
            if may:
                min(may, key=cost).end(1)
                self._new[runtime].replicas += 1
                return True
        return False

    # -- what there is

    def _may_end(self, engines: _Engines) -> bool:
        """Return whether a complete pair stays without one of them, if there is one."""
        if not engines.all_ready or not self._complete():
            return True
        engines.ready -= 1
        stays = bool(self._complete())
        engines.ready += 1
        return stays

    def _complete(self) -> set[str]:
        """Return the revisions with an engine that makes KV, and one that uses it."""
        roles: dict[str, set[Role]] = {}
        for one in self._all():
            if one.ready:
                roles.setdefault(one.revision, set()).add(one.role)
        return {name for name, of in roles.items() if "any" in of or of >= {"prefill", "decode"}}

    def _is_single(self, role: Role) -> bool:
        return self._count(self._wanted.values())[role] == 1

    def _count(self, some: Iterable[_Engines | Wanted]) -> Counter[Role]:
        count: Counter[Role] = Counter()
        for one in some:
            count[one.role] += one.replicas
        return count

    def _all(self) -> Iterator[_Engines]:
        yield from self._new.values()
        yield from self._olds()

    def _olds(self) -> Iterator[_Engines]:
        for some in self._old.values():
            yield from some
