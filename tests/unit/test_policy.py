"""The policies: what least_load chooses, what a policy is asked and learns, and how the settings
name one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.app.compose import Proxy
from pdproxy.cli.main import main
from pdproxy.scheduling import policies
from pdproxy.scheduling.compatibility import prefill_and_decode
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.least_load import LeastLoad
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, LedgerEngine, Role
from pdproxy.scheduling.policies import POLICIES, names
from pdproxy.scheduling.policy import Ask, Best, Policy, PolicyContext, PolicyFactory
from pdproxy.settings import engines
from pdproxy.settings.pools import Pool, PoolPolicy
from pdproxy.settings.schema import Settings

SPLIT = (Role.PREFILL, Role.DECODE)


def evidence(models: str = "m", version: str = "1", started: float = 1.0) -> Evidence:
    """What an engine reports about itself."""
    return Evidence(frozenset(models), version, 16, ((1, 2),), 5, started)


class Reference:
    """The choices of least_load by its first implementation, with nothing prepared. Its engines are
    its own.
    """

    def __init__(self, specs: Sequence[EngineSpec], failures: int, cooldown: float) -> None:
        self.nodes = {spec.url: LedgerEngine(spec) for spec in specs}
        self.failures, self.cooldown = failures, cooldown
        self.turns: dict[object, int] = {}
        self.tripped: set[str] = set()

    def pair(self, ask: Ask, without: Collection[str]) -> list[Lease] | None:
        if not without and not self.tripped:
            best = [self.least(role, ask.model) for role in SPLIT]
            if (
                best[0] is not None
                and best[1] is not None
                and prefill_and_decode(best[0], best[1]) is None
            ):
                return [self.lease(best[0], ask.prompt_bytes), self.lease(best[1], 0)]
        prefills, decodes = (self.ranked(role, ask, without) for role in SPLIT)
        for prefill in prefills:
            for decode in decodes:
                if prefill_and_decode(prefill, decode) is None:
                    return [self.lease(prefill, ask.prompt_bytes), self.lease(decode, 0)]
        return None

    def alone(self, ask: Ask, without: Collection[str]) -> Lease | None:
        roles = (Role.AGGREGATED, Role.DECODE)
        if not without and not self.tripped:
            whole = [
                role for role in roles if any(n.role is role and n.up for n in self.nodes.values())
            ]
            groups = [self.group(role, ask.model) for role in whole]
            if groups and all(groups):
                best = [self.next(role, group) for role, group in zip(whole, groups, strict=True)]
                return self.lease(best[0], ask.prompt_bytes)
        found = [engine for role in roles for engine in self.ranked(role, ask, without)[:1]]
        if not found:
            return None
        tried = {n.url for n in self.nodes.values() if n.url in self.tripped and n.trials}
        found.sort(
            key=lambda n: (
                ask.model is not None and not n.serves(ask.model),
                not n.usable(ask.now) or n.url in tried
            )
        )  # fmt: skip
        return self.lease(found[0], ask.prompt_bytes)

    def release_through(self, prefill: str, ask: Ask, prefer_not: str) -> LedgerEngine | None:
        ranked = [
            engine
            for engine in self.ranked(Role.DECODE, ask, ())
            if engine.spec.takes_from(self.nodes[prefill].spec)
        ]
        others = [engine for engine in ranked if engine.url != prefer_not]
        settled = [
            engine
            for engine in others
            if engine.url not in self.tripped or ask.now < engine.open_until
        ]
        return next(iter(settled or others or ranked), None)

    def ranked(self, role: Role, ask: Ask, without: Collection[str]) -> list[LedgerEngine]:
        alive = [n for n in self.nodes.values() if n.role is role and n.up]
        serving = [n for n in alive if ask.model is None or n.serves(ask.model)]
        known = serving or (alive if role is not Role.PREFILL else [])
        fitting = [n for n in known if n.url not in without]
        usable = [n for n in fitting if n.usable(ask.now)]
        candidates = (
            [n for n in usable if not (n.url in self.tripped and n.trials)] or usable or fitting
        )
        return sorted(self.turned((role, "ranked"), candidates), key=load)

    def least(self, role: Role, model: str | None) -> LedgerEngine | None:
        group = self.group(role, model)
        return self.next(role, group) if group else None

    def next(self, role: Role, group: list[LedgerEngine]) -> LedgerEngine:
        return min(self.turned(role, group), key=load)

    def turned(self, whose: object, engines: list[LedgerEngine]) -> list[LedgerEngine]:
        if len(engines) < 2:
            return engines
        turn = self.turns[whose] = self.turns.get(whose, 0) + 1
        turn %= len(engines)
        return engines[turn:] + engines[:turn]

    def group(self, role: Role, model: str | None) -> list[LedgerEngine]:
        return [
            n
            for n in self.nodes.values()
            if n.role is role and n.up and (model is None or n.serves(model))
        ]

    def lease(self, engine: LedgerEngine, prompt_bytes: int) -> Lease:
        engine.requests += 1
        engine.prompt_bytes += prompt_bytes
        lease = Lease(engine, engine.role, prompt_bytes)
        if engine.url in self.tripped:
            lease.trial = engine.trial_number
            engine.trials += 1
        return lease

    def close(self, lease: Lease, verdict: Verdict, now: float) -> bool:
        engine = lease.engine
        engine.requests -= 1
        engine.prompt_bytes -= lease.prompt_bytes
        is_trial = engine.url in self.tripped and lease.trial == engine.trial_number
        engine.trials -= is_trial
        if verdict is Verdict.GOOD:
            engine.failures = 0
            if now >= engine.open_until:
                engine.open_until = 0.0
                self.tripped.discard(engine.url)
        elif verdict is Verdict.UNREACHABLE:
            return self.mark_down(engine.url, now)
        elif verdict is Verdict.FAILED:
            engine.failures += 1
            enough = engine.failures >= self.failures or is_trial
            if enough and now >= engine.open_until and engine.down_because is None:
                engine.trial_number, engine.trials = engine.trial_number + 1, 0
                engine.open_until = now + self.cooldown
                self.tripped.add(engine.url)
                return True
        return False

    def mark_down(self, url: str, now: float) -> bool:
        engine = self.nodes[url]
        was_up, engine.down_because, engine.down_since, engine.probed = (
            engine.down_because is None,
            "gone",
            now,
            True,
        )
        return was_up

    def mark_up(self, url: str, found: Evidence) -> None:
        engine = self.nodes[url]
        if engine.evidence is not None and engine.evidence != found:
            for other in engine.ejected:
                self.nodes[other].ejected.discard(url)
            engine.ejected.clear()
        if engine.down_because is not None:
            engine.failures, engine.open_until = 0, 0.0
            self.tripped.discard(url)
        engine.evidence, engine.down_because, engine.probed = found, None, True

    def eject(self, prefill: str, decode: str) -> None:
        self.nodes[prefill].ejected.add(decode)
        self.nodes[decode].ejected.add(prefill)


def load(engine: LedgerEngine) -> tuple[int, int]:
    """What least_load compares."""
    return (
        (engine.prompt_bytes, engine.requests)
        if engine.role is Role.PREFILL
        else (engine.requests, engine.prompt_bytes)
    )


def urls(leases: Sequence[Lease] | None) -> list[str] | None:
    """Where leases are."""
    return None if leases is None else [lease.engine.url for lease in leases]


ACTS = ("pair alone good " * 2 + "pair release failed unreachable lost saw eject wait").split()
NUMBERS = st.integers(0, 40)
MODELS = st.sampled_from(["m", "m", "n", "x", None])


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 6), st.integers(0, 2), st.booleans(),
    st.lists(st.tuples(st.sampled_from(ACTS), NUMBERS, NUMBERS, MODELS), min_size=20, max_size=80),
)  # fmt: skip
def test_choices_are_those_of_the_reference(
    prefills: int,
    decodes: int,
    others: int,
    sources: bool,
    steps: list[tuple[str, int, int, str | None]],
) -> None:
    """Whatever happens, in any order: the same engines are chosen, and the same closings report
    that an engine is out of use.
    """
    counts = ((Role.PREFILL, prefills), (Role.DECODE, decodes), (Role.AGGREGATED, others))
    specs = [
        EngineSpec(
            f"{role.value}{n}",
            role,
            frozenset({"prefill0"} if sources and role is Role.DECODE and not n else ()),
        )
        for role, count in counts
        for n in range(count)
    ]
    made, reference = (
        Ledger(specs, LedgerOptions(breaker_failures=2, breaker_cooldown=10)),
        Reference(specs, 2, 10),
    )
    for spec in specs:
        made.mark_up(spec.url, evidence())
        reference.mark_up(spec.url, evidence())
    leases: list[tuple[Lease, Lease]] = []
    now = 0.0
    for act, number, other, model in steps:
        ask = Ask(model, number, now)
        url, decode = specs[number % len(specs)].url, f"decode{other % decodes}"
        without = {
            specs[(number + n) % len(specs)].url for n in range(other % 4 if other > 20 else 0)
        }
        if act == "pair":
            got, wanted = made.assign(SPLIT, ask, without=without), reference.pair(ask, without)
            assert urls(None if got is None else got.leases) == urls(wanted)
            leases += zip(got.leases if got else (), wanted or (), strict=True)
        elif act == "alone":
            one, two = made.assign_alone(ask, without=without), reference.alone(ask, without)
            assert (one and one.engine.url) == (two and two.engine.url)
            leases += [(one, two)] if one and two else []
        elif act == "release":
            prefill = f"prefill{number % prefills}"
            engine, same = (
                made.releasing.through(prefill, model, now, prefer_not=decode),
                reference.release_through(prefill, ask, decode),
            )
            assert (engine and engine.url) == (same and same.url)
        elif act in ("good", "failed", "unreachable") and leases:
            one, two = leases.pop(number % len(leases))
            assert (one.prompt_bytes, one.engine.url) == (two.prompt_bytes, two.engine.url)
            assert made.close(one, Verdict(act), now) is reference.close(two, Verdict(act), now)
        elif act == "lost":
            assert made.mark_down(url, "gone", now) is reference.mark_down(url, now)
        elif act == "saw":
            found = evidence(
                "m" if other % 3 else "mn", version="12"[other > 35], started=float(other % 2)
            )
            made.mark_up(url, found)
            reference.mark_up(url, found)
        elif act == "eject":
            made.eject(f"prefill{number % prefills}", decode)
            reference.eject(f"prefill{number % prefills}", decode)
        elif act == "wait":
            now += number / 4
        assert [load(engine) for engine in made.engines] == [
            load(engine) for engine in reference.nodes.values()
        ]


class Favourite(Policy):
    """Ranks one engine first, and remembers what it was asked and what it learned."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[tuple[Ask, list[str]]] = []
        self.learned: list[tuple[object, ...]] = []

    def rank(self, ask: Ask, engines: Sequence[LedgerEngine]) -> list[LedgerEngine]:
        self.asked.append((ask, [engine.url for engine in engines]))
        return sorted(engines, key=lambda engine: engine.url != self.url)

    def opened(self, lease: Lease, ask: Ask) -> None:
        self.learned.append(("opened", lease.engine.url, lease.engine.requests, ask))

    def closed(self, lease: Lease, verdict: Verdict, now: float) -> None:
        self.learned.append(("closed", lease.engine.url, lease.engine.requests, verdict, now))


def ledger(policies: Mapping[Role, PolicyFactory], *urls: str) -> Ledger:
    """Engines that are up; the first letter of each URL is its role's."""
    roles = {role.value[0]: role for role in Role if role is not Role.ANY}
    made = Ledger(
        [EngineSpec(url, roles[url[0]]) for url in urls],
        LedgerOptions(breaker_failures=2, breaker_cooldown=10, policies=policies),
    )
    for url in urls:
        made.mark_up(url, evidence())
    return made


def test_a_policy_ranks_and_is_informed() -> None:
    """It gets the request as it was asked, chooses again and again the same engine, and learns how
    each lease ends.
    """
    favourite = Favourite("d2")
    made = ledger({Role.DECODE: lambda role: favourite}, "p1", "d1", "d2", "d3")
    ask = Ask("m", 7, 5.0, 2)
    first, second = made.assign(SPLIT, ask), made.assign(SPLIT, ask)
    assert first is not None
    assert second is not None
    assert first[Role.DECODE].engine.url == second[Role.DECODE].engine.url == "d2"
    assert favourite.asked == [(ask, ["d1", "d2", "d3"])] * 2
    third = made.assign_alone(ask, without={"d2"})
    assert third is not None
    assert third.engine.url == "d1"
    made.close(first[Role.DECODE], Verdict.FAILED, 6.0)
    made.close(first[Role.PREFILL], Verdict.GOOD, 6.0)
    made.close(first[Role.DECODE], Verdict.GOOD, 7.0)
    assert favourite.learned == [
        ("opened", "d2", 1, ask), ("opened", "d2", 2, ask), ("opened", "d1", 1, ask),
        ("closed", "d2", 1, Verdict.FAILED, 6.0),
    ]  # fmt: skip


def test_where_there_is_one_engine_no_policy_is_asked() -> None:
    """Nor is it where there is none. It still learns of the lease."""
    favourite = Favourite("d1")
    made = ledger({Role.DECODE: lambda role: favourite}, "p1", "d1")
    assert made.assign(SPLIT, Ask("m", 7, 0.0)) is not None
    assert made.assign(SPLIT, Ask("m", 7, 0.0), without={"d1"}) is None
    assert made.assign_alone(Ask("m", 7, 0.0), without={"p1"}) is not None
    assert favourite.asked == []
    assert [what for what, *_ in favourite.learned] == ["opened", "opened"]


def test_aggregated_engines_have_decodes_policy() -> None:
    """Each role has one of its own, made for it; prefill engines keep the default."""
    roles: list[Role] = []

    def favourite(made_for: PolicyContext) -> Policy:
        roles.append(made_for.role)
        return Favourite(f"{made_for.role.value[0]}2")

    made = ledger({Role.DECODE: favourite}, "p1", "p2", "d1", "d2", "a1", "a2")
    assert sorted(role.value for role in roles) == ["aggregated", "decode"]
    pairs = [made.assign(SPLIT, Ask("m", 7, 0.0)) for _ in range(4)]
    assert {pair[Role.PREFILL].engine.url for pair in pairs if pair} == {"p1", "p2"}
    assert {pair[Role.DECODE].engine.url for pair in pairs if pair} == {"d2"}
    alone = [made.assign_alone(Ask("m", 7, 0.0)) for _ in range(4)]
    assert {lease.engine.url for lease in alone if lease} == {"a2"}


def test_any_roles_can_be_assigned() -> None:
    """One lease for each role, in their order. The first role decides where the best engines are
    not compatible.
    """
    roles = (Role.AGGREGATED, Role.PREFILL, Role.DECODE)
    first = {role: (lambda made_for: Favourite(f"{made_for.role.value[0]}1")) for role in roles}
    made = ledger(first, "p1", "p2", "d1", "d2", "a1", "a2")
    best = made.assign(roles, Ask("m", 7, 0.0))
    assert best is not None
    assert urls(best.leases) == ["a1", "p1", "d1"]
    assert [best[role] for role in roles] == list(best.leases)
    assert [lease.prompt_bytes for lease in best.leases] == [7, 7, 0]
    made.eject("p1", "d1")
    for order, wanted in ((roles, ["a1", "p1", "d2"]), (roles[::-1], ["d1", "p2", "a1"])):
        got = made.assign(order, Ask("m", 7, 0.0))
        assert got is not None
        assert urls(got.leases) == wanted
    for prefill, decode in (("p1", "d2"), ("p2", "d1"), ("p2", "d2")):
        made.eject(prefill, decode)
    before = [engine.requests for engine in made.engines]
    assert made.assign(roles, Ask("m", 7, 0.0)) is None
    assert [engine.requests for engine in made.engines] == before, (
        "an engine was leased for a request that got none"
    )
    only = made.assign((Role.DECODE,), Ask("m", 7, 0.0))
    assert only is not None
    assert only[Role.DECODE].prompt_bytes == 7, "it reads the prompt itself"
    with pytest.raises(KeyError):
        only[Role.PREFILL]


class Counting(Favourite):
    """Counts what was prepared."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.prepared: list[list[str]] = []
        self.changes = 0

    def best_of(self, engines: Sequence[LedgerEngine]) -> Best:
        self.prepared.append([engine.url for engine in engines])
        return super().best_of(engines)

    def engines_changed(self) -> None:
        self.changes += 1


def test_engines_are_prepared_once_for_all_models_that_they_serve() -> None:
    """Until an engine changes. Models that no engine serves leave nothing behind."""
    counting = Counting("d1")
    made = ledger(
        {
            Role.DECODE: lambda made_for: (
                counting if made_for.role is Role.DECODE else LeastLoad(made_for.role)
            )
        },
        "d1",
        "d2",
    )
    for url in ("d1", "d2"):
        made.mark_up(url, evidence("mno"))
    made.mark_up("d1", evidence("mnop"))
    for model in ("m", "n", "o", None, "p", "unknown", "m"):
        assert made.assign_alone(Ask(model, 7, 0.0)) is not None
    assert counting.prepared == [["d1", "d2"]]
    changes = counting.changes
    made.mark_up("d2", evidence("mno"))
    assert counting.changes == changes, "nothing is new"
    made.mark_down("d2", "gone", 0.0)
    made.mark_up("d2", evidence("mno"))
    assert counting.changes == changes + 2
    assert made.assign_alone(Ask("m", 7, 0.0)) is not None
    assert counting.prepared == [["d1", "d2"]] * 2


def test_loads_of_engines_that_changed_are_dropped() -> None:
    """Else each change would leave a list behind, which every lease then has to update."""
    policy = LeastLoad(Role.DECODE)
    made = ledger(
        {
            Role.DECODE: lambda made_for: (
                policy if made_for.role is Role.DECODE else LeastLoad(made_for.role)
            )
        },
        "d1",
        "d2",
    )
    for _ in range(5):
        made.mark_down("d1", "gone", 0.0)
        made.mark_up("d1", evidence())
        assert made.assign_alone(Ask("m", 7, 0.0)) is not None
    assert [len(places) for places in policy._places.values()] == [1, 1]


def test_every_name_of_the_settings_is_a_policy() -> None:
    assert names() == tuple(POLICIES)


async def test_the_settings_choose_the_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each role's policy is the one that its setting names."""
    monkeypatch.setattr(
        policies,
        "POLICIES",
        {**POLICIES, "second": lambda made_for: Favourite(f"http://{made_for.role.value[0]}2:1")},
    )
    nodes = [
        engines.ConfiguredEngine(url=f"http://{role[0]}{n}:1", role=role)
        for role in get_args(engines.Role)[:3]
        for n in (1, 2)
    ]
    for prefill, decode in (("second", "least_load"), ("least_load", "second")):
        chosen = PoolPolicy(prefill=prefill, decode=decode)
        proxy = Proxy.build(Settings(pools=(Pool(nodes=tuple(nodes), policy=chosen),)))
        for engine in nodes:
            proxy.ledger.mark_up(engine.url, evidence())
        used: set[str] = set()
        for _ in range(4):
            pair, alone = (
                proxy.ledger.assign(SPLIT, Ask("m", 1, 0.0)),
                proxy.ledger.assign_alone(Ask("m", 1, 0.0)),
            )
            assert pair is not None
            assert alone is not None
            used |= {lease.engine.url[7:9] for lease in (*pair.leases, alone)}
        assert used == (
            {"p2", "d1", "d2", "a1", "a2"} if prefill == "second" else {"p1", "p2", "d2", "a2"}
        )


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_unknown_policy_is_refused(
    role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the key, what is expected and what was given, and exit code 2."""
    path = tmp_path / "x.yaml"
    path.write_text(
        f"pools: [{{policy: {{{role}: fastest}}, nodes: [{{url: 'http://a:1', role: decode}}]}}]"
    )
    assert main(["serve", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert f'pools[0].policy.{role}: expected {" or ".join(names())}, got "fastest"' in error
    assert error.count("\n") == 1
