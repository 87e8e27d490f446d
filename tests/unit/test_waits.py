"""Predicted waits and times of service: by what has ended, without a clock."""

import random

import pytest

from pdproxy.scheduling.waits import Waits


def test_nothing_is_said_before_something_has_ended() -> None:
    waits = Waits()
    assert waits.wait(5.0, 100.0) is None
    assert waits.service(100) == 0.0


def test_the_wait_is_the_work_ahead_by_the_rate_at_which_work_ends() -> None:
    """A hundred requests of 50 tokens per second: 5000 tokens per second."""
    waits = Waits()
    for number in range(3000):
        waits.ended(number / 100, 50.0, 40, 0.5)
    assert waits.wait(30.0, 10_000.0) == pytest.approx(2.0, rel=0.05)
    assert waits.wait(30.0, 0.0) == 0.0


def test_the_first_requests_already_give_a_rate() -> None:
    """The time before the first one's begin does not count as time in which nothing ended."""
    waits = Waits()
    waits.ended(1000.0, 100.0, 40, 2.0)
    assert waits.wait(1000.0, 100.0) == pytest.approx(2.0, rel=0.15)


def test_a_rate_is_forgotten_as_time_goes_on() -> None:
    """After a minute without an end the wait is long, after ten it is not known."""
    waits = Waits()
    for number in range(1000):
        waits.ended(number / 100, 50.0, 40, 0.5)
    soon, later = waits.wait(10.0, 5000.0), waits.wait(70.0, 5000.0)
    assert soon is not None
    assert later is not None
    assert later > 100 * soon
    assert waits.wait(610.0, 5000.0) is None


def test_the_time_of_service_is_what_a_quarter_of_like_requests_needs() -> None:
    """Prompts of other sizes do not count, and a request for less of an answer needs less."""
    waits, chance = Waits(), random.Random(1)
    for _ in range(5000):
        waits.ended(0.0, 1.0, 100, chance.uniform(1.0, 5.0))
        waits.ended(0.0, 1.0, 5000, 60.0)
    assert waits.service(100) == pytest.approx(2.0, rel=0.2)
    assert waits.service(5000) == pytest.approx(60.0, rel=0.05)
    assert waits.service(100, 0.5) == pytest.approx(1.0, rel=0.2)
    assert waits.service(1_000_000) == 0.0
