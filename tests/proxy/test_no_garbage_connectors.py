"""Whatever the connector, a request is freed by reference counts, and its answer no longer counts
in the budget.
"""

from __future__ import annotations

import pytest

from pdproxy.observe.events import TurnReused
from tests.fakes import garbage
from tests.fakes.clock import later_turns
from tests.fakes.pool import Pair, pool
from tests.fakes.world import World, until
from tests.proxy.test_connectors import COMPLETIONS, CONNECTORS, completion
from tests.proxy.test_turns import forget, quiet, talking

pytestmark = pytest.mark.timeout(120, method="thread")  # uvloop's own loop does not end by a signal


def judged(w: World) -> bool:
    """Return whether all tokenizers were judged: a model without one leaves its library's error to
    the collector, once.
    """
    return w.proxy.tokens is None or all(
        engine.run.judgements is not None for engine in w.proxy.engines.values()
    )


async def over(pair: Pair) -> None:
    """Wait until nothing is under way, and all tokenizers are judged. Then no answer counts in the
    budget.
    """
    await until(lambda: not pair.world.busy() and judged(pair.world))
    await later_turns()
    assert pair.world.proxy.answer_budget.held == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("connector", CONNECTORS)
def test_nothing_is_left_to_the_collector(connector: str, stream: bool) -> None:
    """Also where no engine holds KV for the proxy."""

    async def act(pair: Pair) -> None:
        assert (await pair.ask(COMPLETIONS, completion(stream=stream))).status == 200

    garbage.check(pool(connector), act, over)


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_that_uses_the_one_before_leaves_nothing_either(stream: bool) -> None:
    """KV that goes back to P: what is kept of a turn refers to nothing of its request."""

    body = completion(stream=stream)

    async def first(pair: Pair) -> None:
        for number in range(3):
            await pair.ask(COMPLETIONS, body | {"prompt": body["prompt"] + str(number)})
            await quiet(pair)
        forget(pair)

    async def act(pair: Pair) -> None:
        assert (
            await pair.ask(COMPLETIONS, body | {"prompt": body["prompt"] + "0 more"})
        ).status == 200
        await quiet(pair)
        assert pair.world.events(TurnReused)

    garbage.check(talking(), act, over, before=first)
