"""The rules about the metrics and the ledger: each is seen to be broken by a world in which a
number is wrong by hand.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdproxy.scheduling.leases import Verdict
from pdproxy.scheduling.policy import Ask
from tests.chaos import counts
from tests.chaos.options import Options
from tests.chaos.trace import Trace
from tests.chaos.virtual.network import VirtualNetwork
from tests.chaos.world import World
from tests.fakes.virtual import run
from tests.reference.metrics import METRICS


def test_the_gauges_exist() -> None:
    names = {one.name for one in METRICS}
    assert names >= counts.HELD


def _fail(w: World) -> None:
    """Open a breaker, and let its cooldown pass."""
    ledger, now = w.proxy.ledger, w.proxy.front.clock.now() - 100
    for _ in range(w.proxy.settings.limits.breaker_failures):
        lease = ledger.assign_alone(Ask(None, 0, now))
        assert lease is not None
        ledger.close(lease, Verdict.FAILED, now)


def _excluded(w: World) -> None:
    _fail(w)
    for engine in w.proxy.ledger.engines:
        engine.excluded_because = "slower than its peers"


@pytest.mark.parametrize(
    ("breaks", "rules"),
    [
        (lambda w: None, set()),
        (lambda w: w.proxy.body_budget.__setattr__("held", 7), {"gauges go back to 0"}),
        (_fail, {"each engine is in use again"}),
        (_excluded, set()),
        (
            lambda w: w.proxy.ledger.mark_stalled(w.engines[1].url, "it stands still"),
            {"each engine is in use again"},
        ),
    ],
    ids=["fine", "held", "half open", "an outlier", "stalled"],
)
def test_numbers(breaks: Callable[[World], object], rules: set[str]) -> None:
    async def main(network: VirtualNetwork) -> set[str]:
        world = World(Options(prefill=1, decode=1), network, Trace())
        await world.begin()
        breaks(world)
        found = [
            *counts.held(world.proxy),
            *counts.out_of_use(world.proxy.ledger.engines, world.proxy.front.clock.now()),
        ]
        await world.in_proxy(world.proxy.stop())
        for engine in (*world.engines, world.judge):
            await engine.run(engine.sim.stop())
        return {one.rule for one in found}

    assert run(main) == rules
