"""Which engines are taken together, and that looking for partners where there are none is not
repeated for each request.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pdproxy.scheduling.compatibility import Compatibility
from pdproxy.scheduling.ledger_engine import Role

PAIR = (Role.PREFILL, Role.DECODE)


class Table(Compatibility):
    """Engines are numbers; `pairs`: those that are compatible."""

    def __init__(self, pairs: set[tuple[int, int]]) -> None:
        super().__init__()
        self.pairs = pairs
        self.asked = 0

    def compatible(self, roles: Any, engines: Any) -> bool:
        self.asked += 1
        return engines in self.pairs


@given(
    st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))),
    st.lists(st.tuples(st.permutations(range(5)), st.permutations(range(5)), st.booleans())),
)
def test_the_first_pair_in_order_is_taken(
    pairs: set[tuple[int, int]], asked: list[tuple[list[int], list[int], bool]]
) -> None:
    """Whatever was asked before, as long as nothing has changed."""
    table = Table(pairs)
    for first, second, changes in asked:
        ranked: Any = [first[:4], second[:3]]
        best = next((both for both in product(*ranked) if both in table.pairs), None)
        found: Any = table.first(PAIR, ranked)
        assert found == best
        if changes:
            table.pairs = {(b, a) for a, b in table.pairs}
            table.changed()


def test_engines_without_partners_are_looked_at_once() -> None:
    """All pairs of hundreds of engines would hold the event loop for each request."""
    table = Table(set())
    ranked: Any = [range(200), range(200, 400)]
    assert table.first(PAIR, ranked) is None
    assert table.asked == 200 * 200
    for turn in range(10):
        order = [*range(turn, 200), *range(turn)]
        assert table.first(PAIR, [order, ranked[1]]) is None
    assert table.asked <= 200 * 200 + 10 * 200
    table.pairs = {(7, 300)}
    table.changed()
    found: Any = table.first(PAIR, ranked)
    assert found == (7, 300)
