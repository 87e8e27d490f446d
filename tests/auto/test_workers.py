"""The placement `auto` of several workers: they choose as one process would, and one of them judges
for all.
"""

from __future__ import annotations

import random
from collections import deque
from functools import partial
from typing import Any

import pytest

from pdproxy.kit.shared_table import SharedTable
from pdproxy.scheduling import worker_breakers, worker_ledger
from pdproxy.scheduling.auto.auto import Auto, AutoOptions
from pdproxy.scheduling.auto.roles import REVIEW_S
from pdproxy.scheduling.auto.workers import AutoMemory, WorkerAuto, WorkerReplicaAuto
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.scheduling.placements import PlacementContext
from pdproxy.scheduling.placements import auto as make_auto
from pdproxy.scheduling.slo import Slo
from pdproxy.scheduling.worker_breakers import WorkerBreakers
from pdproxy.scheduling.worker_ledger import LedgerShare, WorkerLedger
from pdproxy.scheduling.worker_replicas import WorkerReplicaLedger
from tests.auto.fleets import H200, B, ask, auto, ledger

EVIDENCE = Evidence(frozenset({"m"}), "", 16, (), 0, 1.0)
FIXED = [*[Role.PREFILL] * 3, *[Role.DECODE] * 3, Role.AGGREGATED]
"""Four may serve whole: all are looked at for each request. Of more, each worker looks at some in
turns of its own.
"""
A = Slo(ttft=0.5, tpot=0.015)


class Several:
    """So many workers in front of engines of these roles. `leader`: the number of the one that
    leads; None: nobody.
    """

    def __init__(
        self, count: int, roles: list[Role], slo: Slo = B, replicas: int = 1, **options: Any
    ) -> None:
        self.memory = AutoMemory(count, 16)
        self.loads = SharedTable(count, 16, worker_ledger.MEASURES)
        self.breakers = SharedTable(count, 16, worker_breakers.MEASURES, worker_breakers.KEPT)
        self.leader: int | None = 0
        self.specs = [EngineSpec(f"http://{number}:1", role) for number, role in enumerate(roles)]
        self._slo, self._replicas, self._options = slo, replicas, options
        self.ledgers = [self.made(number) for number in range(count)]

    def made(self, number: int) -> WorkerLedger:
        share = self.memory.of(number, lambda: number == self.leader)
        column, others = self.breakers.of(number)
        breakers = partial(WorkerBreakers, column=column, others=others, number=number)
        loads = LedgerShare(*self.loads.of(number), breakers)
        how = AutoOptions(times_of=lambda _: (H200, 2048), slo=self._slo, **self._options)
        made: WorkerLedger
        if self._replicas > 1:
            placement = WorkerReplicaAuto(how, share, replicas=self._replicas, chance=lambda: 0.0)
            options = LedgerOptions(breaker_failures=3, breaker_cooldown=10.0, placement=placement)
            made = WorkerReplicaLedger(
                self.specs, options, loads, replicas=self._replicas, max_age=lambda: 15.0
            )
        else:
            options = LedgerOptions(
                breaker_failures=3, breaker_cooldown=10.0, placement=WorkerAuto(how, share)
            )
            made = WorkerLedger(self.specs, options, loads)
        for spec in self.specs:
            made.mark_up(spec.url, EVIDENCE)
        return made

    def killed(self, number: int) -> WorkerLedger:
        """Have a worker killed. Return its successor's ledger."""
        for table in (self.memory, self.loads, self.breakers):
            table.clear(number)
        self.ledgers[number] = self.made(number)
        return self.ledgers[number]

    @property
    def placements(self) -> list[WorkerAuto]:
        return [auto_of(one) for one in self.ledgers]

    def look(self, now: float) -> None:
        for number, one in enumerate(self.ledgers):
            one.refresh(all_of_it=True)
            self.placements[number].look(now)


def auto_of(of: Ledger) -> WorkerAuto:
    assert isinstance(of.placement, WorkerAuto)
    return of.placement


def placed(of: Ledger, now: float, tokens: int = 4000) -> tuple[Lease, ...]:
    assignment = of.place(ask(now, tokens), split=True)
    assert assignment is not None
    return assignment.leases


def urls(leases: tuple[Lease, ...]) -> list[str]:
    return [lease.engine.url for lease in leases]


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("slo", [A, B, Slo()])
def test_workers_choose_what_one_process_would(count: int, slo: Slo) -> None:
    """Each request comes to any of them, and each goes to the engines that a single process
    chooses.
    """
    chance = random.Random(count)
    several, one = Several(count, FIXED, slo), ledger(auto(slo), FIXED)
    open_ones: list[tuple[Ledger, tuple[Lease, ...], tuple[Lease, ...]]] = []
    running: list[tuple[Ledger, Lease, Lease]] = []
    now, splits = 0.0, 0
    for _ in range(600):
        now += chance.expovariate(30.0)
        for _ in range(2):  # each tells at one look, and hears at the next
            several.look(now)
        what = chance.random()
        if what < 0.45:
            of, tokens = chance.choice(several.ledgers), chance.randrange(200, 9000)
            theirs, mine = placed(of, now, tokens), placed(one, now, tokens)
            assert urls(theirs) == urls(mine)
            splits += len(mine) > 1
            open_ones.append((of, theirs, mine))
        elif what < 0.75 and open_ones:
            server, theirs, mine = open_ones.pop(0)
            systems: list[tuple[Ledger, tuple[Lease, ...]]] = [(server, theirs), (one, mine)]
            for system, leases in systems:
                if len(leases) > 1:
                    system.close(leases[0], Verdict.GOOD, now)
                system.began(leases[-1], now)
            running.append((server, theirs[-1], mine[-1]))
        elif running:
            server, theirs_last, mine_last = running.pop(chance.randrange(len(running)))
            tokens = chance.randrange(1, 400)
            server.close(theirs_last, Verdict.GOOD, now, tokens)
            one.close(mine_last, Verdict.GOOD, now, tokens)
    assert isinstance(one.placement, Auto)
    assert (
        splits == one.placement.splits == sum(placement.splits for placement in several.placements)
    )
    assert splits > 50
    expected = one.placement.outputs
    for placement in several.placements:
        placement.look(now)
        for tokens in (300, 3000):
            assert placement.outputs.expected(tokens) == pytest.approx(
                expected.expected(tokens), rel=0.15
            )


def test_an_engine_without_a_profile_is_measured_by_all_together() -> None:
    """16 measurements are enough, whoever made them: until then all choose by load."""
    several, now = Several(4, [Role.AGGREGATED] * 2, Slo(), assumed=lambda _: True), 0.0
    assert "no profile" in (several.placements[3].status() or "")
    for number in range(64):
        now += 0.5
        of = several.ledgers[number % 4]
        leases = placed(of, now)
        of.began(leases[-1], now + 0.3)
        of.close(leases[-1], Verdict.GOOD, now + 0.4, 2)
    several.look(now + 1.0)
    assert [placement.status() for placement in several.placements] == [None] * 4


def _demand(
    several: Several, workers: list[int], now: float, seconds: float, rate: float = 40.0
) -> float:
    """Have requests come to some of the workers, and looks of all. Return when it is over."""
    end, turn, look = now + seconds, 0, now
    begun: deque[tuple[float, WorkerLedger, tuple[Lease, ...]]] = deque()
    running: deque[tuple[float, WorkerLedger, Lease]] = deque()
    while now < end or begun or running:
        now += 1 / rate
        while look <= now:
            several.look(look)
            look += 0.25
        if now < end:
            of = several.ledgers[workers[turn % len(workers)]]
            turn += 1
            begun.append((now, of, placed(of, now)))
        while begun and begun[0][0] < now - 0.15:
            _, of, leases = begun.popleft()
            if len(leases) > 1:
                of.close(leases[0], Verdict.GOOD, now)
            of.began(leases[-1], now)
            running.append((now, of, leases[-1]))
        while running and running[0][0] < now - 0.9:
            _, of, lease = running.popleft()
            of.close(lease, Verdict.GOOD, now, 128)
    return now


def kept(several: Several) -> list[set[str]]:
    return [
        {load.url for load in placement._loads.values() if load.kept}
        for placement in several.placements
    ]


def test_the_leader_decides_for_all_which_engines_are_kept() -> None:
    """It need not have a request itself. When another one leads, that goes on from there; without
    one nothing changes.
    """
    several = Several(3, [Role.ANY] * 8)
    now = _demand(several, [1, 2], 0.0, 10.0)
    first = kept(several)
    assert 0 < len(first[0]) < 8
    assert first[0] == first[1] == first[2]
    shares = {
        group.kept.share for placement in several.placements for group in placement._groups.values()
    }
    assert len(shares) == 1
    assert shares.pop() > 0
    states = [placement.state() for placement in several.placements]
    assert {state.kept for state in states} == {len(first[0])}
    several.leader = None
    several.killed(0)
    several.look(now + 0.1)
    assert kept(several) == first
    now = _demand(several, [1], now, 2.0)
    assert kept(several) == first
    several.leader = 2
    now = _demand(several, [0], now, 20.0, rate=1.0)
    several.look(now)
    assert kept(several) == [set()] * 3


def test_decisions_use_engines_that_another_worker_keeps() -> None:
    """What the leader keeps for prefill gets no answers from a follower's requests either."""
    several = Several(2, [Role.ANY] * 8)
    now = _demand(several, [0, 1], 0.0, 10.0)
    found = kept(several)[1]
    for _ in range(8):
        assert placed(several.ledgers[1], now)[-1].engine.url not in found


def test_demand_is_that_of_all_workers() -> None:
    """Each has the rate of all requests, whoever got them; when one ends and another begins in its
    place, too.
    """
    several, single = Several(2, [Role.ANY] * 4, A), Several(1, [Role.ANY] * 4, A)
    now = 0.0
    for numbers in ([0], [0, 1], [1]):
        _demand(single, [0], now, 8.0)
        now = _demand(several, numbers, now, 8.0)
        rates = []
        for of in (single, several):
            of.look(now + REVIEW_S)
            of.look(now + 2 * REVIEW_S)
            for placement in of.placements:
                (group,) = placement._groups.values()
                demand = group.meter.demand(
                    now + 2 * REVIEW_S, next(iter(placement._loads.values())).times
                )
                assert demand is not None
                rates.append(demand.rate)
        assert rates[1:] == pytest.approx([rates[0]] * 2, rel=0.1)
        several.killed(0)


def test_a_killed_worker_loses_its_requests() -> None:
    """The others choose its engine again, and its successor knows what they have."""
    several = Several(2, [Role.AGGREGATED] * 2, Slo())
    for _ in range(3):
        placed(several.ledgers[0], 1.0)
    busy = placed(several.ledgers[1], 1.0)
    several.killed(0)
    several.look(1.25)
    loads = [
        {load.url: (load.expected, round(load.pending_s, 6)) for load in placement._loads.values()}
        for placement in several.placements
    ]
    assert loads[0] == loads[1]
    assert sorted(count for count, _ in loads[0].values()) == [0, 1]
    assert urls(placed(several.ledgers[0], 1.3)) != urls(busy)


def test_engines_come_and_go() -> None:
    """One that is removed while legs run there comes again with nothing, in all workers."""
    several = Several(2, [Role.AGGREGATED] * 2, Slo())
    first, second = several.ledgers
    leases = placed(first, 1.0)
    url = leases[0].engine.url
    for one in several.ledgers:
        one.remove(url)
    spec = next(spec for spec in several.specs if spec.url == url)
    for one in several.ledgers:
        one.add(spec)
        one.mark_up(url, EVIDENCE)
    first.began(leases[0], 1.2)
    several.look(1.25)
    for placement in several.placements:
        placement.look(1.3)
    assert url in {one for _ in range(2) for one in urls(placed(second, 1.4))}
    first.close(leases[0], Verdict.GOOD, 1.5, 10)
    load = auto_of(first)._loads[url]
    load_there = auto_of(second)._loads[url]
    auto_of(first).look(1.6)
    assert load.expected == load_there.expected
    assert (load.decoding, load_there.decoding) == (0, 0)


def test_models_come_and_go() -> None:
    """Demand for more sets of models than there are rows counts in each worker by itself; those
    that are gone leave theirs.
    """
    several = Several(2, [Role.ANY] * 2)
    for turn in range(100):
        models = Evidence(frozenset({f"model-{turn}"}), "", 16, (), 0, 1.0)
        for one in several.ledgers:
            for spec in several.specs:
                one.mark_up(spec.url, models)
        several.look(turn * 1.0)
    assert all(len(placement._meters) == 1 for placement in several.placements)
    assert several.memory.demand.column(0)._free


def test_another_objective_is_reviewed_anew() -> None:
    """Each worker takes it by itself. Engines that were kept for the one before are not for this
    one.
    """
    several = Several(2, [Role.ANY] * 8)
    now = _demand(several, [0, 1], 0.0, 10.0)
    assert kept(several)[0]
    for placement in several.placements:
        placement.configure(Slo(ttft=0.5, tpot=0.03), refuses=False)
    _demand(several, [0, 1], now, 30.0)
    assert kept(several) == [set(), set()]


def test_answers_that_come_as_a_whole_begin_for_all() -> None:
    """Their first token is not seen: it is taken to be there at its time, although their worker has
    nothing else to do.
    """
    several = Several(2, [Role.AGGREGATED] * 2, A)
    several.look(0.0)
    assert several.ledgers[0].place(ask(0.1, stream=False), split=True) is not None
    for now, counts in ((0.15, (1, 0)), (1.0, (0, 1))):
        several.look(now)
        several.look(now)
        for placement in several.placements:
            loads = placement._loads.values()
            assert (
                sum(load.expected for load in loads),
                sum(load.decoding for load in loads),
            ) == counts


def test_how_old_the_others_changes_are_is_measured() -> None:
    several = Several(2, [Role.AGGREGATED] * 2, Slo())
    several.look(0.5)
    placed(several.ledgers[0], 1.0)
    assert several.placements[1].state().shared_age == 0.0
    placed(several.ledgers[1], 1.5)
    assert several.placements[1].state().shared_age == pytest.approx(0.5)
    assert auto().state().shared_age is None


def test_workers_of_a_replica_see_what_other_replicas_are_estimated_to_have() -> None:
    """Of two replicas with two workers each, a worker sees its sibling's requests once, and those
    of both twice.
    """
    several = Several(2, [Role.AGGREGATED] * 2, Slo(), replicas=2)
    single = Several(1, [Role.AGGREGATED] * 2, Slo(), replicas=2)
    chance, now = random.Random(2), 0.0
    running: list[tuple[Ledger, tuple[Lease, ...], tuple[Lease, ...]]] = []
    for _ in range(300):
        now += 0.05
        several.look(now)
        single.look(now)
        if running and chance.random() < 0.5:
            server, theirs, mine = running.pop(0)
            pair: list[tuple[Ledger, tuple[Lease, ...]]] = [
                (server, theirs),
                (single.ledgers[0], mine),
            ]
            for system, leases in pair:
                system.began(leases[-1], now)
                system.close(leases[-1], Verdict.GOOD, now, 100)
            continue
        of = chance.choice(several.ledgers)
        theirs, mine = placed(of, now), placed(single.ledgers[0], now)
        assert urls(theirs) == urls(mine)
        running.append((of, theirs, mine))


@pytest.mark.parametrize(("replicas", "kind"), [(None, WorkerAuto), (2, WorkerReplicaAuto)])
def test_the_settings_choose_the_kind(replicas: int | None, kind: type) -> None:
    share = AutoMemory(2, 4).of(0, lambda: True)
    assert type(make_auto(PlacementContext(workers=share, replicas=replicas))) is kind


def test_changes_of_engines_that_nobody_looks_at_are_known_by_their_orders() -> None:
    """They are enough to find the engines that are worth a look. The rest is taken when one is
    looked at.
    """
    several, now = Several(3, [Role.AGGREGATED] * 6, Slo()), 1.0
    for number in (0, 1, 0, 0):
        now += 0.01
        placed(several.ledgers[number], now)
    mine, theirs = auto_of(several.ledgers[2]), auto_of(several.ledgers[0])
    for engine in several.ledgers[2].engines:
        mine._load(engine)  # as a review does
    several.look(now)
    several.look(now)
    placed(several.ledgers[1], now)
    mine._read(now)
    theirs._read(now)
    for url, load in mine._of_key.items():
        known = theirs._of_key[url]
        assert (load.prefill_order, load.decode_order) == pytest.approx(
            (known.prefill_order, known.decode_order)
        )
    marked = [load for load in mine._of_key.values() if load.is_marked]
    assert len(marked) == 1
    before = marked[0].expected
    marked[0].advance(now)
    assert (marked[0].expected, marked[0].is_marked) == (before + 1, False)
