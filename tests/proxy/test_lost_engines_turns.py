"""Requests that may end engines begin one at a time at first, then more and more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdproxy.observe.events import EngineLost
from pdproxy.scheduling.losses import SOON
from tests.fakes.client import Answer, Client, request
from tests.fakes.clock import ManualClock
from tests.fakes.engine import Reply
from tests.fakes.passed import RESPONSES, everyone, responses
from tests.fakes.world import COMPLETIONS, World, completion, until, world
from tests.proxy.test_lost_engines import (
    MARK,
    UNBROKEN,
    armed,
    ask,
    dead,
    killer,
    lost_of,
    refused,
    sims,
    stalling,
)


async def later() -> None:
    """Let everything go on that nothing holds up."""
    for _ in range(50):
        await asyncio.sleep(0.002)


async def again(w: World) -> None:
    """Start the engines that have ended."""
    for engine in sims(w.aggregated):
        if engine.life == "down":
            await engine.restart()
    await w.probe()


class Held:
    """Engines that answer once the test says so. `under_way`: what they have."""

    def __init__(self, w: World) -> None:
        self.under_way: list[Reply] = []
        self.opened = asyncio.Event()
        for engine in w.aggregated:
            engine.default = self._hold
        everyone(w, RESPONSES, self._hold)

    async def _hold(self, reply: Reply) -> None:
        self.under_way.append(reply)
        await self.opened.wait()
        await reply.serve()


def asked_by(
    w: World, count: int, body: dict[str, Any], path: str = COMPLETIONS
) -> list[asyncio.Future[Answer]]:
    """The same request of so many clients at once."""
    return [
        asyncio.ensure_future(ask(w, body, path, address=f"127.0.0.{2 + number}"))
        for number in range(count)
    ]


@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES])
async def test_one_engine_that_dies_by_itself_holds_up_nobody(path: str) -> None:
    """80 clients send the prompt that was alone at it, all at once. Their answers are not streamed
    and take long.
    """
    body = completion() if path == COMPLETIONS else responses()
    clock = ManualClock()
    async with world(0, 0, aggregated=8, limits=UNBROKEN, leaves=True, clock=clock) as w:
        held = Held(w)
        first = asyncio.ensure_future(ask(w, body, path))
        await until(lambda: held.under_way)
        await held.under_way[0].engine.sim.kill()
        await until(
            lambda: (
                len(held.under_way) == 2 and [event.losses for event in w.events(EngineLost)] == [1]
            )
        )
        asked = asked_by(w, 80, body, path)
        begun = []
        for seconds in range(7):
            await until(lambda: len(held.under_way) == 2 + min(2 ** (seconds + 1) - 1, 80))  # noqa: B023
            await later()
            begun.append(len(held.under_way) - 2)
            await clock.advance(SOON)
        assert begun == [1, 3, 7, 15, 31, 63, 80]
        held.opened.set()
        assert {answer.status for answer in await asyncio.gather(first, *asked)} == {200}
        await until(lambda: not lost_of(w).known.remembers)


async def test_half_of_the_places_wait_for_a_turn() -> None:
    """The other half is for other requests."""
    limits = {**UNBROKEN, "max_inflight": 20}
    async with world(0, 0, aggregated=4, limits=limits, leaves=True, clock=ManualClock()) as w:
        engines = armed(sims(w.aggregated))
        await ask(w, killer())
        await again(w)
        for engine in engines:
            engine.faults.clear()
        held = Held(w)
        asked = asked_by(w, 18, killer())
        await until(lambda: w.inflight == 11 and sum(one.done() for one in asked) == 7)
        assert len(held.under_way) == 1
        held.opened.set()
        answers = await asyncio.gather(*asked)
        assert [answer.status for answer in answers].count(200) == 11
        assert all(answer.status == 200 or refused(answer) for answer in answers)


async def test_known_bodies_of_a_limited_client_take_turns() -> None:
    """Its own turn comes first, so that no two of them are at engines at once."""
    async with world(
        0, 0, aggregated=8, limits={**UNBROKEN, "attempts": 1}, leaves=True, clock=ManualClock()
    ) as w:
        held = Held(w)
        first = [asyncio.ensure_future(ask(w, killer(number))) for number in range(8)]
        await until(lambda: len({reply.engine.url for reply in held.under_way}) == 8)
        await asyncio.gather(*[engine.kill() for engine in sims(w.aggregated)])
        assert all(answer.status >= 500 for answer in await asyncio.gather(*first))
        assert [suspect.losses for suspect in lost_of(w)._fingerprints.values()] == [1] * 8
        assert lost_of(w)._limited == 1
        await again(w)
        held.under_way.clear()
        asked = [asyncio.ensure_future(ask(w, killer(number))) for number in range(8)]
        # all have come before the engine of the first one ends
        await until(lambda: sum(one.done() for one in asked) == 5)
        (begun,) = held.under_way
        for engine in w.aggregated:
            engine.sim.scripts.default = None
        armed(sims(w.aggregated))
        await begun.engine.sim.kill()
        answers = await asyncio.gather(*asked)
        assert dead(sims(w.aggregated)) == 3, "one, and two that waited"
        assert len(w.events(EngineLost)) == 8 + 3
        assert all(refused(answer) for answer in answers)


async def limited(w: World) -> None:
    """Have a client end three engines, and start them again: they have no faults then."""
    armed(sims(w.aggregated))
    for number in range(2):
        await ask(w, killer(number))
    await again(w)
    assert lost_of(w)._limited == 1
    for engine in sims(w.aggregated):
        engine.faults.clear()


@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES])
async def test_who_leaves_early_keeps_its_turn_for_a_moment(path: str) -> None:
    """Its request may still end the engine. Nothing is known of that yet, so that no more begin
    behind it than before.
    """
    clock = ManualClock()
    async with world(0, 0, aggregated=8, limits=UNBROKEN, leaves=True, clock=clock) as w:
        await limited(w)
        stalling(w)
        at_engines = w.proxy.ledger.engines

        async def come(number: int) -> Client:
            text = f"{MARK}, not known: {number}"
            client = await w.client()
            client.send(
                request(
                    "POST",
                    path,
                    completion(prompt=text) if path == COMPLETIONS else responses(input=text),
                )
            )
            await later()
            return client

        for number in range(3):
            (await left_at(w, await come(10 * number))).close()
            for other in range(1, 4):
                client = await come(10 * number + other)
                assert not sum(engine.requests for engine in at_engines)
                client.close()
                await later()
            await clock.advance(SOON)
        waits = [await come(number) for number in range(100, 103)]
        assert sum(engine.requests for engine in at_engines) == 1
        for client in waits:
            client.close()


async def left_at(w: World, client: Client) -> Client:
    """Have a client leave whose request is at an engine."""
    await until(lambda: sum(engine.requests for engine in w.proxy.ledger.engines) == 1)
    client.close()
    await until(lambda: not sum(engine.requests for engine in w.proxy.ledger.engines))
    return client


async def test_the_turn_of_one_that_is_tried_again_goes_on() -> None:
    """An engine was lost under it: it keeps its turn until it has been at the next engine for a
    moment.
    """
    clock = ManualClock()
    async with world(0, 0, aggregated=8, limits=UNBROKEN, leaves=True, clock=clock) as w:
        held = Held(w)
        first = asyncio.ensure_future(ask(w, completion()))
        await until(lambda: held.under_way)
        await held.under_way[0].engine.sim.kill()
        await until(lambda: len(held.under_way) == 2)
        asked = asked_by(w, 8, completion())
        await until(lambda: len(held.under_way) == 3)
        await clock.advance(SOON / 2)
        await held.under_way[2].engine.sim.kill()
        await until(lambda: len(held.under_way) == 4)
        await later()
        await clock.advance(SOON * 0.9)
        await later()
        assert len(held.under_way) == 4, "nobody else has begun"
        await clock.advance(SOON * 0.2)
        await until(lambda: len(held.under_way) > 4)
        held.opened.set()
        assert {answer.status for answer in await asyncio.gather(first, *asked)} == {200}


async def test_a_turn_lasts_until_the_last_engine_has_the_request() -> None:
    """Prefill takes long: a request that ends decode engines would come to these with all that have
    begun meanwhile.
    """
    clock = ManualClock()
    async with world(3, 3, limits=UNBROKEN, leaves=True, clock=clock) as w:
        engines = armed(sims(w.prefill))
        await ask(w, killer())
        for engine in engines:
            engine.faults.clear()
            if engine.life == "down":
                await engine.restart()
        await w.probe()
        prefills: list[asyncio.Event] = []
        decodes: list[Reply] = []
        opened = asyncio.Event()

        async def prefill(reply: Reply) -> None:
            prefills.append(asyncio.Event())
            await prefills[-1].wait()
            await reply.serve()

        async def decode(reply: Reply) -> None:
            decodes.append(reply)
            await opened.wait()
            await reply.serve()

        for one in w.prefill:
            one.default = prefill
        for one in w.decode:
            one.default = decode
        asked = asked_by(w, 3, killer())
        await until(lambda: prefills)
        await clock.advance(3 * SOON)
        await later()
        assert len(prefills) == 1
        prefills[0].set()
        await until(lambda: decodes)
        await clock.advance(SOON)
        await until(lambda: len(prefills) == 3)
        for gate in prefills:
            gate.set()
        opened.set()
        assert {answer.status for answer in await asyncio.gather(*asked)} == {200}


async def test_an_hour_of_one_body() -> None:
    """It comes each 30 s, of a client that has a good answer before each time; engines are back at
    once.
    """
    clock = ManualClock()
    async with world(0, 0, aggregated=6, limits=UNBROKEN, leaves=True, clock=clock) as w:
        engines = armed(sims(w.aggregated))
        lost = 0
        for _ in range(0, 3600, 30):
            for one in (completion(), killer()):
                await ask(w, one)
            lost += dead(engines)
            await again(w)
            await clock.advance(30.0)
        assert 3 <= lost <= 10


@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES])
async def test_who_leaves_while_its_engine_is_asked_for_its_health_is_counted(path: str) -> None:
    body = killer() if path == COMPLETIONS else responses(input=MARK)
    async with world(0, 0, aggregated=3, limits=UNBROKEN, leaves=True) as w:
        armed(sims(w.aggregated))
        detector = lost_of(w)._detector
        is_alive, asked, go_on = detector._is_alive, asyncio.Event(), asyncio.Event()

        async def slow(url: str) -> bool:
            asked.set()
            await go_on.wait()
            return await is_alive(url)

        detector._is_alive = slow
        client = await w.client()
        client.send(request("POST", path, body))
        await asked.wait()
        client.close()
        await until(lambda: w.inflight == 0)
        go_on.set()
        await until(lambda: w.events(EngineLost))
        assert len(lost_of(w)._fingerprints) == 1
