"""Revisions of engines: which of them get requests, and what part of these."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, pairwise
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdproxy.deciding.local_scheduler import LocalScheduler
from pdproxy.observe.events import Observers
from pdproxy.scheduling.leases import Assignment, Lease, Verdict
from pdproxy.scheduling.ledger import ALONE, Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import REVISION, EngineSpec, Evidence, LedgerEngine, Role
from pdproxy.scheduling.outliers import Outliers
from pdproxy.scheduling.placements import PlacementContext
from pdproxy.scheduling.policies import POLICIES
from pdproxy.scheduling.policy import Ask, Cached
from pdproxy.scheduling.revisions import LEAD, shares_of
from pdproxy.settings.health import OutlierSettings
from tests.auto.fleets import auto
from tests.fakes.placement import Scripted, late

SPLIT = (Role.PREFILL, Role.DECODE)
ROLES = {
    "p": Role.PREFILL,
    "d": Role.DECODE,
    "a": Role.AGGREGATED,
    "x": Role.ANY,
    "e": Role.ENCODE,
}
A, B = "p1@A p2@A d1@A d2@A d3@A d4@A d5@A d6@A", "p7@B d7@B"
PART_OF_B = (1 / 7) / (1 / 7 + 2 / 3)
EVIDENCE = Evidence(frozenset({"m"}), "1", 16, ((1, 2),), 5, 1.0)


def fleet(text: str, label: str = REVISION, **more: object) -> list[EngineSpec]:
    """Engines, such as `p1@A`: the role, and behind the sign the value of a label."""
    found = []
    for name in text.split():
        value = name.partition("@")[2]
        within = ((label, value),) if value else ()
        found.append(EngineSpec(name, ROLES[name[0]], within=within, **more))  # type: ignore[arg-type]
    return found


def made(
    specs: Sequence[EngineSpec],
    name: str = "least_load",
    cached: Cached | None = None,
    alone: Sequence[Role] = ALONE,
) -> Ledger:
    """A ledger of engines that are up. `name`: of a policy, or auto."""
    is_auto = name == "auto"
    ledger = Ledger(
        specs,
        LedgerOptions(
            breaker_failures=1,
            breaker_cooldown=10,
            policies={} if is_auto else dict.fromkeys(SPLIT, POLICIES[name]),
            placement=auto(cached=cached) if is_auto else None,
            cached=cached,
            chance=Random(1).random,
            alone=alone,
        ),
    )
    for spec in specs:
        ledger.mark_up(spec.url, EVIDENCE)
    return ledger


def choose(ledger: Ledger, ask: Ask, *, split: bool = True, **more: object) -> Assignment | None:
    """Choose engines as `LocalScheduler` does, first two that share the work."""
    if ledger.placement is not None:
        return ledger.place(ask, split=split, **more)  # type: ignore[arg-type]
    found = ledger.assign(SPLIT, ask, **more) if split else None  # type: ignore[arg-type]
    if found is None and (lease := ledger.assign_alone(ask)) is not None:
        found = Assignment((lease,))
    return found


def urls(assignment: Assignment | None) -> list[str]:
    return [] if assignment is None else [lease.engine.url for lease in assignment.leases]


def served(
    ledger: Ledger, asks: Iterator[Ask], requests: int, *, split: Callable[[int], bool]
) -> list[list[str]]:
    """The engines of each request. So many requests are open as there are engines."""
    opened: deque[tuple[Lease, ...]] = deque()
    found = []
    for number, ask in zip(range(requests), asks, strict=False):
        assignment = choose(ledger, ask, split=split(number))
        assert assignment is not None
        found.append(urls(assignment))
        opened.append(assignment.leases)
        if len(opened) > len(ledger.engines):
            for lease in opened.popleft():
                ledger.began(lease, ask.now)
                ledger.close(lease, Verdict.GOOD, ask.now, 100)
    return found


class Conversations:
    """Requests of conversations, and a cache of prefixes that has the whole of the last one."""

    def __init__(self, *, named: bool) -> None:
        self.named = named
        self.held: dict[int, dict[str, int]] = {}

    def asks(self) -> Iterator[Ask]:
        chance = Random(1)
        for number in count():
            key = chance.randrange(400)
            session = f"conversation {key}" if self.named else None
            yield Ask("m", 4000, number * 0.01, 1000, keys=(key,), session=session)

    def cached(self, ask: Ask) -> Mapping[str, int]:
        return self.held.get(ask.keys[0], {})

    def note(self, ask: Ask, engines: Sequence[str]) -> None:
        self.held[ask.keys[0]] = dict.fromkeys(engines, 900)


# -- the part of the requests


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", ["least_load", "session", "prefix", "auto", "power_of_two"])
def test_revisions_get_their_part_and_are_never_mixed(name: str, *, named: bool) -> None:
    """By what each can do, and never a pair of both. A conversation stays in its revision, as far
    as the parts allow.
    """
    talks = Conversations(named=named)
    knows = name in ("prefix", "auto")
    ledger = made(fleet(f"{A} {B}"), name, talks.cached if knows else None)
    of_b = stayed = total = 0
    last: dict[int, str] = {}
    opened: deque[tuple[Lease, ...]] = deque()
    for number, ask in zip(range(10_000), talks.asks(), strict=False):
        assignment = choose(ledger, ask, split=number % 4 != 0)
        (revision,) = {url[-1] for url in urls(assignment)}
        assert assignment is not None
        of_b += revision == "B"
        if (before := last.get(ask.keys[0])) is not None:
            stayed, total = stayed + (before == revision), total + 1
        last[ask.keys[0]] = revision
        talks.note(ask, urls(assignment))
        opened.append(assignment.leases)
        if len(opened) > 16:
            for lease in opened.popleft():
                ledger.began(lease, ask.now)
                ledger.close(lease, Verdict.GOOD, ask.now, 100)
    assert abs(of_b / 10_000 - PART_OF_B) < 0.03
    assert stayed / total > 0.9 if named or knows else stayed / total < 0.8


def test_requests_of_a_revision_are_spread_over_the_others() -> None:
    """No run of requests in a row for the smaller one, and no long time without any."""
    ledger = made(fleet(f"{A} {B}"))
    asks = (Ask("m", 100, 0.0) for _ in count())
    turns = [
        at
        for at, one in enumerate(served(ledger, asks, 1000, split=lambda _: True))
        if one[0][-1] == "B"
    ]
    gaps = {later - at for at, later in pairwise(turns)}
    assert gaps == {5, 6}


def test_turns_go_on_where_engines_change() -> None:
    """A fleet whose engines change between any two requests gives the smaller one its part, too."""
    ledger = made(fleet(f"{A} {B}"))
    found: Counter[str] = Counter()
    for number in range(1000):
        ledger.mark_kv("d6@A", None, f"mode {number % 2}")
        found.update(url[-1] for url in urls(choose(ledger, Ask("m", 100, 0.0)))[:1])
    assert abs(found["B"] / 1000 - PART_OF_B) < 0.03


def test_a_conversation_does_not_keep_all_requests_in_one_revision() -> None:
    """One that has all the requests is spread as others are, once its revision is ahead."""
    ledger = made(fleet(f"{A} {B}"), "session")
    asks = (Ask("m", 100, 0.0, session="only one") for _ in count())
    found = Counter(one[0][-1] for one in served(ledger, asks, 2000, split=lambda _: True))
    assert abs(found["B"] - 2000 * PART_OF_B) <= LEAD + 1


@pytest.mark.parametrize(
    ("work", "parts"),
    [
        ([[(1, 0)] * 2 + [(0, 1)] * 6, [(1, 0), (0, 1)]], [1 - PART_OF_B, PART_OF_B]),
        ([[(0.5, 0.5)] * 4, [(1, 0), (0, 1)]], [2 / 3, 1 / 3]),
        ([[(0, 1)] * 3, [(0, 1)]], [0.75, 0.25]),
        ([[(1, 0), (0, 1)], [(1, 0)]], [1, 0]),
        ([[(0, 1)], [(1, 0)]], [0, 0]),
        ([], []),
    ],
)
def test_parts(work: list[list[tuple[float, float]]], parts: list[float]) -> None:
    assert shares_of(work) == pytest.approx(parts)


# -- complete revisions


@pytest.mark.parametrize("name", ["least_load", "auto"])
@pytest.mark.parametrize(
    ("engines", "complete", "said"),
    [
        (f"{A} d7@B", "A", ["revision B gets", "it has no prefill"]),
        (f"{A} p7@B", "A", ["revision B gets", "it has no decode"]),
        (f"{A} {B}", "AB", []),
        (f"{A} d7", "A", ["engines without a revision get", "they have no prefill"]),
        (f"{A} p7 d7", "A7", []),
        # engines for all roles
        ("x1@A x2@A x3@B", "AB", []),
        ("a1@A a2@A a3@B", "AB", []),
        ("p1@A d1@A a2@B", "AB", []),
        ("p1@A d1@A a1@A d2@B", "A", ["revision B gets", "it has no prefill"]),
        # nobody prefills for others
        ("d1@A d2@A d3@B", "AB", []),
        ("d1@A a2@B", "AB", []),
        # nobody is complete: as without revisions
        ("p1@A d2@B", "B", []),
        ("p1@A d2@B d3@C", "BC", []),
        # encoders
        ("e1@A p1@A d1@A p2@B d2@B", "A", ["revision B gets", "it has no encoder"]),
        ("e1 p1@A d1@A p2@B d2@B", "AB", []),
        ("e1@A e2@B p1@A d1@A p2@B d2@B", "AB", []),
        ("e1@B p1@A d1@A", "A", []),
    ],
)  # fmt: skip
def test_only_complete_revisions_get_requests(
    name: str, engines: str, complete: str, said: list[str]
) -> None:
    """Neither prompts that are split nor others."""
    ledger = made(fleet(engines), name)
    asks = (Ask("m", 16_000, number * 0.05, 4000) for number in count())
    found = served(ledger, asks, 200, split=lambda number: number % 3 > 0)
    assert {url[-1] for one in found for url in one} == set(complete)
    assert all(len({url.partition("@")[2] for url in one}) == 1 for one in found)
    whole = [f"{said[0]} no requests: {said[1]} engine that is up"] if said else []
    told = ledger.shortcomings(0.0)
    assert [text for text in told if "requests" in text] == whole
    assert not said or not [text for text in told if "shares work" in text]


def test_a_revision_waits_until_it_is_complete_and_once_it_is_not_again() -> None:
    ledger = made(fleet("p1@A d1@A p2@B d2@B"))
    assert ledger.revisions.shares() == {"A": 0.5, "B": 0.5}

    def names(requests: int = 20) -> set[str]:
        asks = (Ask("m", 100, 50.0) for _ in count())
        found = served(ledger, asks, requests, split=lambda number: number % 2 > 0)
        return {url[-1] for one in found for url in one}

    ledger.mark_draining("p2@B", "an operator")
    assert names() == {"A"}
    assert ledger.revisions.shares() == {"A": 1.0, "B": 0.0}
    ledger.mark_draining("p2@B", None)
    assert names() == {"A", "B"}
    ledger.mark_down("d1@A", "gone", 0.0)
    assert names() == {"B"}
    ledger.mark_down("p2@B", "gone", 0.0)
    assert names() == {"B"}, "no revision is complete: the decode engine that is left serves whole"
    assert ledger.revisions.waiting() == {}
    assert len(ledger.revisions.shortcomings()) == 1
    ledger.mark_down("p1@A", "gone", 0.0)
    assert ledger.revisions.shortcomings() == [], "that no prefill engine is up is said elsewhere"


@pytest.mark.parametrize(
    ("engines", "why"),
    [
        ("p1@A p2@A d1@B d2@B", "2 revisions is complete: revision A has no decode"),
        ("p1 d1@A p2@B d2@C", "4 revisions is complete: engines without a revision have no decode"),
        ("x1@A d1@B", None),
    ],
)
def test_a_label_that_makes_no_revision_complete_is_named(engines: str, why: str | None) -> None:
    """With another value for each role, or for each pod, it would have no prompt split."""
    text = f"no prompt is split, since none of {why} engine that is up"
    told = made(fleet(engines)).shortcomings(0.0)
    assert [one for one in told if "complete" in one] == ([text] if why else [])


def test_a_revision_is_complete_for_each_model_of_its_own() -> None:
    """A new revision has a model more, and not both of its engines serve the old one yet."""
    specs = fleet("p1@A d1@A p2@B d2@B")
    ledger = made(specs)
    for url, models in (("p2@B", {"new"}), ("d2@B", {"m", "new"})):
        ledger.mark_up(url, replace(EVIDENCE, models=frozenset(models)))
    for model, revision in (("m", "A"), ("new", "B")):
        for split in (True, False):
            found = {
                url[-1]
                for _ in range(20)
                for url in urls(choose(ledger, Ask(model, 9, 0.0), split=split))
            }
            assert found == {revision}
    assert ledger.revisions.waiting() == {
        "B": "revision B gets no requests for m: it has no prefill engine that is up"
    }


def test_without_revisions_nothing_is_prepared() -> None:
    """Racks are no revisions, and one revision alone is none to choose."""
    assert not made(fleet("p1@A d1@A p2@B d2@B", "rack")).revisions.several
    ledger = made(fleet("p1@A d1@A e1@B"))
    assert not ledger.revisions.several
    assert ledger.revisions.shares() == {}


# -- engines that should get none


@pytest.mark.parametrize("name", ["least_load", "auto"])
def test_a_revision_whose_breaker_is_open_gets_nothing(name: str) -> None:
    """And its part is that of the engines that are left."""
    ledger = made(fleet(f"{A} {B}"), name)
    ledger.exclude("d7@B", "slow", 100.0, 0.0)
    asks = (Ask("m", 16_000, number * 0.01, 4000) for number in count())
    found = served(ledger, asks, 300, split=lambda number: number % 3 > 0)
    assert {url[-1] for one in found for url in one} == {"A"}
    for number in range(1, 6):
        ledger.exclude(f"d{number}@A", "slow", 100.0, 0.0)
    ledger.breakers.reset(ledger._engines["d7@B"])
    asks = (Ask("m", 16_000, 5 + number * 0.01, 4000) for number in count())
    found = served(ledger, asks, 600, split=lambda _: True)
    part = sum(one[0][-1] == "B" for one in found) / 600
    assert part == pytest.approx(0.4, abs=0.03), "1 of 3 and 1 of 2, beside 2 of 3 and 1 of 2"


@pytest.mark.parametrize("name", ["least_load", "auto"])
def test_any_pair_is_better_than_none(name: str) -> None:
    """Of each revision the breaker of one engine is open, and of each role that of one: the rest
    is no pair.
    """
    ledger = made(fleet("p1@A d1@A p2@B d2@B"), name, alone=(Role.AGGREGATED,))
    ledger.exclude("p1@A", "slow", 100.0, 0.0)
    ledger.exclude("d2@B", "slow", 100.0, 0.0)
    found = urls(choose(ledger, Ask("m", 16_000, 1.0, 4000)))
    assert found in (["p1@A", "d1@A"], ["p2@B", "d2@B"])


def test_a_complete_revision_whose_prefill_engines_are_out_of_use_serves_whole() -> None:
    """It has an aggregated engine. The other revision is not complete."""
    ledger = made(fleet("a1@A p1@A d1@A d2@B"), "auto")
    ledger.exclude("p1@A", "slow", 1000.0, 0.0)
    asks = (Ask("m", 16_000, number * 0.01, 4000) for number in count())
    found = served(ledger, asks, 100, split=lambda _: True)
    assert {url for one in found for url in one} <= {"a1@A", "d1@A"}


def test_what_a_placement_refuses_in_time_goes_to_no_incomplete_revision() -> None:
    placement = Scripted(PlacementContext())
    placement.usual = late
    specs = fleet("p1@A d1@A d2@B")
    options = LedgerOptions(breaker_failures=1, breaker_cooldown=10, placement=placement)
    ledger = Ledger(specs, options)
    for spec in specs:
        ledger.mark_up(spec.url, EVIDENCE)
    assert ledger.place(Ask("m", 9, 0.0), split=True) is None
    assert {n.url for one in placement.candidates for n in one.engines} == {"p1@A", "d1@A"}
    assert ledger.is_placeable(Ask("m", 9, 0.0), split=True)


def test_a_revision_that_starts_slowly_is_not_owed_what_it_could_not_take() -> None:
    ledger = made(fleet(f"{A} {B}"))
    ledger.breakers.configure(1, 10, 30.0)
    for url in ("p7@B", "d7@B"):
        ledger.breakers.warm_up(ledger._engines[url], 0.0)
    for number in range(300):
        choose(ledger, Ask("m", 100, number * 0.01))
    requests = ledger._engines["d7@B"].requests
    assert requests == 2, "the places of a slow start"
    ledger.breakers.reset(ledger._engines["p7@B"])
    ledger.breakers.reset(ledger._engines["d7@B"])
    for number in range(20):
        choose(ledger, Ask("m", 100, 40.0 + number))
    assert ledger._engines["d7@B"].requests - requests <= 5


@pytest.mark.parametrize("name", ["least_load", "auto"])
def test_a_second_attempt_stays_in_the_revision_until_nothing_is_left_there(name: str) -> None:
    ledger = made(fleet("p1@A d1@A d2@A p3@B d3@B d4@B"), name)
    for failed in ("d1@A", "d3@B"):
        second = urls(choose(ledger, Ask("m", 16_000, 1.0, 4000), without=[failed]))
        assert {url[-1] for url in second} == {failed[-1]}
        both = [url for url in ("d1@A", "d2@A", "d3@B", "d4@B") if url[-1] == failed[-1]]
        third = urls(choose(ledger, Ask("m", 16_000, 1.0, 4000), without=both))
        assert {url[-1] for url in third} == {"B" if failed[-1] == "A" else "A"}


@pytest.mark.parametrize("name", ["least_load", "auto"])
async def test_a_conversation_goes_to_the_revision_that_keeps_its_kv(name: str) -> None:
    """As far as that is not too far ahead of the others."""
    ledger = made(fleet("p1@A d1@A p2@B d2@B"), name)
    kept = SimpleNamespace(keeper=lambda key: {b"turn": "d2@B"}.get(key))
    turns = SimpleNamespace(kept=kept, find=lambda key, engine: None)
    scheduler = LocalScheduler(
        ledger,
        Outliers(OutlierSettings()),
        cast("Any", SimpleNamespace(bounded=False)),
        cast("Any", None),
        Observers([]),
        lambda: 1.0,
        None,
        None,
        cast("Any", turns),
    )
    found = [
        urls(await scheduler.choose("r", Ask("m", 16_000, n * 1.0, 4000), turn=b"turn"))[0][-1]
        for n in range(3 * LEAD)
    ]
    first = 2 * LEAD - 2
    assert set(found[:first]) == {"B"}
    assert 0 < found[first:].count("A") < LEAD


def test_engines_that_encode_are_of_the_revision_that_uses_it() -> None:
    """Unless there are none: then any is better than none."""
    ledger = made(fleet("e1@A e2@B e3 p1@A d1@A p2@B d2@B d3"))
    assert ledger.other_encoders("p1@A") == ["e2@B"]
    assert ledger.other_encoders("p2@B") == ["e1@A"]
    assert ledger.other_encoders("d3") == ledger.other_encoders("unknown") == []
    ledger.mark_down("e2@B", "gone", 0.0)
    ledger.mark_down("e3", "gone", 0.0)
    assert ledger.other_encoders("p2@B") == []


# -- never refused for it


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[tuple[str, str]], dict[str, str], set[str]]:
    """Engines with their label, what is wrong with some, and which are excluded."""
    sizes = draw(
        st.lists(
            st.tuples(st.sampled_from("pdax"), st.sampled_from(["A", "B", ""])),
            min_size=1,
            max_size=8,
        )
    )
    names = [(f"{role}{number}", label) for number, (role, label) in enumerate(sizes)]
    wrong = {
        name: draw(st.sampled_from(["", "", "", "down", "breaker", "draining", "slow", "kv"]))
        for name, _ in names
    }
    return names, wrong, draw(st.sets(st.sampled_from([name for name, _ in names]), max_size=2))


def built(
    names: list[tuple[str, str]],
    wrong: dict[str, str],
    label: str,
    *,
    policy: str,
    alone: int | None,
) -> Ledger:
    specs = [
        EngineSpec(name, ROLES[name[0]], within=((label, value),) if value else ())
        for name, value in names
    ]
    ledger = made(specs, policy)
    ledger.alone_up_to = alone
    ledger.breakers.configure(1, 10, 30.0)
    for name, what in wrong.items():
        if what == "down":
            ledger.mark_down(name, "gone", 0.0)
        elif what == "breaker":
            ledger.exclude(name, "slow", 100.0, 0.0)
        elif what == "draining":
            ledger.mark_draining(name, "an operator")
        elif what == "slow":
            ledger.breakers.warm_up(ledger._engines[name], 0.0)
            ledger._engines[name].trials = 2
        elif what == "kv":
            ledger.mark_kv(name, "has no side channel")
    return ledger


@example(  # of the engines that serve whole, those of one role are excluded, the other is busy
    (
        [("a0", "A"), ("d1", "B"), ("a2", "B")],
        {"a0": "breaker", "d1": "slow", "a2": "breaker"},
        set(),
    ),
    "session",
    None,
    False,
)
@example(  # one decode engine has no place, the other can't exchange KV
    (
        [("p0", "A"), ("a1", "B"), ("d2", "A"), ("d3", "A")],
        {"a1": "breaker", "d2": "slow", "d3": "kv"},
        set(),
    ),
    "least_load",
    0,
    True,
)
@settings(max_examples=300)
@given(
    found=fleets(),
    policy=st.sampled_from(["least_load", "session", "auto"]),
    alone=st.sampled_from([None, 0]),
    split=st.booleans(),
)
def test_a_request_is_refused_only_if_it_would_be_refused_anyway(
    found: tuple[list[tuple[str, str]], dict[str, str], set[str]],
    policy: str,
    alone: int | None,
    split: bool,
) -> None:
    """The same label under another name pairs the same engines, and is no revision. And no request
    goes to an engine of an incomplete revision while another one is complete.
    """
    names, wrong, without = found
    ask = Ask("m", 16_000, 1.0, 4000, spares_decode=alone == 0, session="s")
    got, wanted = (
        _once(built(names, wrong, label, policy=policy, alone=alone), ask, without, split=split)
        for label in (REVISION, "rack")
    )
    assert bool(got) >= bool(wanted)
    assert len({engine.revision for engine in got}) <= 1
    ledger = built(names, wrong, REVISION, policy=policy, alone=alone)
    first = _once(ledger, ask, set(), split=split)
    complete = {one.revision for one in ledger.engines if _is_complete(ledger, one.revision)}
    if first and complete and _can(ledger, complete, split=split, spares=alone == 0):
        assert first[0].revision in complete


def _once(ledger: Ledger, ask: Ask, without: set[str], *, split: bool) -> list[LedgerEngine]:
    if ledger.placement is not None:
        found = ledger.place(ask, split=split, without=without)
    else:
        found = ledger.assign(SPLIT, ask, without=without) if split else None
        if found is None:
            lease = ledger.assign_alone(ask, without=without)
            found = None if lease is None else Assignment((lease,))
    return [] if found is None else [lease.engine for lease in found.leases]


_Engines = Callable[[Ledger, str | None, Role], list[LedgerEngine]]


def _usable(ledger: Ledger, revision: str | None, role: Role) -> list[LedgerEngine]:
    return [
        n for n in ledger.engines if n.revision == revision and role in n.uses and n.usable(1.0)
    ]


def _chosen_from(ledger: Ledger, revision: str | None, role: Role) -> list[LedgerEngine]:
    """The usable engines that have a place, or all of them: others of a role are looked at only if
    none has one.
    """
    usable = _usable(ledger, revision, role)
    return [n for n in usable if n.takes(1.0)] or usable


def _pairs(ledger: Ledger, revision: str | None, engines: _Engines = _usable) -> bool:
    return any(
        p is not d and p.kv_not_ready is None and d.kv_not_ready is None
        for p in engines(ledger, revision, Role.PREFILL)
        for d in engines(ledger, revision, Role.DECODE)
    )


def _is_complete(ledger: Ledger, revision: str | None) -> bool:
    """As the guide says it."""
    wholes = _usable(ledger, revision, Role.AGGREGATED)
    if not any(Role.PREFILL in n.uses for n in ledger.engines):
        return bool(wholes or _usable(ledger, revision, Role.DECODE))
    return bool(wholes) or _pairs(ledger, revision)


def _can(ledger: Ledger, revisions: set[str | None], *, split: bool, spares: bool) -> bool:
    """Whether a complete revision can serve a request of this kind."""
    return any(
        (split and _pairs(ledger, one, _chosen_from))
        or _usable(ledger, one, Role.AGGREGATED)
        or (not spares and _usable(ledger, one, Role.DECODE))
        for one in revisions
    )
