"""Engines come to a new revision without the loss of the last complete pair, whatever happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy_operator.resources import Order, Role
from pdproxy_operator.rollout import Part, Step, Wanted, next_step

TICK = 60.0
START = 20 * TICK
ORDERS: tuple[Order, ...] = ("pairs", "prefillFirst", "decodeFirst")
Key = tuple[str, str]


# -- a small model of a cluster


@dataclass(eq=False)
class Engine:
    """A pod. `left`: ticks until it is ready, None: it never is. `waits`: ticks for which it has
    not been ready. `hangs`: it has served, and does not answer now.
    """

    of: Key
    left: int | None
    placed: bool = False
    waits: int = 0
    hangs: bool = False

    @property
    def ready(self) -> bool:
        return self.placed and self.left == 0 and not self.hangs


@dataclass
class Cluster:
    """Deployments, and GPUs that their engines take. `loads`: ticks in which engines of a revision
    become ready at most, None: they never do.
    """

    rng: Random
    gpus: int
    wanted: dict[str, Wanted]
    revision: str = "r0"
    order: Order = "pairs"
    loads: dict[str, int | None] = field(default_factory=lambda: {"r0": 2})
    deployments: dict[Key, int] = field(default_factory=dict)
    engines: list[Engine] = field(default_factory=list)
    ending: list[int] = field(default_factory=list)

    def parts(self) -> list[Part]:
        found = []
        for key, replicas in self.deployments.items():
            some = [one for one in self.engines if one.of == key]
            others = [one for one in some if not one.ready]
            found.append(
                Part(
                    key[0],
                    self.wanted[key[0]].role,
                    key[1],
                    replicas,
                    len(some) - len(others),
                    f"{key[0]} loads" if others else None,
                    max((one.waits * TICK for one in others), default=0.0),
                    sum(not one.hangs for one in others),
                )
            )
        return found

    def step(self) -> Step:
        return next_step(self.parts(), list(self.wanted.values()), self.revision, self.order, START)

    def write(self, replicas: Mapping[Key, int], *, most: int | None = None) -> None:
        """Write numbers, the lower ones first. `most`: the operator is killed after so many."""
        changes = [(n - self.deployments.get(key, 0), key) for key, n in replicas.items()]
        for _, key in sorted(one for one in changes if one[0])[:most]:
            self.deployments[key] = replicas[key]
        self.deployments = {
            key: n for key, n in self.deployments.items() if n or key[1] == self.revision
        }
        self.control()

    def control(self) -> None:
        """Do what the controllers of Deployments do."""
        for key in sorted({one.of for one in self.engines} | set(self.deployments)):
            some = [one for one in self.engines if one.of == key]
            some.sort(key=lambda one: (one.placed, one.ready))
            for one in some[: max(0, len(some) - self.deployments.get(key, 0))]:
                self.engines.remove(one)
                if one.placed:
                    self.ending.append(self.rng.randint(0, 3))
            for _ in range(self.deployments.get(key, 0) - len(some)):
                most = self.loads[key[1]]
                left = None if most is None else self.rng.randint(1, most)
                self.engines.append(Engine(key, left))

    def tick(self) -> None:
        """Let a minute pass."""
        self.ending = [left - 1 for left in self.ending if left > 0]
        free = self.gpus - len(self.ending) - sum(one.placed for one in self.engines)
        for one in self.engines:
            if not one.placed and free > 0:
                one.placed, free = True, free - 1
            elif one.placed and one.left:
                one.left -= 1
            one.waits = 0 if one.ready else one.waits + 1

    def crash(self, at: int, *, hangs: bool) -> None:
        """An engine that serves starts again, or does not answer any more."""
        ready = [one for one in self.engines if one.ready]
        if ready:
            one = ready[at % len(ready)]
            one.left, one.hangs = (0, True) if hangs else (2, False)

    def heal(self) -> None:
        for one in self.engines:
            one.hangs = False

    def done(self) -> bool:
        """Whether there are only engines that should be, and all serve."""
        should = {(name, self.revision): one.replicas for name, one in self.wanted.items()}
        return all(one.ready for one in self.engines) and Counter(should) == Counter(
            one.of for one in self.engines
        )

    def remove(self, runtime: str) -> None:
        """Kubernetes deletes what a runtime owns."""
        del self.wanted[runtime]
        self.deployments = {key: n for key, n in self.deployments.items() if key[0] != runtime}
        self.control()

    def needs(self) -> int:
        """Return how many GPUs a rollout may need at a time."""
        count = by_role(self.wanted.values())
        return sum(count.values()) + sum(n == 1 for n in count.values())


# -- what must hold


def by_role(some: Iterable[Wanted]) -> Counter[Role]:
    count: Counter[Role] = Counter()
    for one in some:
        count[one.role] += one.replicas
    return count


def complete(ready: Mapping[tuple[str, Role], int]) -> bool:
    """Whether any revision has a complete pair. `ready`: engines by revision and role."""
    return any(
        n and (role == "any" or (role == "prefill" and ready.get((revision, "decode"), 0)))
        for (revision, role), n in ready.items()
    )


def gap(replicas: Mapping[Key, int], wanted: Mapping[str, Wanted], revision: str) -> float:
    """By how much the new parts of prefill and decode engines differ."""
    new: Counter[Role] = Counter()
    for (runtime, of), n in replicas.items():
        if of == revision:
            new[wanted[runtime].role] += n
    count = by_role(wanted.values())
    if not count["prefill"] or not count["decode"]:
        return 0.0
    return abs(new["prefill"] / count["prefill"] - new["decode"] / count["decode"])


def check(cluster: Cluster, parts: Sequence[Part], step: Step) -> None:
    wanted, revision = cluster.wanted, cluster.revision
    count = by_role(wanted.values())
    before = {(part.runtime, part.revision): part.replicas for part in parts}
    assert step.replicas.keys() == before.keys() | {(name, revision) for name in wanted}
    assert all(n >= 0 for n in step.replicas.values())

    waits = any(part.revision == revision and part.ready < part.replicas for part in parts)
    ready: Counter[tuple[str, Role]] = Counter()
    stay: Counter[tuple[str, Role]] = Counter()
    replaced: Counter[Role] = Counter()
    for name, (_, role, replicas) in wanted.items():
        mine = [part for part in parts if part.runtime == name]
        new = step.replicas[name, revision]
        total = sum(n for key, n in step.replicas.items() if key[0] == name)
        if replicas and count[role] == 1:
            assert max(new, total - new) <= 1, "more than one engine beside another"
        else:
            assert total == replicas, "more engines than there are to be, or fewer"
        lost = 0
        for part in mine:
            left = min(part.ready, step.replicas[name, part.revision])
            lost += part.ready - left
            ready[part.revision, role] += part.ready
            stay[part.revision, role] += left
        excess = max(0, sum(part.replicas for part in mine) - replicas)
        if waits:
            assert lost <= excess, "an engine was ended while a new one does not serve"
        replaced[role] += max(0, lost - excess)
    assert max(replaced.values(), default=0) <= 1, "more than one of a role"
    if complete(ready) and all(one.replicas for one in wanted.values()):
        assert complete(stay), "the last complete pair was ended"
    if any(replaced.values()):
        worth = max((1 / count[role] for role in ("prefill", "decode") if count[role]), default=1)
        most = max(worth, gap(before, wanted, revision))
        assert gap(step.replicas, wanted, revision) <= most + 1e-9, "not in proportion"

    assert (step.reason is not None) == waits
    assert not step.stuck or waits
    if not waits and step.replicas == before:
        assert all(n == 0 or of == revision for (_, of), n in before.items()), "it ends too early"

    after = []
    for part in parts:
        replicas = step.replicas[part.runtime, part.revision]
        serve = min(part.ready, replicas)
        after.append(
            part._replace(
                replicas=replicas, ready=serve, unstarted=min(part.unstarted, replicas - serve)
            )
        )
    after += [
        Part(name, wanted[name].role, revision, step.replicas[name, revision], 0)
        for name in wanted
        if (name, revision) not in before
    ]
    if all(part.ready == part.replicas for part in after if part.revision == revision):
        return  # it goes on
    again = next_step(after, list(wanted.values()), revision, cluster.order, START)
    assert again.replicas == step.replicas, "the same look leads to another step"


def run(cluster: Cluster, ticks: int, *, to_end: bool = False) -> bool:
    """Let time pass; `to_end`: until all is done. Return whether it is."""
    for _ in range(ticks):
        parts, step = cluster.parts(), cluster.step()
        check(cluster, parts, step)
        killed = cluster.rng.random() < 0.2
        cluster.write(step.replicas, most=cluster.rng.randint(0, 2) if killed else None)
        cluster.tick()
        if to_end and cluster.done():
            return True
    return cluster.done()


RUNTIMES: dict[str, Role] = {
    "p": "prefill",
    "q": "prefill",
    "d": "decode",
    "e": "decode",
    "both": "any",
    "some": "any",
    "whole": "aggregated",
}
CHANGES = st.tuples(
    st.sampled_from(["revision", "replicas", "remove", "crash", "hang", "wait"]),
    st.sampled_from([*RUNTIMES]),
    st.integers(0, 5),
)
"""What happens, to which runtime, and a number."""


@given(
    st.integers(0, 10_000),
    st.sampled_from(ORDERS),
    st.dictionaries(st.sampled_from([*RUNTIMES]), st.integers(0, 5), min_size=1),
    st.lists(st.sampled_from([2, 4, 15, None]), min_size=6, max_size=6),
    st.integers(-4, 3),
    st.lists(CHANGES, max_size=12),
)
def test_whatever_happens_a_pair_stays_and_it_ends(
    seed: int,
    order: Order,
    replicas: dict[str, int],
    loads: list[int | None],
    spare: int,
    changes: list[tuple[str, str, int]],
) -> None:
    """Specs change, engines crash, hang or never serve, GPUs are rare, the operator is killed."""
    rng = Random(seed)
    wanted = {name: Wanted(name, RUNTIMES[name], n) for name, n in replicas.items()}
    cluster = Cluster(rng, 0, wanted, order=order)
    cluster.loads |= {f"r{at}": load for at, load in enumerate(loads)} | {"last": 3}
    cluster.gpus = cluster.needs() + spare
    run(cluster, 6)
    for change, name, n in changes:
        match change:
            case "revision":
                cluster.revision = f"r{n}"
            case "replicas":
                cluster.wanted[name] = Wanted(name, RUNTIMES[name], n)
            case "remove" if name in cluster.wanted:
                cluster.remove(name)
            case "crash" | "hang":
                cluster.crash(n, hangs=change == "hang")
            case "wait":
                run(cluster, 8 * n)
        run(cluster, rng.randint(1, 4))
    cluster.revision, cluster.gpus = "last", max(cluster.gpus, cluster.needs())
    cluster.heal()
    assert run(cluster, 400, to_end=True), "a rollout does not end"


# -- single steps


def parts_in(text: str) -> list[Part]:
    """The parts in a text such as `p:old=2 p:new=1/2`: of 2 new engines, one serves. `2/3!`: the
    third has never served.
    """
    found = []
    for word in text.split():
        key, _, count = word.partition("=")
        runtime, _, revision = key.partition(":")
        ready, _, replicas = count.rstrip("!").partition("/")
        total = int(replicas or ready)
        unstarted = total - int(ready) if count.endswith("!") else 0
        role = RUNTIMES[runtime]
        waits = f"{runtime} loads" if total > int(ready) else None
        found.append(Part(runtime, role, revision, total, int(ready), waits, 90.0, unstarted))
    return found


STEPS = {
    "the first engines start at once": ("p=2 d=3", "", "p:new=2 d:new=3"),
    "a pair is replaced at a time": (
        "p=4 d=4",
        "p:old=4 d:old=4",
        "p:old=3 p:new=1 d:old=3 d:new=1",
    ),
    "in proportion": (
        *("p=8 d=2", "p:old=6 p:new=2 d:old=2"),
        "p:old=5 p:new=3 d:old=1 d:new=1",
    ),
    "nothing ends while a new one loads": (
        *("p=4 d=4", "p:old=3 p:new=0/1 d:old=3/4!"),
        "p:old=3 p:new=1 d:old=4 d:new=0",
    ),
    "the only one of a role gets another one beside it": (
        *("p=2 d=1", "p:old=2 d:old=1"),
        "p:old=2 p:new=0 d:old=1 d:new=1",
    ),
    "which stays until all are replaced": (
        *("p=2 d=1", "p:old=2 d:old=1 d:new=1"),
        "p:old=1 p:new=1 d:old=1 d:new=1",
    ),
    "and ends last": ("p=2 d=1", "p:new=2 d:old=1 d:new=1", "p:new=2 d:old=0 d:new=1"),
    "what has never served is replaced at once": (
        *("p=3 d=3", "p:old=0/3! d:old=1/3!"),
        "p:old=0 p:new=3 d:old=1 d:new=2",
    ),
    "what hangs is replaced first": (
        *("p=2 d=2", "p:old=1/2 d:a=1 d:b=0/1"),
        "p:old=1 p:new=1 d:a=1 d:b=0 d:new=1",
    ),
    "the last pair stays, in whichever runtime": (
        *("p=2 d=1 e=1", "p:old=1 p:new=1 d:old=1 e:other=1"),
        "p:old=1 p:new=1 d:old=1 d:new=0 e:other=0 e:new=1",
    ),
    "an engine of role any is a pair": (
        *("both=1 some=1", "both:old=1 some:old=0/1"),
        "both:old=1 both:new=0 some:old=0 some:new=1",
    ),
    "the runtime with the fewest new ones comes next": (
        *("p=2 q=2", "p:old=1 p:new=1 q:old=2"),
        "p:old=1 p:new=1 q:old=1 q:new=1",
    ),
    "more engines are new ones": (
        *("p=4 d=2", "p:old=1 p:new=1 d:old=1 d:new=1"),
        "p:old=1 p:new=3 d:old=1 d:new=1",
    ),
    "fewer engines are old ones": (
        *("p=3 d=2", "p:old=2 p:new=0/2 d:old=2"),
        "p:old=2 p:new=1 d:old=2 d:new=0",
    ),
    "but for the last pair": (
        *("p=2 d=4", "p:old=2 p:new=2 d:old=4"),
        "p:old=1 p:new=1 d:old=3 d:new=1",
    ),
    "and the only one that loads goes on": (
        *("p=2 d=2", "p:old=2 p:new=0/1 d:old=2"),
        "p:old=1 p:new=1 d:old=2 d:new=0",
    ),
    "with as many as there is room for, it goes on": (
        *("p=6 d=2", "p:old=6 p:new=0/2 d:old=2"),
        "p:old=5 p:new=1 d:old=2 d:new=0",
    ),
    "what is no runtime of the pool any more is left alone": (
        *("p=2 d=2", "p:old=2 d:old=2 q:new=0/1"),
        "p:old=1 p:new=1 d:old=1 d:new=1",
    ),
    "a former revision comes back the same way": (
        *("p=4 d=4", "p:new=3 p:typo=0/1! d:new=4"),
        "p:new=4 p:typo=0 d:new=4",
    ),
}


@pytest.mark.parametrize(("wanted", "before", "after"), STEPS.values(), ids=[*STEPS])
def test_a_step(wanted: str, before: str, after: str) -> None:
    pairs = [word.split("=") for word in wanted.split()]
    some = [Wanted(name, RUNTIMES[name], int(n)) for name, n in pairs]
    step = next_step(parts_in(before), some, "new", "pairs", START)
    assert step.replicas == {part[0::2][:2]: part.replicas for part in parts_in(after)}


@pytest.mark.parametrize(
    ("order", "after"),
    [
        ("pairs", "p:old=7 p:new=1 d:old=2 d:new=0"),
        ("prefillFirst", "p:old=7 p:new=1 d:old=2 d:new=0"),
        ("decodeFirst", "p:old=8 p:new=0 d:old=1 d:new=1"),
    ],
)
def test_the_order_says_which_role_goes_ahead(order: Order, after: str) -> None:
    wanted = [Wanted("p", "prefill", 8), Wanted("d", "decode", 2)]
    step = next_step(parts_in("p:old=8 d:old=2"), wanted, "new", order, START)
    assert step.replicas == {part[0::2][:2]: part.replicas for part in parts_in(after)}


def test_prefill_goes_ahead_by_one_decode_engine() -> None:
    wanted = [Wanted("p", "prefill", 8), Wanted("d", "decode", 2)]
    for new, roles in ((3, "p"), (4, "d")):
        before = parts_in(f"p:old={8 - new} p:new={new} d:old=2")
        step = next_step(before, wanted, "new", "prefillFirst", START)
        assert [name for (name, of), n in step.replicas.items() if of == "new" and n] == [
            *dict.fromkeys(["p", roles])
        ]


def test_what_waits_is_said_and_what_is_stuck() -> None:
    """And while new engines do not serve, more engines are of a revision that does."""
    wanted = [Wanted("p", "prefill", 4), Wanted("d", "decode", 2)]
    before = parts_in("p:old=1 p:new=0/1 d:old=2")
    step = next_step(before, wanted, "new", "pairs", START)
    assert (step.reason, step.stuck) == ("p loads, for 1 min", False)
    assert step.replicas["p", "new"] == 3
    late = [part._replace(waiting_s=START) for part in before]
    step = next_step(late, wanted, "new", "pairs", START)
    assert (step.reason, step.stuck) == ("p loads, for 20 min", True)
    assert (step.replicas["p", "old"], step.replicas["p", "new"]) == (3, 1)
    late[1] = late[1]._replace(waiting=None, waiting_s=3 * 3600 + 59)
    assert next_step(late, wanted, "new", "pairs", START).reason == (
        "an engine of p does not serve, for 3 h"
    )
