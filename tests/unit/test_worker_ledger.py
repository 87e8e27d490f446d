"""Workers that choose by the load of all: as one ledger would, whatever comes, goes and is
killed.
"""

from __future__ import annotations

import random
from collections import Counter
from weakref import WeakKeyDictionary

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdproxy.kit.shared_table import SharedTable
from pdproxy.scheduling import policies, worker_breakers
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.worker_ledger import MEASURES, READ_EVERY, LedgerShare, WorkerLedger
from tests.unit.test_worker_breakers import shared

EVIDENCE = Evidence(frozenset({"m"}), "1", 16, ((1, 2),), 5, 1.0)
SPLIT = (Role.PREFILL, Role.DECODE)
CLIENTS, STEPS = 64, 6400


_BREAKERS: WeakKeyDictionary[SharedTable, SharedTable] = WeakKeyDictionary()


def breakers_of(table: SharedTable) -> SharedTable:
    """The table of breakers beside a table of loads."""
    return _BREAKERS.setdefault(
        table, SharedTable(8, 256, worker_breakers.MEASURES, worker_breakers.KEPT)
    )


def _shared(
    table: SharedTable,
    number: int,
    specs: list[EngineSpec],
    policy: str = "least_load",
    seed: int = 0,
) -> WorkerLedger:
    make = policies.POLICIES[policy]
    made = WorkerLedger(
        specs,
        LedgerOptions(
            breaker_failures=2,
            breaker_cooldown=10,
            policies={Role.PREFILL: make, Role.DECODE: make},
            chance=random.Random(seed + number).random,
        ),
        LedgerShare(*table.of(number), shared(breakers_of(table), number)),
    )
    for spec in specs:
        made.mark_up(spec.url, EVIDENCE)
    return made


def _one(specs: list[EngineSpec], policy: str) -> Ledger:
    make = policies.POLICIES[policy]
    made = Ledger(
        specs,
        LedgerOptions(
            breaker_failures=2,
            breaker_cooldown=10,
            policies={Role.PREFILL: make, Role.DECODE: make},
            chance=random.Random(0).random,
        ),
    )
    for spec in specs:
        made.mark_up(spec.url, EVIDENCE)
    return made


def _specs(count: int) -> list[EngineSpec]:
    half = count // 2
    return [EngineSpec(f"p{at}", Role.PREFILL) for at in range(half)] + [
        EngineSpec(f"d{at}", Role.DECODE) for at in range(count - half)
    ]


def _spread(ledgers: list[Ledger], seed: int) -> tuple[float, int]:
    """Serve 64 clients; return the most requests of a decode engine over the mean, and the most
    that one had at once.
    """
    chance = random.Random(seed)
    of_client = [chance.choice(ledgers) for _ in range(CLIENTS)]
    open_leases: dict[int, tuple[Ledger, list[Lease]]] = {}
    served: Counter[str] = Counter()
    now_has: Counter[str] = Counter()
    most = 0
    for step in range(STEPS):
        client = chance.randrange(CLIENTS)
        if client in open_leases:
            ledger, leases = open_leases.pop(client)
            for lease in leases:
                now_has[lease.engine.url] -= 1
                ledger.close(lease, Verdict.GOOD, step)
        ledger = of_client[client]
        ask = Ask("m", chance.randrange(100, 5000), step, session=f"conversation {client}")
        got = ledger.assign(SPLIT, ask)
        assert got is not None
        open_leases[client] = ledger, [got[role] for role in SPLIT]
        url = got[Role.DECODE].engine.url
        served[url] += 1
        now_has[url] += 1
        most = max(most, now_has[url])
    return max(served.values()) / (STEPS / 100), most


@pytest.mark.parametrize("policy", ["least_load", "power_of_two", "round_robin", "session"])
@pytest.mark.parametrize("workers", [2, 8])
def test_workers_spread_load_as_one_process_does(policy: str, workers: int) -> None:
    """200 engines, 64 clients: the engine with the most requests has at most 1.1 times as many, in
    sum and at once.
    """
    specs, table = _specs(200), SharedTable(workers, 256, MEASURES)
    several = _spread([_shared(table, number, specs, policy) for number in range(workers)], 0)
    one = _spread([_one(specs, policy)], 0)
    assert several[0] <= 1.1 * one[0]
    if policy != "round_robin":  # it does not look at loads
        assert several[1] <= one[1]


def test_loads_are_read_once_a_millisecond() -> None:
    """A worker with much to do begins several requests with what it has read, and its own leases;
    then it sees the others'.
    """
    specs, table = _specs(4), SharedTable(2, 8, MEASURES)
    first, second = (_shared(table, number, specs) for number in range(2))
    second.assign(SPLIT, Ask("m", 1000, 5.0))
    for _ in range(6):
        first.assign(SPLIT, Ask("m", 1000, 5.0))
    second.assign(SPLIT, Ask("m", 1000, 5.0 + READ_EVERY / 2))
    assert sum(engine.requests for engine in second.engines) == 4
    second.assign(SPLIT, Ask("m", 1000, 5.0 + READ_EVERY))
    assert sum(engine.requests for engine in second.engines) == 18
    assert max(engine.requests for engine in second.engines if engine.role is Role.DECODE) == 5


@pytest.mark.parametrize("policy", ["least_load", "power_of_two", "session"])
def test_what_is_read_late_adds_little_to_an_engine(policy: str) -> None:
    """8 workers begin 8,000 requests per second, 640 are open: no engine of 64 has many more than
    with one process.
    """
    specs, table = _specs(128), SharedTable(8, 128, MEASURES)
    several: list[Ledger] = [_shared(table, number, specs, policy) for number in range(8)]
    most = [
        _most_at_once(ledgers, 640, 2000, 1 / 8000) for ledgers in (several, [_one(specs, policy)])
    ]
    assert most[0] <= most[1] + 4


def _most_at_once(ledgers: list[Ledger], open_at_once: int, requests: int, every: float) -> int:
    """Begin a request `every` so many seconds. Return the most that a decode engine ever had of
    them.
    """
    chance = random.Random(3)
    leases: list[tuple[Ledger, list[Lease]]] = []
    now_has: Counter[str] = Counter()
    most = 0
    for number in range(requests):
        if len(leases) == open_at_once:
            ledger, both = leases.pop(chance.randrange(open_at_once))
            for lease in both:
                now_has[lease.engine.url] -= 1
                ledger.close(lease, Verdict.GOOD, number * every)
        ledger = ledgers[chance.randrange(len(ledgers))]
        got = ledger.assign(
            SPLIT, Ask("m", 1000, number * every, session=f"conversation {chance.randrange(500)}")
        )
        assert got is not None
        leases.append((ledger, [got[role] for role in SPLIT]))
        now_has[got[Role.DECODE].engine.url] += 1
        most = max(most, now_has[got[Role.DECODE].engine.url])
    return most


def test_workers_that_choose_at_the_same_moment() -> None:
    """None has seen the others' choice: at most all of them meet at one engine, and the next
    choices make up for it.
    """
    workers, specs = 8, _specs(64)
    table = SharedTable(workers, 64, MEASURES)
    ledgers = [_shared(table, number, specs) for number in range(workers)]
    for _ in range(50):
        for ledger in ledgers:
            ledger.refresh()
        for ledger in ledgers:
            assert Ledger.assign(ledger, SPLIT, Ask("m", 1000, 0.0)) is not None
    for ledger in ledgers:
        ledger.refresh()
    decode = [engine.requests for engine in ledgers[0].engines if engine.role is Role.DECODE]
    assert sum(decode) == 50 * workers
    assert max(decode) <= sum(decode) / len(decode) + workers


def test_a_dead_workers_leases_count_no_more() -> None:
    """The others choose by what is left, and its successor begins with their load."""
    specs = _specs(4)
    table = SharedTable(2, 8, MEASURES)
    first, second = (_shared(table, number, specs) for number in range(2))
    for _ in range(6):
        first.assign(SPLIT, Ask("m", 1000, 0.0))
    second.assign(SPLIT, Ask("m", 500, 0.0))
    assert sum(engine.requests for engine in second.engines) == 14
    table.clear(0)
    second.refresh()
    assert sum(engine.requests for engine in second.engines) == 2
    after = _shared(table, 0, specs)
    assert sum(engine.requests for engine in after.engines) == 2
    assert sum(engine.prompt_bytes for engine in after.engines) == 500
    assert {engine.elsewhere for engine in after.engines} == {(0, 0), (1, 500), (1, 0)}


def test_an_engine_leaves_and_comes_back_in_one_worker_first() -> None:
    """Each worker follows the settings by itself: what the other still has is there when the engine
    is back.
    """
    specs = _specs(2)
    table = SharedTable(2, 8, MEASURES)
    first, second = (_shared(table, number, specs) for number in range(2))
    lease = first.assign_alone(Ask("m", 100, 0.0))
    assert lease is not None
    second.refresh()
    removed = next(engine for engine in second.engines if engine.url == "d0")
    assert (removed.requests, removed.elsewhere) == (1, (1, 100))
    second.remove("d0")
    assert (removed.requests, removed.elsewhere) == (0, (0, 0))
    first.remove("d0")
    second.add(EngineSpec("d0", Role.DECODE))
    assert next(engine for engine in second.engines if engine.url == "d0").requests == 1
    first.close(lease, Verdict.GOOD, 1.0)
    second.refresh()
    assert next(engine for engine in second.engines if engine.url == "d0").requests == 0
    assert "d0" in first._slots
    first.refresh(all_of_it=True)
    assert first._slots.keys() == {"p0"}


def test_an_engine_without_space_in_the_table_is_shared_once_there_is_some() -> None:
    """Until then the others know nothing of its load. The worker itself counts it, whenever its
    leases end.
    """
    specs, more = _specs(2), EngineSpec("d9", Role.DECODE)
    table = SharedTable(2, 2, MEASURES)
    first, second = (_shared(table, number, specs) for number in range(2))
    for ledger in (first, second):
        ledger.add(more)
        ledger.mark_up("d9", EVIDENCE)
    leases = [first.assign_alone(Ask("m", 100, 0.0), without=("d0",)) for _ in range(3)]
    assert [lease and lease.engine.url for lease in leases] == ["d9"] * 3
    second.refresh(all_of_it=True)
    assert _of(second, "d9") == (0, 0)
    first.close(_there(leases[0]), Verdict.GOOD, 0.0)
    first.remove("p0")
    first.refresh(all_of_it=True)
    second.refresh(all_of_it=True)
    assert _of(first, "d9") == _of(second, "d9") == (2, 200)
    for lease in leases[1:]:
        first.close(_there(lease), Verdict.GOOD, 0.0)
    second.refresh()
    assert _of(first, "d9") == _of(second, "d9") == (0, 0)


def test_an_engine_that_is_back_has_the_leases_that_it_had() -> None:
    """For the others: in their eyes it was never gone. Its slot is forgotten with the last lease,
    if it stays away.
    """
    table = SharedTable(2, 8, MEASURES)
    first, second = (_shared(table, number, _specs(2)) for number in range(2))
    old = _there(first.assign_alone(Ask("m", 100, 0.0)))
    first.remove("d0")
    first.add(EngineSpec("d0", Role.DECODE))
    first.mark_up("d0", EVIDENCE)
    new = _there(first.assign_alone(Ask("m", 10, 0.0)))
    second.refresh()
    assert _of(second, "d0") == (2, 110)
    first.close(old, Verdict.GOOD, 0.0)
    first.refresh(all_of_it=True)
    second.refresh()
    assert _of(first, "d0") == _of(second, "d0") == (1, 10)
    first.remove("d0")
    first.refresh(all_of_it=True)
    first.close(new, Verdict.GOOD, 0.0)
    assert "d0" in first._slots
    first.refresh(all_of_it=True)
    assert first._slots.keys() == {"p0"}
    assert not first._unsettled


def _there(lease: Lease | None) -> Lease:
    assert lease is not None
    return lease


def _of(ledger: WorkerLedger, url: str) -> tuple[int, int]:
    """The load of an engine as a worker knows it."""
    return next(
        (engine.requests, engine.prompt_bytes) for engine in ledger.engines if engine.url == url
    )


class Workers(RuleBasedStateMachine):
    """Any course of two workers, beside a count of their leases."""

    def __init__(self) -> None:
        super().__init__()
        self.specs = _specs(6)
        self.table = SharedTable(2, 8, MEASURES)
        self.ledgers = [_shared(self.table, number, self.specs) for number in range(2)]
        self.open: list[list[Lease]] = [[], []]

    @rule(number=st.integers(0, 1), size=st.integers(0, 999))
    def lease(self, number: int, size: int) -> None:
        got = self.ledgers[number].assign(SPLIT, Ask("m", size, 0.0))
        if got is not None:
            self.open[number] += [got[role] for role in SPLIT]

    @rule(number=st.integers(0, 1), at=st.integers(0, 99))
    def close(self, number: int, at: int) -> None:
        if leases := self.open[number]:
            self.ledgers[number].close(leases.pop(at % len(leases)), Verdict.NEUTRAL, 0.0)

    @rule(number=st.integers(0, 1))
    def killed(self, number: int) -> None:
        self.table.clear(number)
        self.open[number] = []
        self.ledgers[number] = _shared(self.table, number, self.specs)

    @rule(number=st.integers(0, 1), at=st.integers(0, 5))
    def comes_and_goes(self, number: int, at: int) -> None:
        spec, ledger = self.specs[at], self.ledgers[number]
        if any(lease.engine.url == spec.url for lease in self.open[number]):
            return  # legs of the old engine count for it alone
        ledger.remove(spec.url)
        ledger.add(spec)
        ledger.mark_up(spec.url, EVIDENCE)

    @invariant()
    def all_see_the_load_of_all(self) -> None:
        wanted: Counter[str] = Counter(lease.engine.url for leases in self.open for lease in leases)
        sizes: Counter[str] = Counter()
        for lease in (one for leases in self.open for one in leases):
            sizes[lease.engine.url] += lease.prompt_bytes
        for ledger in self.ledgers:
            ledger.refresh()
            assert {engine.url: engine.requests for engine in ledger.engines} == {
                one.url: wanted[one.url] for one in self.specs
            }
            assert {engine.url: engine.prompt_bytes for engine in ledger.engines} == {
                one.url: sizes[one.url] for one in self.specs
            }


TestWorkers = Workers.TestCase
TestWorkers.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
