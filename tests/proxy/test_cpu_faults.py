"""Every fault at every moment with the connector cpu: what the client sees, and that all is well when the engines are.

A prefill engine has one decode engine, which serves alone what can't be split. So a fault of that engine may be an error.
"""

from __future__ import annotations

import json

import pytest

from pdproxy_lab.sim.faults.book import Fault
from pdproxy_lab.sim.faults.moments import Moment
from pdproxy_lab.sim.server import SimServer
from tests.fakes.clock import ManualClock
from tests.fakes.pool import Pair, pool
from tests.fakes.world import until
from tests.proxy import test_faults_by_moment as moments
from tests.proxy.test_connectors import COMPLETIONS, completion
from tests.proxy.test_cpu import connector


async def lives_again(pair: Pair, clock: ManualClock, role: str) -> None:
    """Bring every engine back to life. Behind a decode engine that may have restarted, prefill engines write to the old one."""
    for engine in (pair.d, pair.p, *pair.more):
        engine.faults.clear()
        if engine.life == "frozen":
            await engine.thaw()
        if engine.life != "up" or engine.engine.dead or (role == "decode" and engine is not pair.d):
            await engine.restart()
    await pair.world.probe()
    await clock.through(pair.world.quiet())


@pytest.mark.parametrize(("role", "kind", "moment", "stream", "kept"), moments.half(second=False))
async def test_what_a_client_sees(
    role: str, kind: str, moment: Moment, stream: bool, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    waits = role == "prefill" or kind in moments.SILENT or (kind, moment) == ("garbage", "head")
    # The same engine is asked again, or goes on with its stream, once it is there again: it waits for KV that does not come.
    waits = waits or (kind == "restart" and (stream or kept))
    deadlines = {"prefill": 5, "total": 60, "first_token": 5, "release": 1}
    async with pool("cpu", prefills=2 if role == "prefill" else 1, deadlines=deadlines, clock=clock) as pair:
        plain = json.loads((await pair.asked_plain(COMPLETIONS, completion())).body)["choices"][0]["text"]
        monkeypatch.setattr(moments, "TEXT", plain)
        engine: SimServer = pair.more[0] if role == "prefill" else pair.d
        for _ in range(2 if kept else 0):
            answer = await pair.ask(COMPLETIONS, completion(prompt="some other text " * 9, stream=stream))
            assert answer.status == 200
            await pair.world.quiet()
        assert bool(engine.requests) == kept
        engine.faults.add(Fault(kind=kind, at=moment))
        for _ in range(2):  # ties go round: one of the two requests is this engine's
            asked = pair.ask(COMPLETIONS, completion(stream=stream))
            answer = await (clock.through(asked) if waits else asked)
            if engine.faults.happened or kind == "refuse":
                break
            assert moments.seen(answer) == "right"
        assert engine.faults.happened or kind in ("refuse", "lease_expiry", "load_failure"), "the fault came to nothing"
        result = moments.seen(answer)
        if role == "prefill":
            assert result == moments.expected(role, kind, moment, stream), (answer.status, answer.body)
        if moment == "after":  # it shows at the next request, on the connection that is kept or at the engine's port
            await clock.through(pair.ask(COMPLETIONS, completion(stream=stream)))
        await lives_again(pair, clock, role)
        again = await clock.through(pair.ask(COMPLETIONS, completion(stream=stream)))
        assert moments.seen(again) == "right", (again.status, again.body)
        await clock.through(pair.world.quiet())
        await until(lambda: all(one.engine.stats.kv_cache_usage == 0 for one in (pair.p, pair.d, *pair.more)))
        assert not connector(pair.d)._waiting
