"""Where both engines are asked at once, a request is freed by reference counts, too: whichever leg
ends the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from pdproxy.fleet.works import Works
from pdproxy.kit.errors import EngineTimeoutError, Wait
from pdproxy.serving.dispatch.decode_leg import ACCEPT_GRACE, COUNTS_GRACE
from pdproxy.serving.kv.lost_pushes import GRACE, LOOKS
from pdproxy_lab.sim.reply import ScriptedReply
from tests.fakes import garbage
from tests.fakes.client import request
from tests.fakes.clock import ManualClock, later_turns
from tests.fakes.pool import Pair, pool
from tests.fakes.world import DEADLINES, until
from tests.proxy.test_both_legs import PUSH, Gate, fails, known
from tests.proxy.test_connectors import COMPLETIONS, completion
from tests.proxy.test_no_garbage_connectors import over

pytestmark = pytest.mark.timeout(120, method="thread")  # uvloop's own loop does not end by a signal

Script = Callable[[ScriptedReply], Awaitable[None]]


@contextmanager
def answering(pair: Pair, script: Script) -> Iterator[None]:
    """Have all prefill engines answer so."""
    for engine in (pair.p, *pair.more):
        engine.faults.scripts.default = script
    yield
    for engine in (pair.p, *pair.more):
        engine.faults.scripts.default = None


async def no_prefill(pair: Pair, clock: ManualClock) -> None:
    """The prefill fails twice, and ends the decode leg that waits."""
    with answering(pair, fails()):
        assert (await pair.ask(COMPLETIONS, completion(stream=True))).status == 200


async def refused(pair: Pair, clock: ManualClock) -> None:
    """The prefill engine refuses the prompt, and ends the decode leg a second later."""
    with answering(pair, fails(400)):
        assert (await clock.through(pair.ask(COMPLETIONS, completion(stream=True)))).status == 200


async def lost(pair: Pair, clock: ManualClock) -> None:
    """The prefill engine is lost before its push."""
    proxy = pair.world.proxy
    pair.p.engine.fail_loads()
    pair.more[0].engine.fail_loads()
    asked = asyncio.ensure_future(pair.ask(COMPLETIONS, completion(stream=True)))
    live = proxy.custodian.awaiting_push
    await until(lambda: len(live()) == 1 and not live()[0].promised)
    url = live()[0].prefill
    for engine in (pair.p, pair.more[0]):
        if engine.url != url:
            engine.engine.fail_loads(-1)
    proxy.ledger.mark_down(url, "no answer", clock.now())
    for _ in range(LOOKS):
        await clock.reach(GRACE)
    assert (await asked).status == 200
    await pair.world.probe()


async def late(pair: Pair, clock: ManualClock) -> None:
    """No push comes: the decode leg fails at its deadline, and one engine answers alone."""
    for engine in (pair.p, pair.more[0]):
        engine.engine._failing_loads = 9
    assert (await clock.through(pair.ask(COMPLETIONS, completion(stream=True)))).status == 200
    for engine in (pair.p, pair.more[0]):
        engine.engine._failing_loads = 0


async def left(pair: Pair, clock: ManualClock) -> None:
    """The client leaves while both engines work."""
    gate, orphans = Gate(), pair.world.proxy.custodian.orphans
    with answering(pair, gate):
        client = await pair.world.client()
        client.send(request("POST", COMPLETIONS, completion(stream=True)))
        await until(lambda: bool(pair.world.proxy.custodian.awaiting_push()))
        client.close()
        await clock.reach(ACCEPT_GRACE)  # the decode engine has that time to begin
        await until(lambda: orphans.count == 1)
        gate.opened.set()
        await until(lambda: orphans.count == 0)


async def left_before_a_failure(pair: Pair, clock: ManualClock) -> None:
    """The client leaves, and the prefill fails while the decode engine has time to begin: nobody
    handles the failure.
    """
    proxy = pair.world.proxy
    pair.d.faults.add("stall@head")
    with answering(pair, Gate()):
        client = await pair.world.client()
        client.send(request("POST", COMPLETIONS, completion(stream=True)))
        await until(lambda: bool(proxy.custodian.awaiting_push()))
        prefills = [
            leg
            for url in (pair.p.url, pair.more[0].url)
            for leg in [*proxy.engines[url].open_legs.legs]
        ]
        assert len(prefills) == 1
        client.close()
        await until(lambda: ACCEPT_GRACE in clock.pending())
        prefills[0].fail(EngineTimeoutError("it stands still", wait=Wait.STALLED))
        await until(lambda: not pair.world.busy())
    pair.d.faults.clear()


async def _asked_for_ever(works: Works, url: str, wait: str) -> bool:
    await asyncio.Event().wait()
    return False


async def left_in_silence(pair: Pair, clock: ManualClock) -> None:
    """The client leaves while the decode engine, which has sent nothing, is asked whether it
    works.
    """
    pair.d.faults.add("stall@head")
    client = await pair.world.client()
    client.send(request("POST", COMPLETIONS, completion(stream=True)))
    await until(lambda: any(not one.promised for one in pair.world.proxy.custodian.awaiting_push()))
    await clock.reach(DEADLINES.first_token)
    await until(
        lambda: any(task.get_name() == "does a silent engine work" for task in asyncio.all_tasks())
    )
    client.close()
    await later_turns()
    await clock.advance(1.0)
    await until(lambda: not pair.world.busy())
    pair.d.faults.clear()


async def not_needed(pair: Pair, clock: ManualClock) -> None:
    """The prefill engine stands still behind its push, and the decode engine streams: that failure
    is nobody's answer.
    """
    for engine in (pair.p, pair.more[0]):
        engine.faults.add("stall@last_chunk")
    pair.d.faults.add("stall@mid_stream:events=2")
    client = await pair.world.client()
    client.send(request("POST", COMPLETIONS, completion(stream=True)))
    await clock.reach(COUNTS_GRACE)  # the answer waits so long for the counts of the prefill engine
    answer = await client.head()
    assert answer.status == 200
    engines = pair.world.proxy.engines
    legs = [leg for url in (pair.p.url, pair.more[0].url) for leg in [*engines[url].open_legs.legs]]
    assert len(legs) == 1
    legs[0].fail(EngineTimeoutError("it stands still", wait=Wait.STALLED))
    await until(
        lambda: not any(engines[url].open_legs.legs for url in (pair.p.url, pair.more[0].url))
    )
    client.close()
    await until(lambda: not pair.world.busy())
    for engine in (pair.p, pair.more[0], pair.d):
        engine.faults.clear()


@pytest.mark.parametrize(
    "what",
    [no_prefill, refused, lost, late, left, left_before_a_failure, left_in_silence, not_needed],
)
def test_nothing_is_left_to_the_collector(
    what: Callable[[Pair, ManualClock], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if what is left_in_silence:
        monkeypatch.setattr(Works, "on_all", _asked_for_ever)
    clock = ManualClock()

    async def first(pair: Pair) -> None:
        await known(pair)
        await what(pair, clock)

    garbage.check(
        pool(PUSH, prefills=2, clock=clock), lambda pair: what(pair, clock), over, before=first
    )
