"""Operators are told of engines that are missing, or are too many: once it is clear, and not with
each burst.
"""

from __future__ import annotations

import pytest

from pdproxy.scheduling.ledger_engine import Role
from pdproxy.scheduling.scaling_advice import FEWER_S, MORE_S, ScalingAdvice
from pdproxy.scheduling.wanted_engines import Wanted

P, D, ANY = Role.PREFILL, Role.DECODE, Role.ANY


class Operator:
    """Looks each ten seconds."""

    def __init__(self, count: int = 2, tpot: float | None = 0.015) -> None:
        self.advice, self.now, self.count, self.tpot = ScalingAdvice(), 1000.0, count, tpot

    def sees(
        self, engines: float | None, seconds: float, role: Role = D, because: str = "TPOT"
    ) -> list[str]:
        """Have so many engines be needed for so long. Return what is told at the end."""
        end = self.now + seconds
        while self.now < end:
            self.now += 10.0
            needed = {} if engines is None else {role: Wanted(engines, because)}
            self.advice.look(
                self.now, needed, lambda one: self.count if one is role else 0, self.tpot
            )
        return self.advice.sentences()


@pytest.mark.parametrize(
    ("role", "because", "count", "engines", "told"),
    [
        (
            D,
            "TPOT",
            2,
            2.6,
            (
                "one more decode engine would keep TPOT under 15 ms: sequences need 2.6 engines, "
                "there are 2"
            ),
        ),
        (
            P,
            "prompts",
            1,
            3.2,
            "the load needs 3 more prefill engines: prompts need 3.2 engines, there is 1",
        ),
        (D, "KV", 2, 2.4, "the load needs one more decode engine: their KV needs 2.4 engines"),
        (
            ANY,
            "sequences",
            4,
            5.0,
            "the load needs one more engine of role any: sequences need 5.0 engines, there are 4",
        ),
        (
            P,
            "prompts",
            3,
            0.6,
            (
                "2 prefill engines fewer would do: for 30 minutes prompts needed 0.6 engines at "
                "most, there are 3"
            ),
        ),
        (
            D,
            "TPOT",
            2,
            0.0,
            (
                "one decode engine fewer would do: for 30 minutes sequences needed 0.0 engines at "
                "most, there are 2"
            ),
        ),
    ],
)
def test_what_is_told(role: Role, because: str, count: int, engines: float, told: str) -> None:
    operator = Operator(count)
    soon = MORE_S if engines > count else FEWER_S
    assert operator.sees(engines, soon - 60.0, role, because) == []
    (found,) = operator.sees(engines, 120.0, role, because)
    assert found.startswith(told)


@pytest.mark.parametrize("engines", [2.2, 1.0, 1.9, 0.8])
def test_what_is_not_clear_is_not_told(engines: float) -> None:
    assert Operator().sees(engines, 4 * FEWER_S) == []


def test_bursts_are_not_told() -> None:
    operator = Operator()
    for _ in range(200):
        assert operator.sees(5.0, 100.0) == []
        assert operator.sees(1.5, 60.0) == []


def test_what_is_told_stays_until_it_is_clearly_over() -> None:
    operator = Operator()
    assert operator.sees(2.5, 300.0)
    for engines in (2.1, 2.3, 2.05):
        assert operator.sees(engines, 20.0)
    assert operator.sees(1.95, 20.0) == []
    assert operator.sees(2.5, 120.0) == []
    operator = Operator(3)
    assert operator.sees(1.5, FEWER_S + 60.0)
    assert operator.sees(1.9, 20.0)
    assert operator.sees(2.1, 20.0) == []


def test_an_engine_that_is_started_ends_it() -> None:
    operator = Operator()
    assert operator.sees(2.6, 300.0)
    operator.count = 3
    assert operator.sees(2.6, 10.0) == []


def test_nothing_is_told_of_what_is_not_known() -> None:
    operator = Operator()
    assert operator.sees(2.6, 300.0)
    assert operator.sees(None, 10.0) == []
    assert operator.sees(2.6, 60.0) == []


def test_time_in_which_nobody_looked_does_not_count() -> None:
    operator = Operator()
    operator.sees(2.6, 60.0)
    operator.now += 3600.0
    assert operator.sees(2.6, 60.0) == []


def test_the_last_engine_is_never_too_many() -> None:
    assert Operator(1).sees(0.0, 2 * FEWER_S) == []
    assert Operator(0).sees(0.0, 2 * FEWER_S) == []
