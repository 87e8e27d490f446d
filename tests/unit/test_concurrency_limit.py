"""How many requests are served at once so that they fit into their clients' time: what lowers the
number, and what does not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from pdproxy.scheduling.concurrency_limit import FITS, ConcurrencyLimit

Needs = Callable[[float], float]
"""The seconds that a request needs, by the number of requests that are served at once."""


def note(
    limit: ConcurrencyLimit, name: str, seconds: float, time: float | None, *, late: bool = False
) -> None:
    """A request of a tenant that has others as well begins and leaves."""
    limit.begun(name, 1.0, timed=time is not None)
    limit.left(name, seconds, time, late=late)


def course(
    needs: Needs,
    time: float | None,
    seconds: float = 120.0,
    most: float = 1000.0,
    spread: float = 0.05,
) -> list[float]:
    """Keep all places taken for so many seconds; return the numbers of places, one per tenth of a
    second.

    Times scatter by `spread`; requests that need more than `time` are given up then.
    """
    limit, chance, found, mean = ConcurrencyLimit(), random.Random(3), [], 0.0
    served = 1.0
    for tick in range(int(seconds * 10)):
        now = tick / 10
        served += 0.3 * (min(limit.places, most) - served)
        took = needs(served) * chance.lognormvariate(0.0, spread)
        late = time is not None and took > time
        took = min(took, time) if time is not None else took
        seen = math.log(took * (1.5 if late else 1.0))
        mean = mean or seen
        note(limit, "a", took, time, late=late)
        limit.ended(
            now, now - took, served * chance.uniform(0.9, 1.0), seen - mean, time, late=late
        )
        mean += 0.05 * (seen - mean)
        found.append(min(limit.places, most))
    return found


def full(batch: float) -> Needs:
    """An engine that runs so many at once; others wait in it."""
    return lambda served: max(served / batch, 1.0)


def test_engines_with_a_queue_get_as_many_as_fit() -> None:
    """From a thousand places within some times of the time that they have, and then steadily."""
    found = course(full(16), 2.0)
    assert max(found[200:]) < 16 * 2.0 * 1.1
    assert min(found[200:]) > 16 * 2.0 * FITS * 0.7


def test_engines_that_get_slower_step_by_step() -> None:
    """Each further request takes a part of the others' time: the number at which it is used up."""
    found = course(lambda served: 1.0 + 0.1 * served, 3.0)
    at_the_edge = (3.0 * FITS - 1.0) / 0.1
    assert 0.7 * at_the_edge < min(found[300:])
    assert max(found[300:]) < 1.4 * at_the_edge


@pytest.mark.parametrize("seed_spread", [0.05, 0.8])
def test_a_time_that_is_too_short_anyway_takes_no_places(seed_spread: float) -> None:
    """Requests that need as long with one at once as with many are late in either case."""
    found = course(lambda served: 1.5, 1.6, most=16.0, spread=seed_spread, seconds=300.0)
    assert sum(found[600:]) / len(found[600:]) > 14.0


def test_requests_that_fit_have_all_places() -> None:
    assert set(course(full(16), 2.0, most=16.0)) == {16.0}


def test_requests_without_a_time_change_nothing() -> None:
    assert set(course(full(16), None, seconds=30.0)) == {1000.0}


def test_a_few_clients_in_a_hurry_take_no_places_from_others() -> None:
    """A third of the requests has a time, and misses it."""
    limit = ConcurrencyLimit()
    for number in range(300):
        time = 1.0 if number % 3 == 0 else None
        note(limit, "a", 2.0, time, late=time is not None)
        limit.ended(number / 10, number / 10 - 2.0, 50.0, 0.0, time, late=time is not None)
    assert limit.places == math.inf


def test_the_number_comes_back_after_the_engines_were_slow() -> None:
    """They are three times as slow for a while. Twenty seconds later most places are back."""
    limit, now, served, mean = ConcurrencyLimit(), 0.0, 1.0, 0.0
    found = []
    for tick in range(900):
        now = tick / 10
        served += 0.3 * (min(limit.places, 1000.0) - served)
        slow = 3.0 if 300 <= tick < 600 else 1.0
        took = max(served / 16, 1.0) * slow
        late, took = took > 4.0, min(took, 4.0)
        seen = math.log(took * (1.5 if late else 1.0))
        mean = mean or seen
        note(limit, "a", took, 4.0, late=late)
        limit.ended(now, now - took, served, seen - mean, 4.0, late=late)
        mean += 0.05 * (seen - mean)
        found.append(limit.places)
    assert found[590] < 0.6 * found[290]
    assert found[800] > 0.65 * found[290]


def test_nothing_is_changed_by_a_few_requests() -> None:
    limit = ConcurrencyLimit()
    for number in range(7):
        note(limit, "a", 10.0, 1.0, late=True)
        limit.ended(10.0 + number, 0.0, 100.0, 0.5, 1.0, late=True)
    assert limit.places == math.inf


def test_a_few_that_are_late_together_take_few_places() -> None:
    """Engines run requests that began together in step: six of a hundred are late at once, the
    others have time to spare.

    Those in time that are looked at stand for the others. If each counted for itself, every third
    one would be late.
    """
    limit, found = ConcurrencyLimit(), []
    limit.begun("a", 1.0, timed=True)
    for number in range(600):
        now = number / 10
        served = min(limit.places, 16.0)
        if number % 20 == 0:
            for _ in range(6):
                note(limit, "a", 0.7, 0.7, late=True)
                limit.ended(now, now - 0.6, served, 0.6, 0.7, late=True)
        for _ in range(4):
            note(limit, "a", 0.45, 0.7)
        limit.ended(now, now - 0.45, served, 0.0, 0.7, 4, late=False)
        found.append(served)
    assert sum(found[100:]) / len(found[100:]) > 14.5


def test_there_is_always_a_place() -> None:
    assert min(course(lambda served: 50.0 * served, 1.0, seconds=60.0)) >= 1.0


def hostile(limit: ConcurrencyLimit, begin: float, seconds: float, per_s: int = 20) -> float:
    """One tenant wants all answers in 0.2 s and gets none in time. All of these are learned from.
    Return when that ends.
    """
    for number in range(int(seconds * per_s)):
        now = begin + number / per_s
        note(limit, "hostile", 0.2, 0.2, late=True)
        limit.ended(now, now - 0.2, 50.0, 0.0, 0.2, late=True)
    return begin + seconds


@pytest.mark.parametrize(("time", "lowered"), [(None, False), (60.0, False), (2.6, True)])
def test_one_tenant_with_times_that_cannot_be_met_takes_no_places_from_others(
    time: float | None, lowered: bool
) -> None:
    """Another tenant has places for requests that fit, or have no time; few of them are learned
    from. If the only one hardly fits, both need fewer places.
    """
    limit = ConcurrencyLimit()
    limit.begun("steady", 1.0, timed=time is not None)
    limit.begun("hostile", 1.0, timed=True)
    note(limit, "steady", 2.0, time)
    hostile(limit, 10.0, 60.0)
    assert (limit.places < math.inf) is lowered


def test_many_more_in_time_than_are_learned_from() -> None:
    """Two hundred per second without a time, of which ten are learned from, and twenty with one,
    that are all late.
    """
    limit = ConcurrencyLimit()
    limit.begun("a", 1.0, timed=False)
    for number in range(600):
        now = number / 20
        for _ in range(10):
            note(limit, "a", 1.0, None)
        note(limit, "a", 1.0, 1.0, late=True)
        limit.ended(now, now - 1.0, 50.0, 0.0, 1.0, late=True)
        if number % 2:
            limit.ended(now, now - 1.0, 50.0, 0.0, None, late=False)
    assert limit.places == math.inf


def test_places_come_back_though_nobody_names_a_time_any_more() -> None:
    """One tenant alone has lowered them to one. Then only requests without a time come."""
    limit = ConcurrencyLimit()
    now = hostile(limit, 10.0, 60.0)
    assert limit.places < 50.0
    for _number in range(600):
        now += 0.1
        note(limit, "b", 1.0, None)
        limit.ended(now, now - 0.1, min(limit.places, 64.0), 0.0, None, late=False)
    assert limit.places > 64.0


def test_nothing_is_kept_of_tenants_without_places() -> None:
    limit = ConcurrencyLimit()
    for number in range(5000):
        note(limit, f"tenant {number}", 1.0, 1.0)
    assert not limit._tenants
