"""The connector cpu through the real proxy: nothing stays in the decode engine's buffer, and no two
clients' KV is mixed up.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy.observe.events import HandleEnded, ServedAlone
from pdproxy_lab.sim.cpu import CpuConnector
from pdproxy_lab.sim.facts import CpuBuffer
from tests.fakes.client import request
from tests.fakes.clock import ManualClock
from tests.fakes.pool import Pair, pool
from tests.fakes.ports import free_port
from tests.fakes.world import until
from tests.proxy import leaving
from tests.proxy.test_connectors import CHAT, COMPLETIONS, chat, completion, same


def connector(server: object) -> CpuConnector:
    core = server.engine._core  # type: ignore[attr-defined]
    assert isinstance(core.connector, CpuConnector)
    return core.connector


async def empty(pair: Pair) -> None:
    """Wait until D's buffer and P's are empty, and all blocks are free."""
    await until(lambda: not pair.world.busy())
    await until(lambda: connector(pair.d).held == 0 == connector(pair.p).sending)
    await until(lambda: pair.d.engine.stats.kv_cache_usage == 0)


def ends(pair: Pair) -> list[str]:
    return [event.end for event in pair.world.events(HandleEnded)]


async def test_both_legs_carry_one_id_that_no_client_chooses() -> None:
    """Two clients with the same id at the same time get their own answers."""
    async with pool("cpu") as pair:
        texts = ["one " * 40, "two " * 40]
        alone = [
            json.loads((await pair.asked_plain(COMPLETIONS, completion(prompt=text))).body)
            for text in texts
        ]

        async def ask(text: str) -> dict[str, object]:
            answer = await pair.ask(
                COMPLETIONS, completion(prompt=text), [("x-request-id", "mine")]
            )
            return dict(answer.json)

        answers = await asyncio.gather(*(ask(text) for text in texts))
        assert [answer["choices"] for answer in answers] == [one["choices"] for one in alone]
        assert {answer["id"] for answer in answers} == {"cmpl-mine"}
        ids = [{entry.ident for entry in server.requests} for server in (pair.p, pair.d)]
        assert ids[0] == ids[1]
        assert len(ids[0]) == 2
        await empty(pair)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_what_was_pushed_is_loaded_even_if_nobody_wants_it(path: str) -> None:
    """A client that leaves while P works."""
    async with pool("cpu") as pair:
        pair.p.engine.freeze()
        client = await pair.world.client()
        client.send(request("POST", path, completion() if path == COMPLETIONS else chat()))
        await until(lambda: pair.p.requests)
        client.close()
        await pair.world.ended()
        assert not pair.p.requests[0].over, (
            "a leg that is closed leaves a part that nobody can load"
        )
        pair.p.engine.thaw()
        await until(lambda: ends(pair) == ["released"])
        await empty(pair)


async def test_a_prompt_under_a_block_is_loaded_and_served_alone() -> None:
    """The proxy can't know its length before P has answered; D would not load it."""
    async with pool("cpu") as pair:
        await same(pair, COMPLETIONS, completion(prompt="not sixteen tokens"))
        assert [event.reason for event in pair.world.events(ServedAlone)] == ["short_prompt"]
        assert ends(pair) == ["released"]
        await empty(pair)


async def test_a_client_that_leaves_while_the_decode_engine_works() -> None:
    """D may have loaded the KV already: the request that would load it then waits, and is closed at
    its deadline.
    """
    clock = ManualClock()
    async with pool(
        "cpu", d={"hardware": Hardware(speed=0.05)}, deadlines={"release": 3}, clock=clock
    ) as pair:
        client = await pair.world.client()
        client.send(request("POST", COMPLETIONS, completion(stream=True, max_tokens=40)))
        await until(lambda: pair.loaded > 0 or pair.d.engine.stats.running)
        client.close()
        await clock.through(until(lambda: ends(pair) != []))
        assert ends(pair)[0] in ("released", "loaded")
        await clock.through(empty(pair))


async def test_clients_that_leave_at_any_time_fill_no_buffer() -> None:
    """At random moments, streams and whole answers."""
    async with pool("cpu", deadlines={"release": 0.5}) as pair:
        await leaving.at_random(pair, 64, 16, seed=5)
        await until(lambda: not pair.world.busy(), 20)
        await same(pair, COMPLETIONS, completion())
        await empty(pair)
        assert "lost" not in ends(pair)


async def test_an_engine_without_the_connector_gives_no_handle() -> None:
    """The answer is computed by one engine, and the reason says what is missing."""
    async with pool("cpu", p={"connector": "none", "cpu": CpuBuffer()}) as pair:
        await same(pair, COMPLETIONS, completion())
        assert [event.reason for event in pair.world.events(ServedAlone)] == ["no_handle"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_push_that_goes_elsewhere_ends_at_a_deadline(stream: bool) -> None:
    """D waits for ever for an id that never comes. A stream is then computed; a whole answer has
    one deadline for all of it.
    """
    clock, wait = ManualClock(), "first_token" if stream else "total"
    async with pool("cpu", deadlines={wait: 4, "release": 1}, clock=clock) as pair:
        # as after a restart of D: P writes to the engine of its handshake
        connector(pair.p)._receiver = "another engine"
        asked = asyncio.create_task(pair.ask(COMPLETIONS, completion(stream=stream)))
        await until(lambda: pair.d.engine.stats.waiting)
        assert (await clock.through(asked)).status == (200 if stream else 504)
        assert pair.world.metric("pdproxy_deadline_total", wait=wait) == 1
        await clock.through(until(lambda: pair.d.engine.stats.kv_cache_usage == 0))


async def test_a_prefill_engine_whose_decode_engine_does_not_listen() -> None:
    """Its whole engine waits: the prefill's deadline ends the leg, and another engine answers."""
    clock = ManualClock()
    nobody = {"cpu": CpuBuffer(cpu_port=free_port())}
    async with pool("cpu", p=nobody, deadlines={"prefill": 4, "total": 30}, clock=clock) as pair:
        asked = asyncio.create_task(pair.ask(COMPLETIONS, completion()))
        await until(lambda: pair.p.requests)
        assert (await clock.through(asked)).status == 200
        assert pair.world.metric("pdproxy_deadline_total", wait="prefill") == 1
        await clock.through(until(lambda: not pair.world.busy()))
