"""How many engines a load needs is right whatever engines there are, and prefill engines are never
wanted for what waits for decode engines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import pairwise

import pytest
from msgspec import structs

from pdproxy.engine_model.hardware import Hardware
from pdproxy.scheduling.auto.auto import Auto, AutoOptions
from pdproxy.scheduling.auto.times import WorkTimes
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import REVISION, EngineSpec, Evidence, Role
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.slo import NO_SLO, Slo
from pdproxy.scheduling.wanted_engines import (
    BUSY,
    MEMORY_S,
    TPOT_PART,
    WAIT_S,
    EngineSize,
    WantedEngines,
)

HARDWARE = Hardware(
    prefill_tokens_per_s=10_000.0, decode_step_s=0.0101, decode_step_per_seq_s=0.000_1
)
"""A prompt's token takes 0.1 ms, a step 10 ms and 0.1 ms for each sequence."""
TIMES = WorkTimes(HARDWARE, 8192)
PROFILE = EngineSize(times=TIMES, max_num_seqs=250, kv_tokens=400_000)
LEARNED = EngineSize(max_num_seqs=250, kv_tokens=400_000)
SPLIT = (Role.PREFILL, Role.DECODE)


class World:
    """A pool in virtual time. Each engine prefills one prompt after the other, and answers `places`
    sequences at once.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        size: EngineSize = PROFILE,
        slo: Slo = NO_SLO,
        *,
        places: int = 1000,
        revisions: int = 1,
    ) -> None:
        self.wanted = WantedEngines(lambda _: size, slo)
        options = LedgerOptions(breaker_failures=3, breaker_cooldown=10.0, wanted=self.wanted)
        specs = [
            EngineSpec(
                f"http://{number}:1",
                role,
                within=((REVISION, str(number % revisions)),) if revisions > 1 else (),
            )
            for number, role in enumerate(roles)
        ]
        self.ledger = Ledger(specs, options)
        for spec in specs:
            self.ledger.mark_up(spec.url, Evidence(frozenset({"m"}), "", 16, (), 0, 1.0))
        self.now, self.places = 0.0, places
        self._free_at = dict.fromkeys([spec.url for spec in specs], 0.0)
        self._running = dict.fromkeys([spec.url for spec in specs], 0)
        self._lines: dict[str, list[Callable[[], None]]] = {spec.url: [] for spec in specs}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, time: float, what: Callable[[], None]) -> None:
        self._number += 1
        heappush(self._events, (time, self._number, what))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, what = heappop(self._events)
            what()
        self.now = until

    def load(
        self,
        rate: float,
        prompt: int,
        output: int,
        *,
        seconds: float = 400.0,
        split: bool = True,
        prefill_s: float = 0.05,
        answer_s: float = 1.0,
    ) -> None:
        begin = self.now
        for number in range(round(rate * seconds)):
            self.at(
                begin + number / rate,
                lambda: self._come(prompt, output, split, prefill_s, answer_s),
            )
        self.run(begin + seconds)

    def _come(
        self, prompt: int, output: int, split: bool, prefill_s: float, answer_s: float
    ) -> None:
        ask = Ask("m", 4 * prompt, self.now)
        assignment = self.ledger.assign(SPLIT, ask) if split else None
        if assignment is None:
            lease = self.ledger.assign_alone(ask)
            assert lease is not None
            self.answer(lease, output, prefill_s + answer_s)
            return
        first, last = assignment.leases
        url = first.engine.url
        self._free_at[url] = max(self._free_at[url], self.now) + prefill_s

        def prefilled() -> None:
            self.ledger.close(first, Verdict.GOOD, self.now)
            self.answer(last, output, answer_s)

        self.at(self._free_at[url], prefilled)

    def answer(self, lease: Lease, output: int, seconds: float) -> None:
        url = lease.engine.url

        def begin() -> None:
            self._running[url] += 1
            self.at(self.now + seconds, end)

        def end() -> None:
            self._running[url] -= 1
            self.ledger.close(lease, Verdict.GOOD, self.now, output)
            if self._lines[url]:
                self._lines[url].pop(0)()

        if self._running[url] < self.places:
            begin()
        else:
            self._lines[url].append(begin)

    def needed(self, waiting: float = 0.0) -> dict[str, float]:
        found = self.wanted.needed(self.now, waiting)
        return {role.value: wanted.engines for role, wanted in found.items()}

    def because(self, role: Role) -> str:
        return self.wanted.needed(self.now)[role].because


def kept_by(mean: float) -> Slo:
    """Return the SLO that nearly all requests keep at this mean. The shortest step takes 10 ms."""
    return Slo(tpot=0.010 + (mean - 0.010) / TPOT_PART)


P, D, A, ANY, E = Role.PREFILL, Role.DECODE, Role.AGGREGATED, Role.ANY, Role.ENCODE


@pytest.mark.parametrize("engines", [1, 2, 5])
@pytest.mark.parametrize(
    ("load", "slo", "busy", "decode", "because"),
    [
        # 10 prompts with 0.1 s of work; 1000 tokens with 0.1 ms, and 10 ms for 200 sequences
        ((10.0, 1000, 100), NO_SLO, 1.0, 0.1 + 1000 * 0.010 / 200, "sequences"),
        ((10.0, 2000, 100), NO_SLO, 2.0, 0.1 + 1000 * 0.010 / (340_000 / 2050), "KV"),
        # a step of 20 ms has 100 sequences, one of 12.5 ms 25
        ((10.0, 1000, 100), kept_by(0.020), 1.0, 0.1 * 2, "TPOT"),
        ((10.0, 1000, 100), kept_by(0.0125), 1.0, 0.1 * 5, "TPOT"),
        # no step is that short: that no engine can keep it does not count
        ((10.0, 1000, 100), Slo(tpot=0.005), 1.0, 0.1 + 1000 * 0.010 / 200, "sequences"),
        # just longer than a step: no more engines than sequences
        ((10.0, 1000, 100), kept_by(0.010_000_1), 1.0, 0.1 + 1000 * 0.010_000_1, "TPOT"),
    ],
)
def test_by_a_profile(
    engines: int,
    load: tuple[float, int, int],
    slo: Slo,
    busy: float,
    decode: float,
    because: str,
) -> None:
    """The same whether there are few engines or many: these have answers of 0.1 s. `busy`: prefill
    engines that work all the time.
    """
    world = World([P] * engines + [D] * engines, slo=slo)
    world.load(*load, answer_s=0.1)
    assert world.needed() == pytest.approx({"prefill": busy / BUSY, "decode": decode}, rel=0.03)
    assert world.because(D) == because


def test_cached_tokens_are_no_work() -> None:
    """But the others are compared with them: 0.1 s for the tokens, and 0.05 s for their pairs."""
    times = WorkTimes(structs.replace(HARDWARE, attention_s=1e-7), 8192)
    world = World([P, D], EngineSize(times=times, max_num_seqs=250))
    world.load(10.0, 1000, 100, seconds=200.0)
    assert world.needed()["prefill"] == pytest.approx(10 * 0.15 / BUSY, rel=0.03)
    for _ in range(100):
        world.wanted.found_cached(P, 75_000.0, 100_000.0)
    seconds = 0.1 / 4 + 0.05 * (1 - 0.75**2)
    assert world.needed()["prefill"] == pytest.approx(10 * seconds / BUSY, rel=0.03)


def test_prompts_have_as_many_tokens_as_engines_count() -> None:
    """A fourth of the bytes is only the first estimate."""
    world = World([P, D])
    world.load(10.0, 1000, 100, seconds=200.0)
    for number in range(300):
        found = world.ledger.assign(SPLIT, Ask("m", 4000, 200.0))
        assert found is not None
        world.wanted.counted(found.leases[0], 1500 if number else 0)
        for lease in found.leases:
            world.wanted.never_sent(lease)
            world.ledger.close(lease, Verdict.NEUTRAL, 200.0)
    world.load(10.0, 1000, 100, seconds=1.0)
    assert world.needed()["prefill"] == pytest.approx(1.5 / BUSY, rel=0.03)


@pytest.mark.parametrize("role", [A, ANY, D])
def test_engines_that_serve_whole_need_both(role: Role) -> None:
    world = World([role] * 2, slo=kept_by(0.020))
    world.load(10.0, 1000, 100, split=False)
    assert world.needed()[role.value] == pytest.approx((0.1 + 1.0) * 2, rel=0.03)


def test_engines_of_role_any_need_both() -> None:
    world = World([ANY] * 3, slo=kept_by(0.020))
    world.load(10.0, 1000, 100)
    assert world.needed() == pytest.approx({"any": 1.0 / BUSY + 0.1 * 2}, rel=0.03)


def test_a_placement_is_told_of_as_well() -> None:
    wanted = WantedEngines(lambda _: PROFILE)
    specs = [EngineSpec("http://0:1", ANY), EngineSpec("http://1:1", ANY)]
    ledger = Ledger(
        specs,
        LedgerOptions(
            breaker_failures=3,
            breaker_cooldown=10.0,
            placement=Auto(AutoOptions(times_of=lambda _: (HARDWARE, 8192), slo=NO_SLO)),
            wanted=wanted,
        ),
    )
    for spec in specs:
        ledger.mark_up(spec.url, Evidence(frozenset({"m"}), "", 16, (), 0, 1.0))
    for number in range(1000):
        found = ledger.place(Ask("m", 4000, number / 10), split=True)
        assert found is not None
        for lease in found.leases:
            ledger.close(lease, Verdict.GOOD, number / 10 + 0.05, 100)
    assert wanted.needed(100.0)[ANY].engines == pytest.approx(1.0 / BUSY, rel=0.1)


def test_without_a_profile_what_engines_do_is_learned() -> None:
    world = World([P] * 3 + [D] * 3, LEARNED)
    world.load(10.0, 1000, 100, prefill_s=0.15, answer_s=8.0, seconds=1.0)
    world.run(100.0)
    assert "prefill" not in world.needed()  # too few prompts
    world.load(10.0, 1000, 100, prefill_s=0.15, answer_s=8.0)
    assert world.needed() == pytest.approx({"prefill": 1.5 / BUSY, "decode": 80 / 200}, rel=0.05)


def test_a_prompt_that_waits_at_an_engine_makes_it_no_slower() -> None:
    """Two engines have work for two and a half."""
    world = World([P] * 2 + [D], LEARNED)
    world.load(10.0, 1000, 100, prefill_s=0.25, answer_s=0.5, seconds=200.0)
    late = 200 * 10 / 5 * 0.25 / WAIT_S
    assert world.needed()["prefill"] == pytest.approx(2.5 / BUSY + late, rel=0.03)


def test_without_a_profile_answers_are_as_slow_as_they_were_with_fewer_engines() -> None:
    """Else an engine would be removed that is needed again at once."""
    world = World([P] + [D] * 3, LEARNED)
    world.load(10.0, 1000, 100, answer_s=8.0)
    before = world.needed()["decode"]
    world.load(10.0, 1000, 100, answer_s=4.0)
    assert world.needed()["decode"] == pytest.approx(before, rel=0.15)
    for _ in range(10):  # two hours in which they are as fast
        world.load(10.0, 1000, 100, answer_s=4.0, seconds=720.0)
        after = world.needed()["decode"]
    assert after == pytest.approx(before / 2, rel=0.05)


def test_without_any_size_nothing_is_made_up() -> None:
    world = World([P, D], EngineSize())
    world.load(10.0, 1000, 100)
    assert world.needed().keys() == {"prefill"}


def test_a_backlog_counts_and_goes() -> None:
    """Here prompts take three times as long as the profile says, at one engine."""
    world = World([P, D])
    world.load(10.0, 1000, 100, prefill_s=0.3, seconds=300.0)
    late = 300 * 10 * 2 / 3
    assert world.needed()["prefill"] == pytest.approx(1.0 / BUSY + late * 0.1 / WAIT_S, rel=0.02)
    world.run(1200.0)
    assert world.needed()["prefill"] < 0.01


@pytest.mark.parametrize("size", [PROFILE, LEARNED])
def test_a_load_that_waits_for_decode_engines_wants_no_prefill_engines(size: EngineSize) -> None:
    easy, hard = World([P, P, D], size), World([P, P, D], size, places=20)
    for world in (easy, hard):
        world.load(10.0, 1000, 100, answer_s=4.0, seconds=100.0)
    assert hard.needed()["decode"] > 2 * easy.needed()["decode"]
    # the decode engine takes 20 of 40 sequences: the prefill engines are full of KV that it has not
    # read, and prompts wait there
    for world, prefill_s in ((easy, 0.05), (hard, 0.4)):
        for _ in range(20):
            world.load(10.0, 1000, 100, answer_s=4.0, seconds=10.0, prefill_s=prefill_s)
            world.needed()
    assert hard.wanted._work[P].waiting > 100
    wanted, without = hard.needed(waiting=500.0), hard.needed()
    assert wanted["prefill"] == pytest.approx(easy.needed()["prefill"], rel=0.02)
    assert wanted["decode"] == pytest.approx(without["decode"] + 500 / 200, rel=0.02)


def test_what_waits_for_a_place_counts_for_the_engines_that_are_full() -> None:
    idle = World([P] * 3 + [D] * 3)
    idle.load(10.0, 1000, 100)
    assert idle.needed(waiting=500.0) == idle.needed()
    busy = World([P] + [D] * 3)
    busy.load(10.0, 1000, 100, prefill_s=0.1)
    more, less = busy.needed(waiting=600.0), busy.needed()
    assert more["prefill"] == pytest.approx(less["prefill"] + 600 * 0.1 / WAIT_S, rel=0.02)
    assert more["decode"] == less["decode"]
    # both are full, and prefill engines lack more: it may wait for decode engines
    both = World([P, D], places=250)
    both.load(20.0, 1000, 100, prefill_s=0.05, answer_s=10.5)
    more, less = both.needed(waiting=600.0), both.needed()
    assert less["prefill"] > 2 * less["decode"] > 2
    assert more["prefill"] == less["prefill"]
    assert more["decode"] == pytest.approx(less["decode"] + 600 / 200, rel=0.02)


def test_encoders_are_as_busy_as_they_are() -> None:
    world = World([E, E, D], LEARNED)

    def come() -> None:
        found = world.ledger.assign((E,), Ask("m", 400_000, world.now))
        assert found is not None
        lease = found.leases[0]
        world.at(world.now + 0.2, lambda: void(world.ledger.close(lease, Verdict.GOOD, world.now)))

    for number in range(2000):
        world.at(number / 5, come)
    world.run(400.0)
    assert world.needed() == pytest.approx({"encode": 5 * 0.2 / BUSY, "decode": 0.0}, rel=0.03)


def void(_: object) -> None:
    """Take what nobody needs."""


def test_without_traffic_the_demand_is_0_once_that_is_known() -> None:
    world = World([P, D], LEARNED)
    assert world.needed() == {}
    world.now = MEMORY_S
    assert world.needed() == {"prefill": 0.0, "decode": 0.0}


def test_a_demand_falls_smoothly_once_nothing_comes_any_more() -> None:
    world, found = World([P, D]), []
    world.load(10.0, 1000, 100)
    for _ in range(90):
        world.run(world.now + 15.0)
        found.append(world.needed())
    for role, first in (("prefill", 1.0 / BUSY), ("decode", 0.15)):
        values = [one[role] for one in found]
        assert values[0] < first
        assert all(after <= before for before, after in pairwise(values))
        assert values[-1] == 0.0


def test_revisions_of_a_pool_count_together() -> None:
    one, two = World([P, P, D, D]), World([P, P, D, D], revisions=2)
    for world in (one, two):
        world.load(10.0, 1000, 100)
    assert two.needed() == pytest.approx(one.needed(), rel=0.01)


def test_a_lease_that_is_given_up_or_is_an_old_one_is_no_request() -> None:
    world, plain = World([P, D, A]), World([P, D, A])
    for each in (world, plain):
        each.load(10.0, 1000, 100, seconds=200.0)
    for _ in range(500):
        found = world.ledger.assign(SPLIT, Ask("m", 4000, world.now))
        alone = world.ledger.assign_alone(Ask("m", 4000, world.now))
        assert found is not None
        assert alone is not None
        for lease in (*found.leases, alone):
            world.wanted.never_sent(lease)
            world.ledger.close(lease, Verdict.NEUTRAL, world.now)
    for role, url in ((P, "http://0:1"), (D, "http://1:1"), (A, "http://2:1")):
        restored = world.ledger.restore(url, role, 4000, world.now - 50.0)
        assert restored is not None
        world.ledger.close(restored, Verdict.NEUTRAL, world.now)
    assert world.needed() == pytest.approx(plain.needed())
    for mine, others in zip(world.wanted._work.values(), plain.wanted._work.values(), strict=True):
        assert (mine.open, mine.waiting) == (others.open, others.waiting)
        assert (mine.prompts, mine.waiting_tokens) == (others.prompts, others.waiting_tokens)


@pytest.mark.parametrize("verdict", list(Verdict))
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_nothing_is_left_of_leases_in_any_order(verdict: Verdict, order: tuple[int, int]) -> None:
    world = World([P, D])
    found = world.ledger.assign(SPLIT, Ask("m", 4000, 0.0))
    assert found is not None
    for place in order:
        world.ledger.close(found.leases[place], verdict, 1.0, 10)
    wanted = world.wanted
    assert found.leases[0].answering is None
    wanted.needed(1.0)
    assert all(
        (work.open, work.prompts, work.waiting, work.waiting_tokens) == (0, 0, 0, 0)
        for work in wanted._work.values()
    )


def test_numbers_that_nobody_should_send() -> None:
    world = World([P, D, A], slo=Slo(tpot=1e-12))
    ledger, wanted = world.ledger, world.wanted
    world.load(10.0, 1000, 100, seconds=100.0)
    for number in range(200):
        now = (math.nan, math.inf, 0.0, -5.0, 1e300)[number % 5]
        tokens = (0, 1, 2**40, 10**30, None)[number % 5]
        ask = Ask("m", (0, 10**18)[number % 2], now, tokens)
        found = ledger.assign(SPLIT, ask) or ledger.assign((A,), ask)
        assert found is not None
        for lease in found.leases:
            wanted.counted(lease, (0, 2**40)[number % 2])
            ledger.close(lease, Verdict.GOOD, now, (0, 2**40, None)[number % 3])
        for cached, prompts in ((math.nan, 1.0), (5.0, 1.0), (-1.0, 1.0), (1.0, math.inf)):
            wanted.found_cached(P, cached, prompts)
        for waiting in (1e300, math.nan, math.inf, -1.0, 0.0):
            for at in (math.nan, now, 200.0):
                found_now = wanted.needed(at, waiting)
                assert all(0.0 <= one.engines < math.inf for one in found_now.values())
        assert found_now.keys() == {P, D, A}


def test_a_clock_that_stands_still() -> None:
    world = World([P, D])
    world.load(10.0, 1000, 100)
    before = world.needed()
    for _ in range(100):
        world.load(1e9, 1000, 100, seconds=1e-8)
    after = world.needed()
    work_s = 1000 * 0.1
    expected = before["prefill"] + work_s / MEMORY_S / BUSY + work_s / WAIT_S
    assert after["prefill"] == pytest.approx(expected, rel=0.03)
