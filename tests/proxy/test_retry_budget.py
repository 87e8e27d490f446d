"""Of many requests whose engine fails, a share is tried again at once: the others wait, and all end
rightly.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pdproxy.observe.events import DeadlinePassed, RequestEnded
from tests.fakes.clock import ManualClock
from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.world import COMPLETIONS, TEXT, World, completion, until, world

LIMITS = {"min_retries": 1, "retry_share": 0.01}
ROUTES = [
    (COMPLETIONS, completion()),
    ("/v1/responses", {"model": "tiny", "input": "x", "max_output_tokens": 4}),
]


class Gate:
    """Has an engine answer when the test says so."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.waiting = self.most = 0
        self.users: list[str] = []
        """Of the requests that have come."""

    async def serve(self, reply: Reply) -> None:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        self.users.append(json.loads(reply.request.body)["user"])
        try:
            await self.open.wait()
            await reply.serve()
        finally:
            self.waiting -= 1


def script(engine: FakeEngine, path: str, what: Callable[[Reply], Awaitable[None]]) -> None:
    """Have an engine answer so, whatever the route is."""
    if path == COMPLETIONS:
        engine.default = what
    else:
        engine.admin[path] = what


async def failing(
    w: World, gate: Gate, path: str, body: Any, count: int
) -> list[asyncio.Future[Any]]:
    """Begin so many requests that all fail once, and are then tried at a gate."""
    first, second = w.decode
    w.mark_down(second, "later")
    script(first, path, held)
    asked: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(w.ask(path, {**body, "user": str(n)})) for n in range(count)
    ]
    await until(lambda: len(held_at) == count)
    await w.probe()
    script(second, path, gate.serve)
    return asked


held_at: list[asyncio.Event] = []


async def held(reply: Reply) -> None:
    """Fail once the test says so."""
    event = asyncio.Event()
    held_at.append(event)
    await event.wait()
    reply.reset()


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_request_waits_until_another_retry_has_its_data(
    path: str, body: dict[str, Any]
) -> None:
    """One at a time here: each gives its place on with its first data, and all are served."""
    held_at.clear()
    gate = Gate()
    async with world(0, 2, limits={**LIMITS, "breaker_failures": 100}, leaves=True) as w:
        asked = await failing(w, gate, path, body, 4)
        for event in held_at:
            event.set()
        await until(lambda: w.metric("pdproxy_retries", state="waiting") == 3)
        assert w.metric("pdproxy_retries", state="running") == 1
        gate.open.set()
        answers = await asyncio.gather(*asked)
        assert [answer.status for answer in answers] == [200] * 4
        if path == COMPLETIONS:
            assert {answer.text for answer in answers} == {TEXT}
        assert gate.most == 1
        await until(lambda: w.metric("pdproxy_retries", state="running") == 0)
        assert w.metric("pdproxy_retries", state="waiting") == 0


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_request_that_waits_too_long_is_refused(path: str, body: dict[str, Any]) -> None:
    """With the reason, and when to come again. And one whose client leaves gives up its turn."""
    held_at.clear()
    gate, clock = Gate(), ManualClock()
    limits = {**LIMITS, "breaker_failures": 100}
    async with world(0, 2, limits=limits, deadlines={"retry": 1.0}, clock=clock, leaves=True) as w:
        asked = await failing(w, gate, path, body, 3)
        for event in held_at:
            event.set()
        await until(lambda: w.metric("pdproxy_retries", state="waiting") == 2 and gate.users != [])
        asked.append(asked.pop(int(gate.users[0])))  # the others wait
        asked.pop(0).cancel()
        await clock.reach(1.0)
        await until(lambda: w.metric("pdproxy_retries", state="waiting") == 0)
        gate.open.set()
        answers = await asyncio.gather(*asked)
        served, refused = sorted(answers, key=lambda answer: answer.status)
        assert (served.status, refused.status) == (200, 503)
        assert refused.json["error"]["reason"] == "retry_budget"
        assert refused.header("retry-after") == "1"
        assert {event.reason for event in w.events(RequestEnded)} == {None, "retry_budget"}
        assert w.metric("pdproxy_refusals_total", reason="retry_budget", status="503") >= 1
        assert {event.wait for event in w.events(DeadlinePassed)} == {"retry"}
        assert w.metric("pdproxy_retries_refused_total") >= 1


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_retry_that_finds_no_engine_gives_its_place_back(
    path: str, body: dict[str, Any]
) -> None:
    """The only engine has gone down meanwhile: otherwise a few such requests would take all places
    for ever.
    """
    async with world(0, 1, limits=LIMITS, leaves=True) as w:
        (engine,) = w.decode

        async def gone(reply: Reply) -> None:
            w.mark_down(engine, "gone")
            reply.reset()

        script(engine, path, gone)
        assert (await w.ask(path, body)).status == 503
        await until(lambda: w.metric("pdproxy_retries", state="running") == 0)
