"""Every fault at every moment, where both engines are asked at once: what the client sees, and what is left.

The client sees what it sees with any other connector. At the engines nothing is left but what waits for the end of a lease, and
the blocks of decode engines that only a push could free: those are counted.
"""

from __future__ import annotations

import json

import pytest

from pdproxy_lab.sim.faults.book import Fault
from pdproxy_lab.sim.faults.moments import Moment
from pdproxy_lab.sim.server import SimServer
from tests.fakes.clock import STEP, ManualClock
from tests.fakes.pool import Pair, pool
from tests.fakes.world import until
from tests.proxy import test_faults_by_moment as moments
from tests.proxy.test_both_legs import PUSH, known
from tests.proxy.test_connectors import COMPLETIONS, completion

CONNECTORS = [PUSH]


async def lives_again(pair: Pair, clock: ManualClock) -> None:
    """Bring every engine back to life."""
    for engine in (pair.p, pair.d, *pair.more):
        engine.faults.clear()
        if engine.life == "frozen":
            await engine.thaw()
        if engine.life != "up" or engine.engine.dead:
            await engine.restart()
    await pair.world.probe()
    await clock.through(pair.world.quiet(), STEP)


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize(("role", "kind", "moment", "stream", "kept"), moments.half(second=False))
async def test_what_a_client_sees(
    connector: str, role: str, kind: str, moment: Moment, stream: bool, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefills, decodes = (2, 1) if role == "prefill" else (1, 3)  # the last decode engine would not be risked
    clock = ManualClock()
    # A decode engine whose push does not come says nothing until its deadline.
    waits = role == "prefill" or kind in moments.SILENT or (kind, moment) == ("garbage", "head")
    facts = {"side_channel_port": 0, "handshake_timeout": 20.0}
    async with pool(connector, prefills=prefills, decodes=decodes, everybody=facts, clock=clock) as pair:
        plain = json.loads((await pair.asked_plain(COMPLETIONS, completion())).body)["choices"][0]["text"]
        monkeypatch.setattr(moments, "TEXT", plain)
        await known(pair)
        engines: tuple[SimServer, ...] = (pair.p, pair.d, *pair.more)
        for one in () if kept else engines:
            pair.world.proxy.engines[one.url].client.close()
        engine = pair.more[0]
        engine.faults.add(Fault(kind=kind, at=moment))
        for _ in range(decodes if role == "decode" else 2):  # ties go round: one of these requests is this engine's
            asked = pair.ask(COMPLETIONS, completion(stream=stream))
            answer = await (clock.through(asked, STEP) if waits else asked)
            if engine.faults.happened or kind == "refuse":
                break
            assert moments.seen(answer) == "right"
        assert moments.seen(answer) == moments.expected(role, kind, moment, stream), (answer.status, answer.body)
        assert engine.faults.happened or kind == "refuse", "the fault came to nothing"
        await lives_again(pair, clock)
        assert moments.seen(await pair.ask(COMPLETIONS, completion(stream=stream))) == "right"
        await clock.through(pair.world.quiet(), STEP)
        stuck = pair.world.metric("pdproxy_kv_stuck")
        for one in engines:
            one.engine.expire_leases()
        waiting = sum(len(one.engine.awaited) for one in engines if one.engine.facts.role == "decode")
        assert waiting <= stuck, "what nobody frees is counted"
        if not waiting:
            await until(lambda: all(_usage(one) == 0 for one in engines))


def _usage(engine: SimServer) -> float:
    core = engine.engine._core
    assert core is not None
    return core.pool.usage
