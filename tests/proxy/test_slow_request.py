"""A request whose step takes longer than `health.stalled_after`: it pays itself, and the requests
beside it are all served.
"""

# The step is a core that is stopped for a time of the manual clock, whenever an engine has the slow
# request.

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.sim.faults.book import PlannedFault
from pdproxy_lab.sim.server import SimServer
from tests.fakes.client import Answer, request
from tests.fakes.world import until
from tests.proxy.test_both_legs import PUSH
from tests.proxy.test_connectors import CHAT, COMPLETIONS, chat, completion
from tests.proxy.test_silence import MESSAGES, RESPONSES
from tests.proxy.watched import AFTER, LOOK, Watched, watched

STEPS = {"hardware": Hardware(prefill_tokens_per_s=1e9, decode_step_s=0.01, transfer_latency_s=0.0)}
STEP = 3 * AFTER
"""Seconds of the slow request's step."""
SLOW: dict[str, dict[str, Any]] = {
    CHAT: chat(max_tokens=3, stream=True),
    RESPONSES: {"model": "tiny", "input": "import os", "max_output_tokens": 4, "temperature": 0},
    MESSAGES: {
        "model": "tiny",
        "max_tokens": 4,
        "stream": True,
        "messages": [{"role": "user", "content": "import os"}],
    },
}
DEADLINES = {
    "first_token": 60.0,
    "between_tokens": 30.0,
    "prefill": 120.0,
    "queue": 30.0,
    "total": 3600.0,
}
"""Those of the defaults."""
stepping = partial(watched, everybody=STEPS, deadlines=DEADLINES)


class Steps:
    """Lets time pass. Engines that the slow request has stopped go on when its step is over."""

    def __init__(self, w: Watched) -> None:
        self.w = w
        self.stopped: dict[SimServer, float] = {}
        """When each began with the step."""
        self.times = 0
        """How often an engine has begun with it."""

    async def pass_(self, seconds: float) -> None:
        for _ in range(round(seconds / LOOK)):
            await self.w.pass_(LOOK)
            now = self.w.clock.now()
            for sim in self.w.sims:
                if not sim.engine.stops.any:
                    continue
                if sim not in self.stopped:
                    self.stopped[sim] = now
                    self.times += 1
                elif now - self.stopped[sim] >= STEP:
                    await sim.thaw_core()
                    del self.stopped[sim]

    async def until_over(
        self, asked: list[asyncio.Future[Answer]], most: float = 300.0
    ) -> list[Answer]:
        for _ in range(round(most / LOOK)):
            if all(one.done() for one in asked):
                break
            await self.pass_(LOOK)
            await asyncio.sleep(0.02)
        return [await one for one in asked]


def small(w: Watched, n: int) -> list[asyncio.Future[Answer]]:
    """A stream, and an answer that is not streamed."""
    bodies = [completion(stream=stream, max_tokens=4 + n % 3) for stream in (False, True)]
    return [asyncio.ensure_future(w.pair.ask(COMPLETIONS, body)) for body in bodies]


@pytest.mark.parametrize(
    ("connector", "path", "role"),
    [
        ("nixl", CHAT, "decode"),
        ("nixl", CHAT, "prefill"),
        ("nixl", RESPONSES, "decode"),
        (PUSH, CHAT, "decode"),
        (PUSH, CHAT, "prefill"),
    ],
)
async def test_requests_beside_it_are_all_served(connector: str, path: str, role: str) -> None:
    """Before it, with it and behind it, on three engines. Two engines are stopped by it, no third
    one.
    """
    three: dict[str, Any] = {"prefills": 3} if role == "prefill" else {"decodes": 3}
    async with stepping(connector, limits={"attempts": 5}, **three) as w:
        wanted = {
            n: (await w.pair.asked_plain(COMPLETIONS, completion(max_tokens=4 + n))).text
            for n in range(3)
        }
        for sim in w.sims:
            if sim.facts.role == role:
                sim.faults.add(PlannedFault(kind="core_freeze", at="queued", path=path, rate=1))
        steps = Steps(w)
        beside = [one for n in range(4) for one in small(w, n)]
        slow = asyncio.ensure_future(w.pair.ask(path, SLOW[path]))
        await until(lambda: any(sim.engine.stops.any for sim in w.sims))
        beside += [one for n in range(4, 8) for one in small(w, n)]
        for n in range(8, 20):
            await steps.pass_(2 * LOOK)
            beside += small(w, n)
        answers = await steps.until_over(beside)
        assert [answer.status for answer in answers] == [200] * len(beside)
        assert [answer.text for answer in answers] == [
            wanted[n // 2 % 3] for n in range(len(beside))
        ]
        (answer,) = await steps.until_over([slow])
        assert answer.status == 200, "as a plain engine would, behind its step"
        assert steps.times == 2


class AllStandStill:
    """Two decode engines: one stands still, the other one is gone."""

    def __init__(self, w: Watched) -> None:
        self.w = w
        self.still, self.gone = w.pair.d, w.pair.more[-1]
        ledger = w.world.proxy.ledger
        self.still.freeze_core_now(0.0, None)
        ledger.mark_stalled(self.still.url, "stands still")
        ledger.mark_down(self.gone.url, "connection refused", w.clock.now())

    @property
    def waiting(self) -> float:
        return self.w.world.metric("pdproxy_waiting_for_engines")


@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES])
async def test_a_request_waits_for_an_engine_that_may_come_back(path: str) -> None:
    """No other engine can serve it. It is served as soon as the engine moves again."""
    body = completion(stream=True) if path == COMPLETIONS else SLOW[RESPONSES]
    async with stepping(decodes=2) as w:
        all_still = AllStandStill(w)
        asked = asyncio.ensure_future(w.pair.ask(path, body))
        await until(lambda: all_still.waiting == 1)
        await w.pass_(5 * LOOK)
        assert not asked.done()
        await all_still.still.thaw_core()
        for _ in range(20):
            if asked.done():
                break
            await w.pass_(LOOK)
        assert (await asked).status == 200
        assert all_still.waiting == 0
        assert path != COMPLETIONS or w.world.metric("pdproxy_alone_total") == 0, (
            "it is split again"
        )


@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES])
async def test_the_wait_for_an_engine_has_a_deadline(path: str) -> None:
    """That of requests which wait for a place."""
    body = completion() if path == COMPLETIONS else SLOW[RESPONSES]
    async with stepping(decodes=2) as w:
        all_still = AllStandStill(w)
        asked = asyncio.ensure_future(w.pair.ask(path, body))
        await until(lambda: all_still.waiting == 1)
        await w.clock.advance(31.0)
        answer = await asked
        assert answer.status == 503
        assert b"no engine can serve this request" in answer.body
        assert w.world.metric("pdproxy_deadline_total", wait="engine") == 1
        assert all_still.waiting == 0


@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES])
async def test_a_client_that_leaves_waits_for_no_engine(path: str) -> None:
    """Nothing of it stays."""
    body = completion() if path == COMPLETIONS else SLOW[RESPONSES]
    async with stepping(decodes=2) as w:
        all_still = AllStandStill(w)
        client = await w.world.client()
        client.send(request("POST", path, body))
        await until(lambda: all_still.waiting == 1)
        client.close()
        await until(lambda: all_still.waiting == 0)
        await until(lambda: w.world.metric("pdproxy_inflight") == 0)


async def test_few_requests_wait_for_engines() -> None:
    """No more than may wait for a place, nor than half of the places."""
    for limits in ({"max_queue": 2}, {"max_inflight": 4}):
        async with stepping(decodes=2, limits=limits) as w:
            all_still = AllStandStill(w)
            asked = [asyncio.ensure_future(w.pair.ask(COMPLETIONS, completion())) for _ in range(3)]
            await until(lambda: sum(one.done() for one in asked) == 1)  # noqa: B023 - it is over before the next round
            assert all_still.waiting == 2
            assert [one.result().status for one in asked if one.done()] == [503]
            await w.clock.advance(31.0)
            await asyncio.wait(asked)


async def test_an_engine_that_is_gone_is_not_waited_for() -> None:
    async with stepping(decodes=2) as w:
        all_still = AllStandStill(w)
        asked = asyncio.ensure_future(w.pair.ask(COMPLETIONS, completion()))
        await until(lambda: all_still.waiting == 1)
        w.world.proxy.ledger.mark_down(all_still.still.url, "connection refused", w.clock.now())
        assert (await asked).status == 503
        assert (await w.pair.ask(COMPLETIONS, completion())).status == 503
        assert w.world.metric("pdproxy_deadline_total", wait="engine") == 0
