"""A client that leaves, at every stage: the engines are told at once, and no KV stays behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from pdproxy.observe.events import HandleEnded
from pdproxy.serving.dispatch.decode_leg import ACCEPT_GRACE, ACCEPTED_UNSEEN, DecodeLeg
from pdproxy.serving.kv.late_close import HEALTH_GRACE
from pdproxy_lab.sim.journal import Request
from tests.fakes import answers, scripts
from tests.fakes.client import Client
from tests.fakes.clock import ManualClock
from tests.fakes.engine import FakeEngine, Reply, prefill
from tests.fakes.scripts import WORD
from tests.fakes.world import CHAT, COMPLETIONS, LONG, World, chat, completion, until, world

STREAM = pytest.mark.parametrize("stream", [False, True])


async def leave(client: Client, how: str = "close") -> None:
    """Have the client leave."""
    if how == "reset":
        client.reset()
    else:
        client.close()


async def closed(request: Request) -> None:
    """Wait until an engine sees its leg closed. Where the clock stands still this shows that
    nothing waited for a deadline.
    """
    await asyncio.wait_for(request.left.wait(), LONG)


async def headers_came(w: World, expected: int = 200) -> None:
    """Wait until the proxy has the headers of the decode leg, with that status."""

    def status() -> int:
        open_legs = [one.engines[w.decode[0].url].open_legs.legs for one in w.workers]
        leg = next((leg for legs in open_legs for leg in legs), None)
        relay = leg.relay if isinstance(leg, DecodeLeg) else None
        return 0 if relay is None else relay.status

    await until(lambda: status() == expected)


async def asked(w: World, engine: FakeEngine, **fields: object) -> tuple[Client, Request]:
    """A client of a completion, and the request that has come of it to an engine."""
    client = await w.client()
    client.post(COMPLETIONS, completion(**fields))
    return client, await engine.asked()


def ends(w: World) -> list[str]:
    """How the handles ended, as the proxy saw it."""
    return [event.end for event in w.events(HandleEnded)]


@STREAM
async def test_before_the_prefill_engine_answers(stream: bool) -> None:
    """The prefill leg stays open for its answer, and the KV that it brings is given back; no decode
    engine is asked.
    """
    go = asyncio.Event()
    async with world() as w:
        w.prefill[0].script(scripts.gate(go, prefill))
        client, request = await asked(w, w.prefill[0], stream=stream)
        await leave(client)
        report = await w.ended()
        assert report.outcome == "client_left"
        assert w.metric("pdproxy_node_inflight", node=w.prefill[0].url) == 1, "it is still at work"
        assert w.metric("pdproxy_node_inflight", node=w.decode[0].url) == 0
        assert not request.left.is_set()
        go.set()
        await w.decode[0].given_back()
        await w.quiet()
        assert not w.decode[0].requests
        assert w.books.endings == {"released": 1}
        assert ends(w) == ["released"]


@pytest.mark.parametrize("after", ["eof", "500", "no handle", "garbage"])
async def test_before_a_prefill_that_fails(after: str) -> None:
    """An abandoned prefill that fails leaves nothing to give back, and is over."""
    go = asyncio.Event()
    then = {
        "eof": scripts.eof,
        "500": scripts.whole(answers.INTERNAL_500, 500),
        "no handle": scripts.whole(answers.whole(False, [1], "x", 1)),
        "garbage": scripts.garbage,
    }[after]
    async with world() as w:
        w.prefill[0].script(scripts.gate(go, then))
        client, _ = await asked(w, w.prefill[0])
        await leave(client)
        await w.ended()
        go.set()
        await w.quiet()
        assert not w.decode[0].releases


async def test_before_a_prefill_that_never_answers() -> None:
    """The grace for an abandoned prefill has a deadline; then its leg is closed and counted."""
    clock = ManualClock()
    async with world(deadlines={"abandoned_prefill": 7}, clock=clock) as w:
        w.prefill[0].script(scripts.stall)
        client, request = await asked(w, w.prefill[0])
        await leave(client)
        await w.ended()
        assert not request.left.is_set()
        await clock.reach(7)
        await closed(request)
        await w.quiet()
        assert w.metric("pdproxy_deadline_total", wait="abandoned_prefill") == 1


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_after_the_decode_engine_was_asked_before_its_headers_streamed(how: str) -> None:
    """An engine that shows nothing is closed after a grace, and the KV is given back: it may not
    have seen the handle.
    """
    clock = ManualClock()
    async with world(decode=2, clock=clock) as w:
        for engine in w.decode:
            engine.script(scripts.stall)
        client = await w.client()
        client.post(CHAT, chat(stream=True))
        await until(lambda: any(engine.requests for engine in w.decode))
        request = next(engine.requests[0] for engine in w.decode if engine.requests)
        await leave(client, how)
        await clock.reach(ACCEPT_GRACE)
        await closed(request)
        await w.quiet()
        assert ends(w) == ["released"]
        assert sum(len(engine.releases) for engine in w.decode) == 1


async def test_after_the_decode_engine_was_asked_and_its_headers_come_in_the_grace() -> None:
    """An engine that accepts the request just after the client left owns the KV: it is closed,
    nothing is released.
    """
    go = asyncio.Event()
    clock = ManualClock()
    async with world(clock=clock) as w:
        w.decode[0].script(scripts.gate(go, scripts.streams(then="stall")))
        client, request = await asked(w, w.decode[0], stream=True)
        await leave(client)
        go.set()
        await headers_came(w)
        await clock.advance(0)
        await clock.reach(ACCEPT_GRACE)
        await closed(request)
        await w.quiet()
        assert ends(w) == ["aborted"]
        assert not w.decode[0].releases
        await until(lambda: w.books.endings == {"aborted": 1})


@pytest.mark.parametrize("status", [400, 500])
async def test_a_decode_engine_that_refuses_in_the_grace(status: int) -> None:
    """An engine that refuses just after the client left owns nothing: the KV is given back."""
    go = asyncio.Event()
    async with world(clock=ManualClock()) as w:
        w.decode[0].script(scripts.gate(go, scripts.whole(answers.SCHEMA_400, status)))
        client, _ = await asked(w, w.decode[0], stream=True)
        await leave(client)
        go.set()
        await w.quiet()
        assert ends(w) == ["released"]


@pytest.mark.parametrize("status", [400, 500])
async def test_a_decode_engine_that_refuses_in_the_grace_and_does_not_end_its_refusal(
    status: int,
) -> None:
    """Its status says enough."""

    async def script(reply: Reply) -> None:
        await reply.raw(b"HTTP/1.1 %d No\r\ncontent-length: 500\r\n\r\n{" % status)
        await reply.stall()

    async with world(clock=ManualClock()) as w:
        w.decode[0].script(script)
        client, request = await asked(w, w.decode[0], stream=True)
        await headers_came(w, status)
        await leave(client)
        await closed(request)
        await w.quiet()
        assert ends(w) == ["released"]


async def test_the_kv_is_released_through_another_engine_than_the_one_that_was_asked() -> None:
    """That one has shown nothing. It has less to do than the other one, which does not count."""
    clock = ManualClock()
    async with world(decode=2, clock=clock) as w:
        for engine in w.decode:
            engine.script(scripts.stall)
        stays, leaves = await w.client(), await w.client()
        stays.post(COMPLETIONS, completion(stream=True))
        await until(lambda: any(engine.requests for engine in w.decode))
        busy, other = sorted(w.decode, key=lambda engine: not engine.requests)
        leaves.post(COMPLETIONS, completion(stream=True))
        await other.asked()
        await leave(leaves)
        await clock.reach(ACCEPT_GRACE)
        await until(lambda: len(busy.releases) == 1)
        await leave(stays)
        await clock.reach(ACCEPT_GRACE)
        await w.quiet()
        assert ends(w) == ["released"] * 2
        assert (len(busy.releases), len(other.releases)) == (1, 1)


@pytest.mark.parametrize("long", [False, True])
async def test_after_the_decode_engine_was_asked_unstreamed(long: bool) -> None:
    """An unstreamed leg shows nothing before its end: closed after the grace, the KV given back if
    it was just asked.

    Once time has shown that the engine has the request, closing its leg is enough.
    """
    clock = ManualClock()
    async with world(clock=clock) as w:
        w.decode[0].script(scripts.stall)
        client, request = await asked(w, w.decode[0])
        await clock.advance(2 * ACCEPTED_UNSEEN if long else 0)
        await leave(client)
        if not long:
            await clock.reach(ACCEPT_GRACE)
        await closed(request)
        await w.quiet()
        assert ends(w) == ["aborted" if long else "released"]
        assert bool(w.decode[0].releases) is not long


@pytest.mark.parametrize("healthy", [True, False])
async def test_a_client_with_a_deadline_does_not_wait_for_the_end_of_its_leg(healthy: bool) -> None:
    """A silent engine is asked whether it is healthy, and the leg stays open until it has said so:
    the client has its answer before.
    """
    clock, go = ManualClock(), asyncio.Event()
    async with world(decode=2, clock=clock) as w:
        for engine in w.decode:
            engine.script(scripts.stall)
            engine.admin["/health"] = scripts.gate(go, scripts.whole(b""))
        client = await w.client()
        client.post(COMPLETIONS, completion(), [("x-request-timeout", "5")])
        await until(lambda: any(engine.requests for engine in w.decode))
        request = next(engine.requests[0] for engine in w.decode if engine.requests)
        await clock.reach(5)
        assert (await client.answer()).status == 504
        assert not request.left.is_set()
        if healthy:
            go.set()
        else:
            await clock.reach(HEALTH_GRACE)
        await closed(request)
        await w.quiet()
        assert ends(w) == ["aborted" if healthy else "released"]
        assert sum(len(engine.releases) for engine in w.decode) == (not healthy)


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_after_headers_before_data(how: str) -> None:
    """Between the engine's headers and its first data: closed after a grace, and the engine frees
    both sides.
    """
    clock = ManualClock()
    async with world(clock=clock) as w:
        w.decode[0].script(scripts.streams(then="stall"))
        client, request = await asked(w, w.decode[0], stream=True)
        await headers_came(w)
        await leave(client, how)
        assert not request.left.is_set()
        await clock.reach(ACCEPT_GRACE)
        await closed(request)
        await w.quiet()
        assert ends(w) == ["aborted"]


@pytest.mark.parametrize(
    ("then", "end"),
    [
        (WORD, "aborted"),
        (answers.error_event(), "released"),
        (answers.DONE, "released"),
        (b"", "released"),
    ],
    ids=["data", "error", "end mark", "connection lost"],
)
async def test_after_headers_the_first_event_decides(then: bytes, end: str) -> None:
    """A client leaves between the headers and the first event: behind an error, the decode engine
    does not have the KV.
    """
    go = asyncio.Event()

    async def script(reply: Reply) -> None:
        await reply.start()
        await go.wait()
        if not then:
            reply.reset()
            return
        await (
            reply.piece(then) if then == WORD else reply.raw(b"%x\r\n%b\r\n" % (len(then), then))
        )
        await reply.stall()

    async with world(clock=ManualClock()) as w:
        w.decode[0].script(script)
        client, request = await asked(w, w.decode[0], stream=True)
        await headers_came(w)
        await leave(client)
        go.set()
        if then:
            await closed(request)
        await w.quiet()
        assert ends(w) == [end]


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_mid_stream(how: str) -> None:
    """In the stream: the decode leg is closed at once; the KV had been loaded."""
    async with world(clock=ManualClock()) as w:
        w.decode[0].script(scripts.streams(WORD, then="stall"))
        client = await w.client()
        client.post(COMPLETIONS, completion(stream=True))
        await client.head()
        assert await client.piece() == WORD
        request = w.decode[0].requests[0]
        await leave(client, how)
        await closed(request)
        await w.quiet()
        assert ends(w) == ["loaded"]
        assert (await w.ended()).outcome == "client_left"


async def test_in_the_middle_of_a_list() -> None:
    """All streams of a list are closed together."""
    async with world(clock=ManualClock()) as w:
        w.decode[0].default = scripts.streams(WORD, then="stall")
        client = await w.client()
        client.post(COMPLETIONS, completion(prompt=["p" * 50, "q" * 50], stream=True))
        await client.head()
        await client.piece()
        await w.decode[0].asked(2)
        await leave(client)
        for request in w.decode[0].requests:
            await closed(request)
        await w.quiet()


async def test_in_the_queue() -> None:
    """A client that leaves while waiting for a place frees its place in the queue; no engine hears
    of it.
    """
    async with world(limits={"max_inflight": 1}) as w:
        w.decode[0].script(scripts.streams(WORD, then="stall"))
        first = await w.client()
        first.post(COMPLETIONS, completion(stream=True))
        await first.head()
        second = await w.client()
        second.post(COMPLETIONS, completion())
        await until(lambda: w.waiting == 1)
        await leave(second)
        await until(lambda: w.waiting == 0)
        await leave(first)
        await w.quiet()
        assert len(w.prefill[0].requests) == 1


async def test_in_the_middle_of_its_own_body() -> None:
    """A client that leaves before its body is whole was never a request."""
    async with world() as w:
        client = await w.client()
        client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        await until(lambda: w.tasks)
        await leave(client)
        await until(lambda: not w.tasks)
        assert not w.prefill[0].requests


async def test_between_prefill_and_decode() -> None:
    """A client that leaves while the decode engine takes no connection: nobody was told, the KV is
    given back.
    """
    async with world(decode=2) as w:
        blocked = [True]
        for client_of in [
            one.engines[engine.url].client for one in w.workers for engine in w.decode
        ]:

            async def connect(
                original: Callable[[], Awaitable[object]] = client_of._connect,
            ) -> object:
                if blocked and blocked.pop():
                    await asyncio.Event().wait()
                return await original()

            client_of._connect = connect  # type: ignore[assignment, method-assign]
        client = await w.client()
        client.post(COMPLETIONS, completion(stream=True))
        await until(lambda: w.books.history)
        await until(lambda: not blocked)
        assert sum(one.custodian.snapshot()["held"][0] for one in w.workers) == 1, (
            "no engine was asked yet"
        )
        counts = sum((one.custodian.counts() for one in w.workers), Counter[str]())
        assert counts == {w.prefill[0].url: 1}
        await leave(client)
        await w.quiet()
        assert ends(w) == ["released"]
        assert not any(engine.requests for engine in w.decode)
