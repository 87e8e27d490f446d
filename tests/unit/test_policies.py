"""The policies besides least_load: what each chooses, how evenly, and what an engine that comes
changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, LedgerEngine, Role
from pdproxy.scheduling.policies import POLICIES, names
from pdproxy.scheduling.policy import Ask, Cached, Policy, PolicyContext, Turns
from pdproxy.scheduling.session import BOUND

ROLES = [Role.PREFILL, Role.DECODE, Role.AGGREGATED]
ASK = Ask("m", 100, 0.0)


def nodes(*requests: int, role: Role = Role.DECODE) -> list[LedgerEngine]:
    """Engines with so many requests each."""
    made = [LedgerEngine(EngineSpec(f"http://{n}:1", role)) for n in range(len(requests))]
    for engine, count in zip(made, requests, strict=True):
        engine.requests, engine.prompt_bytes = count, count * 100
    return made


def policy(
    name: str, role: Role = Role.DECODE, chance: Callable[[], float] | None = None, **more: object
) -> Policy:
    """A policy by its name."""
    return POLICIES[name](PolicyContext(role, chance or Random(1).random, **more))  # type: ignore[arg-type]


def chosen(one: Policy, among: Sequence[LedgerEngine], ask: Ask = ASK) -> LedgerEngine:
    """What a policy puts first."""
    return one.best_of(among)(ask)


def in_session(name: str) -> Ask:
    """A request of a session."""
    return Ask("m", 100, 0.0, session=name)


def ledger(name: str, count: int, cached: Cached | None = None) -> Ledger:
    """Decode engines under a policy."""
    made = Ledger(
        [EngineSpec(f"http://{n}:1", Role.DECODE) for n in range(count)],
        LedgerOptions(
            breaker_failures=3,
            breaker_cooldown=5,
            policies={Role.DECODE: POLICIES[name]},
            chance=Random(1).random,
            cached=cached,
        ),
    )
    for engine in made.engines:
        made.mark_up(engine.url, evidence())
    return made


def evidence() -> Evidence:
    return Evidence(frozenset("m"), "1", 16, ((1, 2),), 5, 1.0)


# -- all


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", names())
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_ranking_has_each_engine_once(name: str, role: Role, data: st.DataObject) -> None:
    """Whatever the loads and the request; and the best of the prepared engines is one of them."""
    loads = data.draw(st.lists(st.integers(0, 50), min_size=2, max_size=9))
    session = data.draw(st.none() | st.text(max_size=5))
    tokens = data.draw(st.none() | st.integers(0, 5000))
    among = nodes(*loads, role=role)
    ask = Ask("m", 100, 0.0, session=session, tokens=tokens)
    matched = {engine.url: data.draw(st.integers(0, 6000)) for engine in among}
    one = policy(name, role, Random(data.draw(st.integers(0, 99))).random, cached=lambda _: matched)
    assert sorted(map(id, one.rank(ask, among))) == sorted(map(id, among))
    assert one.best_of(among)(ask) in among


def test_engines_that_are_ranked_alike_take_turns() -> None:
    among, turns = nodes(4, 1, 1, 1), Turns()
    first = Counter(min(turns.of(among), key=lambda engine: engine.requests).url for _ in range(12))
    assert {*first} == {engine.url for engine in among[1:]}
    assert [sorted(turns.of(among), key=lambda engine: engine.url) for _ in among] == [among] * 4


@pytest.mark.parametrize("name", names())
def test_a_ledger_with_any_policy_serves_and_forgets(name: str) -> None:
    """Leases open and close in any order, engines come and go, and in the end no load is left."""
    made, chance, open_leases = ledger(name, 4), Random(2), list[Lease]()
    for step in range(400):
        ask = Ask("m", 100, float(step), session=f"s{step % 7}", tokens=50)
        if chance.random() < 0.6 and (lease := made.assign_alone(ask)) is not None:
            open_leases.append(lease)
        elif open_leases:
            made.close(
                open_leases.pop(chance.randrange(len(open_leases))), Verdict.GOOD, float(step)
            )
        if step % 50 == 25:
            made.mark_down("http://0:1", "gone", float(step))
        if step % 50 == 49:
            made.mark_up("http://0:1", evidence())
    for lease in open_leases:
        made.close(lease, Verdict.GOOD, 400.0)
    assert [(engine.requests, engine.prompt_bytes) for engine in made.engines] == [(0, 0)] * 4


def fleet(name: str, *specs: EngineSpec) -> Ledger:
    """Engines that are up, all roles of which have a policy."""
    made = Ledger(
        specs,
        LedgerOptions(
            breaker_failures=3,
            breaker_cooldown=5,
            policies=dict.fromkeys((Role.PREFILL, Role.DECODE), POLICIES[name]),
            chance=Random(1).random,
        ),
    )
    for engine in made.engines:
        made.mark_up(engine.url, evidence())
    return made


def used(made: Ledger, whole: str) -> Counter[tuple[str, str]]:
    """How often each engine had each role: requests one after the other, split, or whole where
    `whole` has a 1.
    """
    found = Counter[tuple[str, str]]()
    for n in range(120):
        ask = Ask("m", 100, float(n), session=f"s{n}", tokens=50)
        leases: tuple[Lease, ...]
        if whole[n % len(whole)] == "1":
            lease = made.assign_alone(ask)
            leases = () if lease is None else (lease,)
        else:
            pair = made.assign((Role.PREFILL, Role.DECODE), ask)
            leases = () if pair is None else pair.leases
        assert leases
        for lease in leases:
            found[lease.engine.url, lease.role.value] += 1
            made.close(lease, Verdict.GOOD, float(n))
    return found


@pytest.mark.parametrize("whole", ["0", "01", "001"])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", names())
def test_engines_for_any_role_have_all_roles(name: str, count: int, whole: str) -> None:
    """The best one to prefill is mostly also the best one to decode, and can't do both for one
    request.
    """
    found = used(fleet(name, *[EngineSpec(f"http://{n}:1", Role.ANY) for n in range(count)]), whole)
    assert {url for url, role in found if role == "prefill"} == {
        f"http://{n}:1" for n in range(count)
    }
    assert {url for url, role in found if role == "decode"} == {
        f"http://{n}:1" for n in range(count)
    }


@pytest.mark.parametrize("whole", ["0", "01", "001", "0111"])
@pytest.mark.parametrize("name", names())
def test_no_engine_starves_in_its_rack(name: str, whole: str) -> None:
    """Two racks, of which the second one has more engines: pairs form within each of them."""
    specs = [
        EngineSpec(f"http://p{n}:1", Role.PREFILL, within=(("rack", "abb"[n]),)) for n in range(3)
    ]
    specs += [
        EngineSpec(f"http://d{n}:1", Role.DECODE, within=(("rack", "abb"[n]),)) for n in range(3)
    ]
    found = used(fleet(name, *specs), whole)
    assert {url for url, role in found if role != "aggregated"} == {spec.url for spec in specs}


# -- round_robin, random, power_of_two


def test_round_robin_takes_turns_whatever_the_load() -> None:
    made = ledger("round_robin", 3)
    got = [made.assign_alone(ASK) for _ in range(7)]
    assert [lease.engine.url[7] for lease in got if lease] == ["0", "1", "2", "0", "1", "2", "0"]
    made.close(next(lease for lease in got if lease), Verdict.FAILED, 0.0)
    excluded = [made.assign_alone(ASK, without={"http://1:1"}) for _ in range(4)]
    assert [lease.engine.url[7] for lease in excluded if lease] == ["2", "0", "2", "0"]


def test_round_robin_takes_turns_within_each_model() -> None:
    """Requests of two models alternate: with one turn for all, each would have the same engine
    every time.
    """
    made = ledger("round_robin", 4)
    for engine in made.engines:
        made.mark_up(
            engine.url, Evidence(frozenset("mn"[engine.url[7] > "1"]), "1", 16, ((1, 2),), 5, 1.0)
        )
    found = Counter[str]()
    for n in range(40):
        lease = made.assign_alone(Ask("mn"[n % 2], 100, 0.0))
        assert lease is not None
        found[lease.engine.url] += 1
    assert set(found.values()) == {10}


def test_random_takes_each_engine_as_often() -> None:
    """Both where engines are prepared and where they are ranked: 3000 draws of 5, within six
    standard deviations.
    """
    one, among = policy("random"), nodes(9, 0, 0, 4, 1)
    best = one.best_of(among)
    for draw in (
        lambda: best(ASK),
        lambda: one.rank(ASK, among)[0],
        lambda: one.rank(ASK, among)[-1],
    ):
        counts = Counter(draw().url for _ in range(3000))
        assert all(abs(counts[engine.url] - 600) < 132 for engine in among), counts


@pytest.mark.parametrize(
    ("draws", "wanted"), [((0.0, 0.0), 1), ((0.5, 0.0), 0), ((0.99, 0.99), 1), ((0.0, 0.99), 0)]
)
def test_power_of_two_takes_the_better_of_two(draws: tuple[float, float], wanted: int) -> None:
    """The two that are drawn are different: engines 0 and 1, 1 and 0, 2 and 1, 0 and 2."""
    drawn = iter(draws)
    among = nodes(4, 2, 9) if draws == (0.0, 0.0) else nodes(2, 4, 9)
    assert chosen(policy("power_of_two", chance=lambda: next(drawn)), among) is among[wanted]


def test_power_of_two_of_two_is_least_load() -> None:
    for role, loads in ((Role.DECODE, (3, 1)), (Role.PREFILL, (1, 2))):
        among = nodes(*loads, role=role)
        one = policy("power_of_two", role)
        least = min(among, key=lambda engine: engine.requests)
        assert (
            {chosen(one, among) for _ in range(20)}
            == {least}
            == {one.rank(ASK, among)[0] for _ in range(20)}
        )


def test_power_of_two_keeps_loads_close() -> None:
    """800 requests on 8 engines that keep them all: chance alone would spread them by 10 either
    way.
    """
    made = ledger("power_of_two", 8)
    for _ in range(800):
        assert made.assign_alone(ASK) is not None
    loads = [engine.requests for engine in made.engines]
    assert max(loads) - min(loads) <= 8, loads


@pytest.mark.parametrize("name", ["random", "power_of_two"])
def test_a_policy_of_chance_needs_a_source_of_it(name: str) -> None:
    with pytest.raises(RuntimeError, match="source of chance"):
        POLICIES[name](PolicyContext(Role.DECODE)).rank(ASK, nodes(0, 0))


# -- session


def home(among: Sequence[LedgerEngine], session: str) -> LedgerEngine:
    return chosen(policy("session"), among, in_session(session))


def test_a_session_stays_at_its_engine() -> None:
    """In each process: the choice is by the engines' URLs and the session alone, in whatever order
    the engines are.
    """
    among = nodes(0, 0, 0, 0, 0)
    for n in range(50):
        first = home(among, f"s{n}")
        assert home(among[::-1], f"s{n}") is first
        assert policy("session").rank(in_session(f"s{n}"), among)[0] is first
    assert home(among, "s1").url == "http://3:1", (
        "it must not change with a version either: caches would be lost"
    )


def test_without_a_session_the_least_load_counts() -> None:
    among = nodes(3, 1, 2)
    assert chosen(policy("session"), among) is among[1]
    assert policy("session").rank(ASK, among)[0] is among[1]


def test_sessions_are_spread_evenly() -> None:
    """4000 sessions over 8 idle engines: 500 each, within six standard deviations."""
    among = nodes(*[0] * 8)
    counts = Counter(home(among, f"session {n}").url for n in range(4000))
    assert all(abs(counts[engine.url] - 500) < 126 for engine in among), counts


@pytest.mark.parametrize("count", [2, 5, 16])
def test_an_engine_that_comes_takes_its_share_and_moves_nothing_else(count: int) -> None:
    among = nodes(*[0] * (count + 1))
    before = {n: home(among[:-1], f"s{n}") for n in range(1500)}
    after = {n: home(among, f"s{n}") for n in before}
    moved = [n for n in before if after[n] is not before[n]]
    assert all(after[n] is among[-1] for n in moved)
    share = 1500 / (count + 1)
    assert abs(len(moved) - share) < 6 * (share * count / (count + 1)) ** 0.5
    assert len({before[n].url for n in moved}) == count, "each of the others gives some"


@given(
    loads=st.lists(st.integers(0, 30), min_size=2, max_size=12),
    session=st.text(max_size=8),
)
@settings(max_examples=200, deadline=None)
def test_no_session_overloads_an_engine(loads: list[int], session: str) -> None:
    """The engine that is chosen has at most 1.25 times the mean afterwards, rounded up."""
    among = nodes(*loads)
    engine = home(among, session)
    bound = BOUND * max(1.0, (sum(loads) + 1) / len(loads))
    assert engine.requests < bound
    ranked = policy("session").rank(in_session(session), among)
    assert ranked[0] is engine
    within = [one for one in ranked if one.requests < bound]
    assert ranked[: len(within)] == within


def test_one_hot_session_is_spread_by_the_bound() -> None:
    made = ledger("session", 4)
    for _ in range(100):
        assert made.assign_alone(in_session("hot")) is not None
    loads = sorted(engine.requests for engine in made.engines)
    assert loads[-1] <= 32, loads  # 1.25 x 25, rounded up
    assert sum(loads) == 100


@pytest.mark.parametrize("count", [2, 3, 16])
def test_in_a_pool_with_few_requests_sessions_stay(count: int) -> None:
    """Two requests at one engine are no overload, however idle the others are; a third one
    leaves.
    """
    among = nodes(*[0] * count)
    first = home(among, "s")
    first.requests = 1
    assert home(among, "s") is first
    first.requests = 2
    assert home(among, "s") is not first


# -- prefix


def prefix(matched: Sequence[int], role: Role = Role.DECODE) -> Policy:
    """With so many cached tokens at the engines 0, 1, ..."""
    return policy(
        "prefix",
        role,
        cached=lambda _: {f"http://{n}:1": tokens for n, tokens in enumerate(matched) if tokens},
    )


@pytest.mark.parametrize(
    ("loads", "matched", "wanted"),
    [
        ((0, 0, 0), (0, 500, 900), 2),  # most cached tokens
        ((4, 4, 4), (0, 500, 900), 2),
        # 8 is 1.5 times the mean: half a mean too much, less than a whole prompt
        ((4, 4, 8), (0, 0, 1000), 2),
        ((0, 1, 24), (0, 0, 1000), 0),  # 3 times the mean
        ((1, 1, 1), (0, 0, 1), 2),  # the same load
        # one request more than an idle engine is worth the whole prompt
        ((0, 1, 1), (0, 0, 1000), 0),
        ((0, 1, 2), (0, 0, 900), 0),  # two requests more than an idle engine
        ((2, 1, 2), (0, 0, 0), 1),  # nothing is cached: the least load
        ((2, 2, 2), (0, 9000, 1000), 1),  # never more than the whole prompt
    ],
)
def test_prefix_weighs_what_is_cached_against_load(
    loads: tuple[int, ...], matched: tuple[int, ...], wanted: int
) -> None:
    ask = Ask("m", 4000, 0.0, tokens=1000)
    for role in ROLES:
        among = nodes(*loads, role=role)
        assert prefix(matched, role).rank(ask, among)[0] is among[wanted], role


@given(
    pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1200)), min_size=2, max_size=9),
    role=st.sampled_from(ROLES),
)
@settings(max_examples=200, deadline=None)
def test_the_prepared_choice_of_prefix_is_the_rankings(
    pairs: list[tuple[int, int]], role: Role
) -> None:
    """Or one with the same score."""
    loads, matched = [load for load, _ in pairs], [tokens for _, tokens in pairs]
    among, ask = nodes(*loads, role=role), Ask("m", 4000, 0.0, tokens=1000)
    mean = sum(loads) / len(loads)

    def score(engine: LedgerEngine) -> float:
        part = min(matched[int(engine.url[7:-2])], 1000) / 1000
        return part - (engine.requests - mean) / max(1.0, mean)

    one = prefix(matched, role)
    assert score(chosen(one, among, ask)) == pytest.approx(score(one.rank(ask, among)[0]))


def test_engines_with_the_same_score_take_turns() -> None:
    """Of those without any part of the prompt; an engine that is gone and still in the index is
    none of them.
    """
    among, ask = nodes(1, 1, 1, 9), Ask("m", 4000, 0.0, tokens=1000)
    one = prefix((0, 0, 0, 500, 900))
    best = one.best_of(among)
    assert {best(ask).url[7] for _ in range(6)} == {"0", "1", "2"}
    assert {one.rank(ask, among)[0].url[7] for _ in range(6)} == {"0", "1", "2"}


def test_a_hot_prefix_spreads() -> None:
    """Everybody's prompts begin in the same way: an engine that has that gets more, but never
    leaves the others idle.
    """
    have: set[str] = set()
    made = ledger("prefix", 4, cached=lambda _: dict.fromkeys(have, 900))
    for _ in range(200):
        lease = made.assign_alone(Ask("m", 4000, 0.0, tokens=1000))
        assert lease is not None
        have.add(lease.engine.url)
    assert len(have) == 4
    assert max(engine.requests for engine in made.engines) <= 2 * 50 + 1


@pytest.mark.parametrize("tokens", [None, 0])
def test_without_tokens_prefix_is_least_load(tokens: int | None) -> None:
    among = nodes(2, 0, 1)
    assert prefix((900, 0, 0)).rank(Ask("m", 4000, 0.0, tokens=tokens), among)[0] is among[1]


def test_without_an_index_prefix_is_least_load_and_says_so() -> None:
    among, one = nodes(2, 0, 1), policy("prefix")
    assert one.rank(Ask("m", 4000, 0.0, tokens=1000), among)[0] is among[1]
    assert (
        one.status()
        == "policy prefix: nothing is known of the engines' caches, so it chooses as least_load "
        "does"
    )
    assert ledger("prefix", 2).shortcomings(0.0) == [one.status()], "once, not for each role"
    assert prefix((1, 1)).status() is None


# -- what is asked


@pytest.mark.parametrize("name", names())
def test_details_are_made_only_for_those_that_read_them(name: str) -> None:
    assert ledger(name, 2).needs_details is (name in {"session", "prefix"})
