"""Orders of legs: each contract's exists, and one that does not is a defect that shows at the start."""

from __future__ import annotations

import pytest

from pdproxy.scheduling.nodes import Role
from pdproxy.serving.dispatch import orders
from pdproxy.serving.dispatch.orders import alone


def test_the_order_of_todays_contracts() -> None:
    """One engine of each role, and the decode engine answers."""
    order = orders.load("sequential")
    assert order.roles == (Role.PREFILL, Role.DECODE)
    assert [stage.__name__ for stage in order.stages] == ["prefill", "kv_ready", "decode"]
    assert alone.ORDER.roles == ()


@pytest.mark.parametrize("name", ["no_such_order", "", "..attempt"])
def test_an_order_that_does_not_exist(name: str) -> None:
    with pytest.raises(LookupError, match="no order named"):
        orders.load(name)
