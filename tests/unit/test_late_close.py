"""When the leg of a decode engine is closed that may wait for KV."""

from typing import Any

import pytest

from pdproxy.serving.kv.late_close import KV_GRACE, close


class Leg:
    """Records how it is closed."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def close(self) -> None:
        self.done.append("closed")

    def let_finish(self, seconds: float) -> None:
        self.done.append(seconds)


class Custody:
    """One that ends when the test says so."""

    def __init__(self, *, loses_closed: bool) -> None:
        self.loses_closed = loses_closed
        self.then: list[Any] = []

    def when_over(self, then: Any) -> None:
        self.then.append(then)


@pytest.mark.parametrize("custody", [None, Custody(loses_closed=False)])
def test_most_legs_are_closed_at_once(custody: Any) -> None:
    leg: Any = Leg()
    close(leg, custody)
    assert leg.done == ["closed"]


def test_a_leg_whose_engine_would_lose_its_blocks_stays_open_until_the_kv_must_have_come() -> None:
    leg: Any = Leg()
    custody: Any = Custody(loses_closed=True)
    close(leg, custody)
    assert leg.done == []
    (over,) = custody.then
    over()
    assert leg.done == [KV_GRACE]
