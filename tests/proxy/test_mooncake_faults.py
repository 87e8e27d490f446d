"""Every fault at every moment on engines with Mooncake, both legs at once: what the client sees, and what stays at the engines.

What a client sees is one of the three things of `test_faults_by_moment`. What stays is blocks that vLLM frees after its own time:
of a prefill engine (its lease), and of a decode engine that waits for KV which will not come. The proxy has counted the latter.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.scheduling.nodes import Role
from pdproxy_lab.sim.faults.book import Fault
from pdproxy_lab.sim.faults.moments import Moment
from pdproxy_lab.sim.server import SimServer
from tests.fakes.client import Answer
from tests.fakes.clock import STEP, ManualClock
from tests.fakes.pool import Pair, pool
from tests.fakes.world import until
from tests.proxy.test_both_legs import text_of
from tests.proxy.test_connectors import COMPLETIONS, completion
from tests.proxy.test_faults_by_moment import SILENT, expected, half

GONE = ("kill", "restart", "no_fin", "dead_core", "refuse")
"""Kinds after which a prefill engine's worker is gone: who has asked it waits for minutes, and only its own end ends that."""


def seen(answer: Answer, text: str) -> str:
    """Which of the three it is; anything else fails."""
    if answer.status != 200:
        error = answer.json["error"]
        assert error["message"]
        assert answer.status in (500, 502, 503, 504), answer.body
        return "error"
    assert answer.ended, "a body without its end"
    if answer.header("content-type") == "application/json":
        assert answer.text == text
        return "right"
    if answer.events[-1] == b"data: [DONE]\n\n" and b'"error"' not in answer.body:
        assert answer.text == text
        return "right"
    assert isinstance(json.loads(answer.events[-1].removeprefix(b"data: "))["error"]["message"], str)
    before = b"".join(answer.events[:-1])
    assert b"[DONE]" not in before
    assert text.startswith(Answer(200, answer.headers, before, [], True).text if before else "")
    return "error event"


def usage(engine: SimServer) -> float:
    """The share of an engine's blocks that are in use, summed over its ranks."""
    return sum(core.pool.usage for core in engine.engine._cores)


async def ready(pair: Pair) -> None:
    """Have all engines probed, and wait until they can take part in KV transfer."""
    await pair.world.probe()
    await until(lambda: all(node.kv_not_ready is None for node in pair.world.proxy.ledger.nodes))


async def lives_again(pair: Pair, engines: list[SimServer], clock: ManualClock) -> None:
    """Bring every engine back to life."""
    for engine in engines:
        engine.faults.clear()
        if engine.life == "frozen":
            await engine.thaw()
        if engine.life != "up" or engine.engine.dead:
            await engine.restart()
    await ready(pair)
    await clock.through(pair.world.quiet(), STEP)


def wanted(role: str, kind: str, moment: Moment, stream: bool) -> set[str]:
    """What the client may see. A prefill engine that has answered and is gone leaves the decode engine without an end.

    Unless it has sent the KV by then, nothing shows the decode engine that it won't come: the client's own deadline does.
    """
    found = {expected(role, kind, moment, stream)}
    gone = kind in (*GONE, *SILENT, "lease_expiry") and moment == "after"
    gone = gone or (kind == "no_fin" and moment in ("handed_over", "last_chunk"))
    return found | {"error"} if role == "prefill" and gone else found


@pytest.mark.parametrize(("role", "kind", "moment", "stream", "kept"), half(second=True))
async def test_what_a_client_sees(role: str, kind: str, moment: Moment, stream: bool, kept: bool) -> None:
    prefills, decodes = (2, 1) if role == "prefill" else (1, 3)  # the last decode engine would not be risked
    clock = ManualClock()
    body: dict[str, Any] = completion(stream=stream)
    waits = kind in (*SILENT, *GONE, "lease_expiry") or (kind, moment) == ("garbage", "head")
    async with pool("mooncake", prefills=prefills, decodes=decodes, clock=clock) as pair:
        text = await text_of(pair)
        engines = [pair.p, pair.d, *pair.more]
        engine = pair.more[0]
        for _ in range(
            max(prefills, decodes)
        ):  # decode engines learn addresses: a retry then takes few turns of the loop
            assert (await pair.ask(COMPLETIONS, completion(prompt="some other text " * 9))).status == 200
        for one in () if kept else engines:
            pair.world.proxy.engines[one.url].client.close()
        engine.faults.add(Fault(kind=kind, at=moment))
        for _ in range(max(prefills, decodes)):  # ties go round: one of these requests is this engine's
            asked = pair.ask(COMPLETIONS, body)
            answer = await (clock.through(asked, STEP) if waits else asked)
            if engine.faults.happened or kind == "refuse":
                break
            assert seen(answer, text) == "right"
        assert seen(answer, text) in wanted(role, kind, moment, stream), (answer.status, answer.body)
        assert engine.faults.happened or kind == "refuse", "the fault came to nothing"
        await lives_again(pair, engines, clock)
        assert seen(await pair.ask(COMPLETIONS, body), text) == "right"
        await clock.through(pair.world.quiet(), STEP)
        for one in engines:
            one.engine.expire_leases()
        decodes_wait = role == "prefill" and kind in GONE  # until they give up a worker that is gone
        stuck = {one.url for one in engines if pair.world.metric("pdproxy_kv_stuck", node=one.url)}
        assert stuck <= {node.url for node in pair.world.proxy.ledger.nodes if node.role is Role.DECODE}
        left = stuck | ({pair.d.url} if decodes_wait else set())
        await until(lambda: all(usage(one) == 0 for one in engines if one.url not in left))
