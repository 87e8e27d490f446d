"""Every fault at every moment, on engines that register: what the client sees, and that the fleet recovers.

A client sees one of three things: the right answer; an error with a status and an OpenAI body; a stream that was right as far as
it came and ends in an error event.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from pdproxy_lab.sim.faults.book import Fault
from pdproxy_lab.sim.faults.moments import Moment
from tests.fakes.client import Answer
from tests.fakes.clock import ManualClock
from tests.fakes.world import COMPLETIONS, until
from tests.proxy.registered import Fleet
from tests.proxy.test_faults_by_moment import cases
from tests.proxy.test_registered import FOREVER, completion, run

SHARE = 1 if os.environ.get("PDPROXY_TEST_MOMENTS") == "all" else 5
KINDS = ("p2p-nccl", "read", "write")


def mine() -> list[tuple[str, str, str, Moment, bool]]:
    """Each case with each kind of connector; of the cases of one kind every fifth, another fifth for each.

    P2P NCCL has no moment at which KV is handed over: P's answer holds nothing, and D finds it there or waits with all it has.
    """
    found: list[tuple[str, str, str, Moment, bool]] = []
    for offset, kind in enumerate(KINDS):
        some = [case for case in cases() if kind != "p2p-nccl" or case[2] != "handed_over"]
        if kind == "read":  # the next process at P's address is taken for P: see `transfer.moriio`
            some = [case for case in some if case[:3] != ("prefill", "restart", "after")]
        found += [(kind, *case) for case in some[offset % SHARE :: SHARE]]
    return found


def seen(answer: Answer, text: str) -> str:
    """Which of the three it is; anything else fails."""
    if answer.status != 200:
        error = answer.json["error"]
        assert isinstance(error["message"], str)
        assert error["code"] == answer.status
        assert answer.status in (500, 502, 503, 504), answer.body
        return "error"
    assert answer.ended, "a body without its end"
    if answer.header("content-type") == "application/json" or b'"error"' not in answer.body:
        assert answer.text == text
        return "right"
    error = json.loads(answer.events[-1].removeprefix(b"data: "))["error"]
    assert isinstance(error["message"], str)
    before = b"".join(answer.events[:-1])
    assert b"[DONE]" not in before
    so_far = Answer(200, answer.headers, before, [], True).text if before else ""
    assert text.startswith(so_far)
    return "error event"


async def lives_again(f: Fleet, clock: ManualClock) -> None:
    """Bring every engine back to life; what waits for ever is restarted, as an operator would do."""
    for sim in f.engines:
        sim.faults.clear()
        if sim.life == "frozen":
            await sim.thaw()
    for sim in f.engines:
        await sim.restart()
    await clock.advance(f.proxy.settings.limits.breaker_cooldown + 1)
    await f.world.probe()
    await until(lambda: f.known.count == len(f.engines))


@pytest.mark.parametrize(("connector", "role", "kind", "moment", "stream"), mine())
async def test_what_a_client_sees(connector: str, role: str, kind: str, moment: Moment, stream: bool) -> None:
    sizes = (2, 1) if role == "prefill" else (1, 2)
    clock = ManualClock()
    more: dict[str, Any] = {"clock": clock, "registration": FOREVER, "alone": True}
    async with run(connector, *sizes, **more) as f:
        text = (await f.asked_plain(COMPLETIONS, completion())).text
        sim = (f.p if role == "prefill" else f.d)[1]
        sim.faults.add(Fault(kind=kind, at=moment))
        for _ in range(2):  # ties go round: one of the two requests is this engine's
            answer = await clock.through(f.ask(COMPLETIONS, completion(stream=stream)))
            if sim.faults.happened or kind == "refuse":
                break
        assert sim.faults.happened or kind in ("refuse", "load_failure", "lease_expiry"), "the fault came to nothing"
        what = seen(answer, text)
        if kind in ("split", "join") or role == "prefill":
            assert what == "right"
        await lives_again(f, clock)
        answer = await clock.through(f.ask(COMPLETIONS, completion(stream=stream)))
        assert seen(answer, text) == "right"
