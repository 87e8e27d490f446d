"""The demo's own traffic, against the simulator and against servers that answer badly."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.demo.traffic import BrokenAnswerError, Traffic, read_chat
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.server import SimServer

CHUNK = b'data: {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"total_tokens": 7}}\n\n'
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def answering(body: bytes, status: int = 200) -> AsyncIterator[str]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, status=status, content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def asked(body: bytes, status: int = 200) -> tuple[str, int]:
    async with answering(body, status) as url, aiohttp.ClientSession() as session:
        return await read_chat(session, f"{url}/v1/chat/completions", {})


async def test_a_whole_stream_is_text_and_tokens() -> None:
    assert await asked(CHUNK + CHUNK + LAST + USAGE + DONE) == ("hihi", 7)


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        (b"{}", 503, "with status 503"),
        (CHUNK + b'data: {"error": {"message": "x"}}\n\n' + DONE, 200, "by an error event"),
        (CHUNK + LAST, 200, "by a stream that broke off"),
        (CHUNK + DONE, 200, "by a stream that broke off"),
        (b"", 200, "by a stream that broke off"),
        (b"data: nonsense\n\n" + DONE, 200, "with an event that is no chunk"),
    ],
)
async def test_what_is_not_whole_is_a_failure_with_its_reason(
    body: bytes, status: int, why: str
) -> None:
    with pytest.raises(BrokenAnswerError, match=why):
        await asked(body, status)


def traffic(url: str, *, people: int = 4) -> Traffic:
    return Traffic(url, "sim", people=people, pause=0.01, context=8192, chance=random.Random(1))


async def until_sent(one: Traffic, count: int) -> None:
    async with asyncio.timeout(60):
        while one.tally.sent < count:
            await asyncio.sleep(0.01)


async def test_people_chat_with_a_simulated_engine_and_every_answer_is_whole() -> None:
    async with SimServer(SimFacts(connector="none", hardware=Hardware(speed=0))) as sim:
        one = traffic(sim.url)
        one.start()
        await until_sent(one, 20)
        await one.stop(10.0)
    assert one.tally.sent == one.tally.whole >= 20
    assert (one.tally.failed, one.tally.cut) == (0, 0)


async def test_failures_are_counted_by_reason_and_tried_again() -> None:
    async with answering(b"{}", 503) as url:
        one = traffic(url, people=8)
        one.start()
        await until_sent(one, 8)
        await one.stop(5.0)
    assert one.tally.failures == {"with status 503": one.tally.sent}


async def test_a_server_that_is_gone_is_a_failure() -> None:
    async with answering(b"") as url:
        pass
    one = traffic(url, people=1)
    one.start()
    await until_sent(one, 1)
    await one.stop(5.0)
    assert one.tally.failures == {"with ClientConnector": 1}


async def test_what_is_under_way_at_the_end_is_cut_and_no_failure() -> None:
    async with SimServer(SimFacts(connector="none", hardware=Hardware(decode_step_s=1.0))) as sim:
        one = traffic(sim.url)
        one.start()
        await until_sent(one, 2)
        await one.stop(0.0)
        assert one.tally.failed == 0
        assert one.tally.cut == one.tally.sent
