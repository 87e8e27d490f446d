"""Both engines are asked at once: legs that end at the same moment, late, or while the other one is
only connected to.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
import pytest

from pdproxy.observe.events import HandleEnded
from pdproxy.upstream import connection
from pdproxy.upstream.connection import EngineConnection
from pdproxy_lab.sim.reply import ScriptedReply
from pdproxy_lab.sim.server import SimServer
from tests.fakes.clock import ManualClock
from tests.fakes.pool import pool
from tests.fakes.world import until
from tests.proxy.test_both_legs import PUSH, Gate, fails, known, text_of
from tests.proxy.test_connectors import COMPLETIONS, completion

REFUSAL = {"error": {"message": "no", "type": "BadRequestError", "param": "x", "code": 400}}


class Together:
    """A script of several engines, which answer at the same moment: each its own body."""

    def __init__(self, bodies: Mapping[SimServer, bytes], status: int) -> None:
        self._bodies = bodies
        self._status = status
        self._all = asyncio.Event()
        self._count = 0

    def begin(self) -> None:
        """Let the engines use it for their next request."""
        for engine in self._bodies:
            engine.faults.script(partial(self._answer, self._bodies[engine]))

    async def _answer(self, body: bytes, reply: ScriptedReply) -> None:
        self._count += 1
        if self._count == len(self._bodies):
            asyncio.get_running_loop().call_later(0.01, self._all.set)
        await self._all.wait()
        await reply.whole(body, self._status)


async def test_both_engines_refuse_at_the_same_moment() -> None:
    """The client gets the refusal, and no KV is awaited any more."""
    async with pool(PUSH) as pair:
        await known(pair)
        for number in range(20):
            Together(dict.fromkeys((pair.p, pair.d), json.dumps(REFUSAL).encode()), 400).begin()
            answer = await pair.ask(COMPLETIONS, completion(stream=number % 2 == 0))
            assert (answer.status, answer.json) == (400, REFUSAL)
        await until(lambda: len(pair.world.events(HandleEnded)) == 20)
        assert {event.end for event in pair.world.events(HandleEnded)} == {"not_made"}
        assert not any(count for count, _ in pair.world.proxy.custodian.snapshot().values())


def completed(cached: int, **more: Any) -> bytes:
    """An engine's answer."""
    details = {"cached_tokens": cached, "created_cache_tokens": 3 - cached}
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "total_tokens": 4,
        "prompt_tokens_details": details,
    }
    choice = {"index": 0, "text": "a", "finish_reason": "length", "prompt_token_ids": [1, 2, 3]}
    return msgspec.json.encode({"id": "cmpl-x", "choices": [choice], "usage": usage, **more})


async def test_both_engines_answer_at_the_same_moment() -> None:
    """The answer shows the counts of the prefill engine's cache, and the audit awaits no KV of a
    leg that is over.
    """
    params = {
        "remote_engine_id": "e",
        "remote_host": "h",
        "remote_port": 1,
        "tp_size": 1,
        "transfer_mode": "push",
    }
    prefilled = completed(1, kv_transfer_params={**params, "remote_prefill_cached_tokens": 1})
    async with pool(PUSH) as pair:
        await known(pair)
        await pair.world.proxy.prober.probe(pair.world.proxy.engines[pair.d.url], scrape=True)
        for _ in range(5):
            Together({pair.p: prefilled, pair.d: completed(3)}, 200).begin()
            answer = await pair.ask(COMPLETIONS, completion())
            assert answer.json["usage"]["prompt_tokens_details"] == {
                "cached_tokens": 1,
                "created_cache_tokens": 2,
            }
        account = pair.world.proxy.engines[pair.d.url].audit.account
        assert account is not None
        assert account.loading == 0


@pytest.mark.parametrize("connector", [PUSH, "mooncake"])
async def test_kv_of_a_prefill_that_was_late_is_not_released_once_more(connector: str) -> None:
    """The decode engine that waited gets it, which frees both sides. With Mooncake, a release after
    that keeps a worker busy.
    """
    clock = ManualClock()
    async with pool(connector, deadlines={"prefill": 7.0}, clock=clock) as pair:
        await known(pair)
        gate = Gate()
        pair.p.faults.script(gate)
        asked = asyncio.ensure_future(pair.ask(COMPLETIONS, completion(stream=True)))
        await until(lambda: len(pair.d.requests) == 2 and pair.d.engine.stats.waiting)
        await clock.reach(7.0)
        assert (await asked).text == await text_of(pair)
        gate.opened.set()
        await pair.world.quiet()
        assert [event.end for event in pair.world.events(HandleEnded)] == ["aborted"]
        assert not pair.d.releases
        assert pair.world.metric("pdproxy_kv_stuck") == 0


async def test_a_prefill_that_fails_while_the_decode_engine_is_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The decode engine is not sent the request any more: it would wait for KV that does not come,
    and nobody would know.
    """
    async with pool(PUSH) as pair:
        await known(pair)
        client, opened = pair.world.proxy.engines[pair.d.url].client, asyncio.Event()
        client.close()
        connect = client._connect

        async def slowly() -> EngineConnection:
            await opened.wait()
            return await connect()

        monkeypatch.setattr(client, "_connect", slowly)
        pair.p.faults.script(fails())
        asked = asyncio.ensure_future(pair.ask(COMPLETIONS, completion()))
        await until(lambda: pair.world.events(HandleEnded))
        opened.set()
        assert (await asked).text == await text_of(pair)
        await pair.world.quiet()
        assert [event.end for event in pair.world.events(HandleEnded)] == ["not_made"]
        assert [one.kv for one in list(pair.d.requests)[1:]] == [None], "alone"


async def test_a_decode_engine_that_has_restarted_waits_for_nothing() -> None:
    """What its run before has waited for is not counted for the new one, which would keep that
    count as long as it lives.
    """
    async with pool(PUSH, decodes=3) as pair:
        await known(pair)
        opened = asyncio.Event()

        async def late_failure(reply: ScriptedReply) -> None:
            await opened.wait()
            await fails()(reply)

        pair.p.faults.script(late_failure)
        decodes = (pair.d, *pair.more)
        for one in decodes:
            # a new connection that breaks is not tried again
            pair.world.proxy.engines[one.url].client.close()
        asked = asyncio.ensure_future(pair.ask(COMPLETIONS, completion()))
        await until(lambda: any(one.engine.awaited for one in decodes))
        (decode,) = [one for one in decodes if one.engine.awaited]
        await decode.kill()
        assert (await asked).text == await text_of(pair)
        await decode.restart()
        await pair.world.probe()
        opened.set()
        await until(lambda: len(pair.world.events(HandleEnded)) == 2)
        assert sorted(event.end for event in pair.world.events(HandleEnded)) == ["loaded", "stuck"]
        assert pair.world.metric("pdproxy_kv_stuck") == 0


class StaleOnce:
    """Scripts of a decode engine: the kept connection is reset once the prefill engine has
    answered; then it says nothing.
    """

    def __init__(self, release: asyncio.Event) -> None:
        self._release = release
        self.asked = 0

    async def __call__(self, reply: ScriptedReply) -> None:
        self.asked += 1
        if self.asked == 1:
            await self._release.wait()
            reply.reset()
        else:
            await reply.stall()


async def test_a_prefill_that_fails_behind_a_decode_leg_whose_connection_was_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next attempt fails with it; one engine alone serves the prompt."""
    monkeypatch.setattr(connection, "STALE_WITHIN", 60.0)
    async with pool(PUSH) as pair:
        await known(pair)
        client, opened, reset = (
            pair.world.proxy.engines[pair.d.url].client,
            asyncio.Event(),
            asyncio.Event(),
        )
        prefill = asyncio.Event()
        connect = client._connect

        async def slowly() -> EngineConnection:
            await opened.wait()
            return await connect()

        async def fails_later(reply: ScriptedReply) -> None:
            await prefill.wait()
            await fails()(reply)

        monkeypatch.setattr(client, "_connect", slowly)
        pair.p.faults.scripts.default = fails_later
        pair.d.faults.script(StaleOnce(reset))
        asked = asyncio.ensure_future(pair.ask(COMPLETIONS, completion()))
        await until(lambda: len(pair.d.requests) == 2)
        reset.set()
        await until(lambda: not client._all)
        prefill.set()
        await until(lambda: pair.world.events(HandleEnded))
        opened.set()
        assert (await asked).text == await text_of(pair)
        await pair.world.quiet()
        assert [one.kv for one in list(pair.d.requests)[2:]] == [None], "alone"
