"""Predicted waits and times of service: by what has ended, without a clock."""

import heapq
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.kit.fair_queue import FairQueue, TenantRequest
from pdproxy.scheduling.waits import Waits


def test_nothing_is_said_before_something_has_ended() -> None:
    waits = Waits()
    assert waits.wait(5.0, 100.0) is None
    assert waits.service(0.0, 100) == (0.0, 0.0)


def test_the_wait_is_the_work_ahead_by_the_rate_at_which_work_ends() -> None:
    """A hundred requests of 50 tokens per second: 5000 tokens per second."""
    waits = Waits()
    for number in range(3000):
        waits.ended(number / 100, 50.0, 0.5)
    assert waits.wait(30.0, 10_000.0) == pytest.approx(2.0, rel=0.05)
    assert waits.wait(30.0, 0.0) == 0.0


def test_the_first_requests_already_give_a_rate() -> None:
    """The time before the first one's begin does not count as time in which nothing ended."""
    waits = Waits()
    waits.ended(1000.0, 100.0, 2.0)
    assert waits.wait(1000.0, 100.0) == pytest.approx(2.0, rel=0.15)


def test_a_rate_is_forgotten_as_time_goes_on() -> None:
    """After a minute without an end the wait is long, after ten it is not known."""
    waits = Waits()
    for number in range(1000):
        waits.ended(number / 100, 50.0, 0.5)
    soon, later = waits.wait(10.0, 5000.0), waits.wait(70.0, 5000.0)
    assert soon is not None
    assert later is not None
    assert later > 100 * soon
    assert waits.wait(610.0, 5000.0) is None


def test_a_low_load_before_says_little_of_the_wait_behind_many_requests() -> None:
    """One in ten seconds, which took one: a hundred at once end a hundred times as fast. So does
    the first minute after none.
    """
    waits = Waits()
    for number in range(100):
        waits.ended(10.0 * number, 1000.0, 1.0)
    for now in (990.0, 1050.0):
        assert waits.wait(now, 100_000.0, 100) == pytest.approx(1.0, rel=0.05)
        assert waits.wait(now, 100_000.0) > 100  # type: ignore[operator]


def test_the_times_of_service_are_those_of_like_requests() -> None:
    """The shortest, and the one that nearly all need. Prompts of other sizes do not count; less of
    an answer needs less time.
    """
    waits, chance = Waits(), random.Random(1)
    for _ in range(5000):
        waits.served(0.0, 100, chance.uniform(1.0, 5.0))
        waits.served(0.0, 5000, 60.0)
    best, surely = waits.service(0.0, 100)
    assert best == pytest.approx(1.0, rel=0.05)
    assert 4.5 < surely < 7.0
    assert waits.service(0.0, 100, 0.5) == (best / 2, surely / 2)
    assert waits.service(0.0, 5000) == pytest.approx((60.0, 60.0), rel=0.05)
    assert waits.service(0.0, 1_000_000) == (0.0, 0.0)


@given(st.floats(0.001, 100.0), st.floats(0.0, 0.6))
@settings(deadline=None, max_examples=30)
def test_nearly_all_requests_need_no_longer(typical: float, spread: float) -> None:
    """However long they take and however different they are: nineteen in twenty, and the time is no
    more than twice theirs.
    """
    waits, chance, over = Waits(), random.Random(2), 0
    times = []
    for number in range(1200):
        seconds = typical * chance.lognormvariate(0.0, spread)
        over += number >= 200 and seconds > waits.service(0.0, 100)[1] * 1.001
        waits.served(0.1 * number, 100, seconds)
        times.append(seconds)
    assert over <= 100
    assert waits.service(120.0, 100)[1] < 2.0 * sorted(times)[-60]


def test_one_request_that_took_very_long_changes_little() -> None:
    """Such as one whose engine failed."""
    waits = Waits()
    for number in range(100):
        waits.served(0.1 * number, 100, 1.0)
    waits.served(10.0, 100, 120.0, late=True)
    assert waits.service(10.0, 100)[1] < 2.5
    for number in range(100):
        waits.served(10.0 + 0.1 * number, 100, 1.0)
    assert waits.service(20.0, 100)[1] < 1.1


def test_the_shortest_time_is_forgotten() -> None:
    """Soon, by longer ones and where none is answered: otherwise a client that is refused by it
    would be refused for ever.
    """
    waits = Waits()
    for number in range(100):
        waits.served(0.1 * number, 100, 1.0)
    for number in range(100):
        waits.served(10.0 + 0.1 * number, 100, 3.0)
        assert number > 10 or waits.service(10.0 + 0.1 * number, 100)[0] == 1.0
    assert waits.service(20.1, 100)[0] == pytest.approx(3.0, rel=0.1)
    assert waits.service(45.0, 100)[0] == 0.0
    waits.served(50.0, 100, 4.0)
    assert waits.service(50.0, 100)[0] == 4.0
    slow = Waits()
    for number in range(10):
        slow.served(60.0 * number, 100, 60.0)
    assert slow.service(590.0, 100)[0] == 60.0, (
        "where requests take longer, it is remembered longer"
    )


def test_late_requests_say_nothing_of_the_shortest_time() -> None:
    """Only that others take longer."""
    waits = Waits()
    for number in range(400):
        waits.served(0.01 * number, 100, 1.0)
        waits.served(0.01 * number, 100, 2.0, late=bool(number))
    best, surely = waits.service(4.0, 100)
    assert best == 1.0
    assert surely > 3.0


def test_clients_with_little_time_make_nobody_seem_fast() -> None:
    """A request that was given up after a tenth of a second would have taken longer: nobody knows
    how long.
    """
    waits = Waits()
    for number in range(100):
        waits.served(0.1 * number, 100, 5.0)
    before = waits.service(10.0, 100)
    for number in range(1000):
        assert waits.served(10.0 + 0.001 * number, 100, 0.1, late=True) == 0.0
    assert waits.service(11.0, 100) == before


def test_what_a_request_took_is_compared_with_others() -> None:
    """As a logarithm. The first has none to be compared with."""
    waits = Waits()
    assert waits.served(0.0, 100, 3.0) == 0.0
    for number in range(100):
        waits.served(0.1 * number, 100, 1.0)
    assert waits.served(10.0, 100, 2.0) == pytest.approx(math.log(2), abs=0.02)
    assert waits.served(10.0, 5000, 2.0) == 0.0


def test_not_every_request_of_a_high_load_is_learned_from() -> None:
    """Each counts for the rate; one in a tenth of a second is looked at, however often waits are
    predicted meanwhile.
    """
    waits, weights = Waits(), []
    for number in range(10_000):
        now = number / 1000
        waits.ended(now, 10.0, 0.5)
        weights.append(waits.learns(now))
        waits.wait(now, 10.0)
    looked = [weight for weight in weights if weight]
    assert 90 <= len(looked) <= 101
    assert 9_800 <= sum(looked) <= 10_000, "each stands for those that were not looked at before it"
    assert waits.wait(10.0, 10_000.0) == pytest.approx(1.0, rel=0.1)


def test_what_is_looked_at_stands_for_the_others() -> None:
    """One in twenty is late, and all of these are learned from: the time that nearly all need
    hardly grows by them.
    """
    one_by_one, weighted = Waits(), Waits()
    for number in range(400):
        late = number % 20 == 0
        one_by_one.served(number / 100, 100, 2.0 if late else 1.0, late=late)
        if late or number % 10 == 9:
            weighted.served(number / 100, 100, 2.0 if late else 1.0, 1 if late else 10, late=late)
    surely = [waits.service(4.0, 100)[1] for waits in (one_by_one, weighted)]
    assert surely[1] == pytest.approx(surely[0], rel=0.15)


class Simulated:
    """A queue before places, with more requests than places: what was predicted for each that
    waited, and how long it did.
    """

    def __init__(self, places: int, overload: float, seed: int) -> None:
        self.chance, self.places, self.overload = random.Random(seed), places, overload
        self.waits, self.now = Waits(), 0.0
        self.queue: FairQueue[list[float]] = FairQueue(
            places, 10**6, 0, self._granted, lambda _: None
        )
        self.ends: list[tuple[float, int, TenantRequest[list[float]], float]] = []
        self.entries: dict[int, TenantRequest[list[float]]] = {}
        self.begun: list[list[float]] = []
        self.found: list[tuple[float, float]] = []

    def _granted(self, ticket: list[float]) -> bool:
        self.begun.append(ticket)
        return True

    def _begin(self, number: int, entry: TenantRequest[list[float]]) -> None:
        seconds = entry.cost / 100 * self.chance.lognormvariate(0.0, 0.5)
        heapq.heappush(self.ends, (self.now + seconds, number, entry, seconds))

    def run(self, seconds: float) -> None:
        """Requests of 10 to 1000 tokens, which take 10 ms per token with a place."""
        number = 0
        mean = 505 / 100 * 1.13
        while self.now < seconds:
            arrival = self.now + self.chance.expovariate(self.overload * self.places / mean)
            while self.ends and self.ends[0][0] <= arrival:
                self.now, _, entry, took = heapq.heappop(self.ends)
                self.waits.ended(self.now, entry.cost, took)
                self.queue.leave(entry, entry.cost)
                while self.begun:
                    ticket = self.begun.pop()
                    if ticket[1] > 0 and self.now > 20:
                        self.found.append((ticket[1], self.now - ticket[0]))
                    self._begin(int(ticket[2]), self.entries.pop(int(ticket[2])))
            self.now, number = arrival, number + 1
            name, cost = self.chance.choice("ab"), float(self.chance.randint(10, 1000))
            ticket = [self.now, -1.0, float(number)]
            taken = self.queue.take(name, 1.0, ticket, cost, 0)
            if taken is not None:
                self._begin(number, taken)
                continue
            ticket[1] = self.waits.wait(self.now, self.queue.cost_ahead(name, 1.0, cost)) or -1.0
            self.entries[number] = self.queue.queue_up(name, 1.0, ticket, cost, 0)


@pytest.mark.parametrize(("places", "overload"), [(8, 1.5), (64, 1.1), (64, 2.0)])
def test_predicted_waits_are_near_to_real_ones(places: int, overload: float) -> None:
    """In a simulated queue of two tenants: most predictions are right within a factor of two, many
    within a quarter.
    """
    simulated = Simulated(places, overload, 3)
    simulated.run(120.0)
    ratios = sorted(predicted / max(real, 0.05) for predicted, real in simulated.found)
    assert len(ratios) > 100
    quarter = sum(0.75 <= one <= 1.33 for one in ratios) / len(ratios)
    half = sum(0.5 <= one <= 2.0 for one in ratios) / len(ratios)
    assert quarter >= 0.45
    assert half >= 0.85
