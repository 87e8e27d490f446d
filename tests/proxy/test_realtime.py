"""WebSockets on `/v1/realtime`: events go both ways as without a proxy, within the limits of all
requests; each end is told with the code that says why.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.websockets import WebSocket
from websockets.frames import Opcode

from pdproxy.observe.events import DeadlinePassed, RequestEnded, SilenceAllowed
from pdproxy.settings.listen import Cors
from pdproxy.web.slow_readers import SAMPLES
from pdproxy.web.websocket import MAX_FRAMES, PING
from pdproxy.wire.realtime import MAX_EVENT
from tests.fakes import scripts
from tests.fakes.client import Client, bearer, request
from tests.fakes.clock import ManualClock, later_turns, let_loop_time_pass
from tests.fakes.pools import PoolOf, pools
from tests.fakes.tls import Side, front
from tests.fakes.websocket import (
    OFFER,
    REALTIME,
    Event,
    WebSocketClient,
    audio,
    commit,
    frame,
    handshake,
    update,
)
from tests.fakes.world import LONG, World, completion, until, world
from tests.proxy.test_quotas import keys, left
from tests.proxy.watched import AFTER, LOOK, watched

LIVE = {"realtime": True}
KEY = bearer("sk-a")
UTTERANCE = (commit(), audio(1, 1), audio(0.5, 2), audio(1, 3), commit(final=True))
"""The events of 2.5 seconds."""


async def opened(w: World, *headers: tuple[str, str], behind: bytes = b"") -> WebSocketClient:
    """A WebSocket that has no model yet."""
    return await WebSocketClient.open(await w.client(), headers, behind)


async def served(w: World, *headers: tuple[str, str]) -> WebSocketClient:
    """A WebSocket that has an engine."""
    socket = await opened(w, *headers)
    before = len(connected(w))
    socket.send(update())
    await until(lambda: len(connected(w)) > before)
    return socket


def connected(w: World) -> list[Any]:
    """The WebSockets that engines got."""
    return [
        one for engine in w.engines for one in engine.sim.journal.others if one.path == REALTIME
    ]


def passed(w: World, wait: str) -> bool:
    """Whether that deadline was reached."""
    return any(one.wait == wait for one in w.events(DeadlinePassed))


def held(w: World) -> int:
    """Bytes that wait in the proxy, read and unread."""
    return w.body_bytes + sum(one.transport.get_write_buffer_size() for one in w.connections)


# -- what goes on


async def test_events_are_the_engines_own() -> None:
    """The same ones as without a proxy, also the errors among them; the report has the tokens that
    the engine has counted.
    """
    odd: list[Event] = [
        {"type": "input_audio_buffer.append", "audio": "AAA"},
        {"type": "input_audio_buffer.append"},
        {"type": "what"},
        {"type": 5},
        update("other"),
    ]
    async with world(0, 1, facts=LIVE) as w:
        found = []
        for port in (w.decode[0].port, w.port):
            client = await Client.connect(port)
            socket = await WebSocketClient.open(client, [("x-request-id", "mine")])
            socket.send(update(), *odd)
            events = [await socket.event() for _ in odd]
            socket.raw(frame(b"no JSON") + frame(b"[1]"))
            events += [await socket.event(), await socket.event()]
            for number in (1, 4):
                socket.send(commit(), audio(1, number), audio(0.5, 2), commit(final=True))
                events += await socket.until("transcription.done")
            found.append(events)
            socket.close()
            assert await socket.closed() == 1000
        assert found[0] == found[1]
        done = [one for one in found[1] if one["type"] == "transcription.done"]
        assert done[0]["text"] != done[1]["text"]
        ended = await w.ended()
        assert (ended.endpoint, ended.method, ended.status) == (REALTIME, "GET", 101)
        assert (ended.outcome, ended.model, ended.request_id) == ("ok", "tiny", "mine")
        assert ended.legs[0].decode == w.decode[0].url
        usages = [one["usage"] for one in done]
        assert ended.completion_tokens == sum(one["completion_tokens"] for one in usages) == 16
        assert ended.prompt_tokens == sum(one["prompt_tokens"] for one in usages)
        assert connected(w)[1].header("x-request-id") == "mine"


async def test_frames_that_come_with_the_handshake(tmp_path: Path) -> None:
    """They are read behind it; so are messages in parts, with pings in between."""
    async with world(0, 1, facts=LIVE) as w:
        named = json.dumps(update()).encode()
        behind = frame(named[:5], last=False) + frame(b"hi", Opcode.PING)
        behind += frame(named[5:], Opcode.CONT)
        socket = await opened(w, behind=behind)
        socket.send(*UTTERANCE)
        assert (await socket.until("transcription.done"))[-1]["text"]
        socket.close()
        assert await socket.closed() == 1000


async def test_over_tls(ours: Side) -> None:
    """As without."""
    more: dict[str, Any] = {"adjust": front(ours), "client_tls": ours.trusting()}
    async with world(0, 1, facts=LIVE, **more) as w:
        socket = await served(w)
        socket.send(*UTTERANCE)
        await socket.until("transcription.done")
        socket.close()
        assert await socket.closed() == 1000


# -- before an engine is asked


async def test_what_comes_before_the_model() -> None:
    """It is answered as an engine answers a commit there, and no engine is asked."""
    async with world(0, 1, facts=LIVE) as w:
        socket = await opened(w)
        socket.send(audio(0.1), commit(), {"type": "session.update"}, {"type": "x", "model": "y"})
        socket.raw(frame(b"no JSON") + frame(b'{"a":' + b"[" * 100_000))
        socket.send({"type": "session.update", "model": 5, "more": "x"})
        socket.send({"type": "session.update", "model": "tiny", "more": "x" * 70_000})
        found = [await socket.event() for _ in range(8)]
        assert {one["type"] for one in found} == {"error"}
        assert [one["code"] for one in found] == [
            *("model_not_validated", "model_not_validated", "invalid_event", "model_not_validated"),
            *("invalid_json", "invalid_json", "invalid_event", "invalid_event"),
        ]
        assert not connected(w)
        # of a name that comes twice, engines read the last one
        socket.raw(frame(b'{"type":"x","ty\\u0070e":"session.update","model":"tiny"}'))
        socket.send(*UTTERANCE)
        await socket.until("transcription.done")
        socket.client.close()
        ended = await w.ended()
        assert ended.outcome == "client_left"


@pytest.mark.parametrize(
    ("headers", "status", "said"),
    [
        ({"sec-websocket-version": "12"}, 400, "Sec-WebSocket-Version"),
        ({"sec-websocket-key": "short"}, 400, "Sec-WebSocket-Key"),
        ({"sec-websocket-key": ""}, 400, "Sec-WebSocket-Key"),
        ({"content-length": "2"}, 400, "no body"),
        ({"transfer-encoding": "chunked"}, 400, "no body"),
        ({"origin": "https://elsewhere.example"}, 403, "listen.cors"),
        ({"authorization": "Bearer wrong"}, 401, "Incorrect API key"),
        ({"authorization": ""}, 401, "provide an API key"),
        ({"upgrade": "websocket, h2c"}, 404, "is a WebSocket"),
        ({"upgrade": "h2c"}, 404, "is a WebSocket"),
    ],
)
async def test_a_handshake_that_is_refused(headers: dict[str, str], status: int, said: str) -> None:
    """With a plain answer, and the connection ends, or stays one of HTTP/1.1."""
    given = {**dict(OFFER), **dict(KEY), "host": "proxy", **headers}
    lines = [f"{name}: {value}" for name, value in given.items() if value]
    head = "\r\n".join([f"GET {REALTIME} HTTP/1.1", *lines]).encode() + b"\r\n\r\n"
    async with world(0, 1, facts=LIVE, auth={"api_keys": ("sk-a",)}) as w:
        client = await w.client()
        client.send(head)
        answer = await client.answer()
        assert (answer.status, said in answer.json["error"]["message"]) == (status, True)
        if status == 404:
            client.send(request("GET", "/health", b""))
            assert (await client.answer()).status == 200
        else:
            assert await client.closed()
        assert not connected(w)
        assert w.metric("pdproxy_websockets") == 0


async def test_a_page_of_this_server_may_open_one() -> None:
    """And one of a site that `listen.cors` allows, and whatever is no page."""
    site = "https://pages.example"
    async with world(0, 1, facts=LIVE, cors=Cors(allowed_origins=(site,))) as w:
        for origin in ("http://proxy", site):
            await opened(w, ("origin", origin))


async def test_keys(tmp_path: Path) -> None:
    """A key that names other routes gets a 403, one that names other models an event and the end;
    an engine gets its own key, and no client's.
    """
    text = "a:sk-a routes=chat\nb:sk-b models=other\nc:sk-c routes=realtime models=tiny"
    auth = {**keys(tmp_path, text), "engine_api_key": "sk-engine"}
    facts = {**LIVE, "api_key": "sk-engine"}
    async with world(0, 1, facts=facts, auth=auth) as w:
        refused = await w.exchange(handshake(bearer("sk-a")))
        assert (refused.status, refused.json["error"]["type"]) == (403, "ForbiddenError")
        socket = await opened(w, *bearer("sk-b"))
        socket.send(update())
        assert (await socket.event())["code"] == "ForbiddenError"
        assert await socket.closed() == 1008
        assert not connected(w)
        socket = await served(w, *bearer("sk-c"))
        socket.send(update("other"))
        assert (await socket.event())["code"] == "ForbiddenError"
        assert await socket.closed() == 1008
        assert connected(w)[0].header("authorization") == "Bearer sk-engine"


async def test_the_pool_that_has_the_model() -> None:
    """An alias becomes the engines' name; a model of another pool has no way on this WebSocket."""
    wanted = [PoolOf("one"), PoolOf("two", settings={"aliases": {"second": "two"}})]
    async with pools(*wanted) as p:
        for engine in p.engines[1]:
            engine.websocket = echoing
        socket = await WebSocketClient.open(await p.world.client())
        socket.send(update("three"))
        assert (await socket.event())["code"] == "model_not_found"
        socket.send(update("second"))
        assert await socket.event() == update("two")
        socket.send(update("one"))
        assert (await socket.event())["code"] == "model_not_found"
        socket.send(update("second"))
        assert await socket.event() == update("two")
        socket.close()
        assert await socket.closed() == 1000


# -- limits


@pytest.mark.parametrize(
    ("sent", "code", "said"),
    [
        (frame(b"x" * 2000), 1009, "too large"),
        (frame(b"x" * 900, last=False) + frame(b"x" * 900, Opcode.CONT), 1009, "too large"),
        (frame(b"", last=False) + frame(b"", Opcode.CONT, last=False) * MAX_FRAMES, 1008, ""),
        (frame(b"", Opcode.PING) * (MAX_FRAMES + 1), 1008, ""),
        (frame(b"\0", Opcode.BINARY), 1003, ""),
        (b"\x81\x02{}", 1002, ""),
        (frame(b"", Opcode.CONT), 1002, ""),
        (b"\xff" * 40, 1002, ""),
    ],
    ids=[
        "too large",
        "too large in parts",
        "empty parts",
        "pings",
        "bytes",
        "not masked",
        "a part of nothing",
        "no frame",
    ],  # a frame has a random mask
)
@pytest.mark.parametrize("late", [False, True])
async def test_what_no_client_should_send(sent: bytes, code: int, said: str, late: bool) -> None:
    """It ends with the code for that, before an engine is asked and behind that."""
    async with world(0, 1, facts=LIVE, limits={"max_body_bytes": 1000}) as w:
        socket = await (served(w) if late else opened(w))
        socket.raw(sent)
        assert await socket.closed() == code
        ended = await w.ended()
        assert (ended.outcome, said in str(ended.error)) == ("client", True)
        await until(lambda: not held(w) and not w.open_connections)


async def test_fragments_without_end() -> None:
    """No more is held than the largest message; then the end."""
    async with world(0, 1, facts=LIVE, limits={"max_body_bytes": 1 << 20}) as w:
        socket = await served(w)
        socket.raw(frame(b"x", last=False))
        most, part = 0, frame(b"x" * 1000, Opcode.CONT, last=False)
        while not socket.client.writer.transport.is_closing() and not w.events(RequestEnded):
            socket.raw(part * 50)
            await asyncio.sleep(0)
            most = max(most, held(w))
        assert await socket.closed() == 1009
        assert most < 3 << 20


async def test_a_flood_of_pings_leaves_turns_to_others() -> None:
    """Others are served meanwhile, and the client that reads no answers is not read meanwhile."""
    async with world(1, 1, facts=LIVE) as w:
        socket = await WebSocketClient.open(await w.client(receive_buffer=4096))
        socket.send(update())
        reading: Any = socket.client.writer.transport
        reading.pause_reading()
        for _ in range(60):
            socket.raw(frame(b"x" * 125, Opcode.PING) * 1000 + frame(b"{}"))
        await until(lambda: any(one.flow.write_paused for one in w.connections))
        answer = await w.ask("/v1/completions", completion())
        assert answer.status == 200
        assert held(w) < 2 << 20
        reading.resume_reading()
        for _ in range(60):
            assert (await socket.event())["code"] == "unknown_event"
        socket.client.close()


async def test_bodies_of_all_clients_share_their_space() -> None:
    """What has no space ends with 1013, as a body gets 503."""
    limits = {"max_body_bytes": 1 << 20, "max_buffered_bytes": 1_300_000}
    async with world(0, 1, facts=LIVE, limits=limits) as w:
        first, second = await opened(w), await opened(w)
        first.raw(frame(b"x" * 1_000_000)[:900_000])
        await until(lambda: w.body_bytes >= 900_000)
        second.raw(frame(b"x" * 1_000_000)[:900_000])
        assert (await second.event())["code"] == "bodies"
        assert await second.closed() == 1013
        first.client.close()
        await until(lambda: not w.body_bytes)


async def test_it_has_one_place() -> None:
    """From its model to its end; others wait, as behind any request."""
    async with world(0, 1, facts=LIVE, limits={"max_inflight": 1}) as w:
        first = await served(w)
        assert w.inflight == 1
        assert [text for text in w.busy() if "has 1 requests" in text]
        second = await opened(w)
        second.send(update())
        await until(lambda: w.waiting == 1)
        assert w.metric("pdproxy_websockets") == 2
        first.close()
        assert await first.closed() == 1000
        second.send(*UTTERANCE)
        await second.until("transcription.done")
        second.client.close()
        await w.ended(2)
        await until(lambda: w.inflight == 0)
        assert w.metric("pdproxy_websockets") == 0


async def test_one_without_an_engine_makes_room() -> None:
    """As any idle connection does; one with an engine stays."""
    async with world(0, 1, facts=LIVE, limits={"max_connections": 2}) as w:
        first, idle = await served(w), await opened(w)
        third = await opened(w)
        assert (await idle.event())["code"] == "connections"
        assert await idle.closed() == 1013
        for socket in (first, third):
            socket.send(update(), *UTTERANCE)
            await socket.until("transcription.done")
            socket.client.close()


async def test_behind_another_request() -> None:
    """A handshake waits for the answer before, and the frames behind it wait, too."""
    async with world(1, 1, facts=LIVE) as w:
        client = await w.client()
        behind = b"".join(frame(json.dumps(one).encode()) for one in (update(), {"type": "x"}))
        client.post("/v1/completions", completion())
        client.send(handshake() + behind)
        assert (await client.answer()).status == 200
        assert (await client.head()).status == 101
        socket = WebSocketClient(client)
        assert [(await socket.event())["type"] for _ in range(2)] == ["session.created", "error"]
        socket.close()
        assert await socket.closed() == 1000


async def test_tokens_of_a_minute(tmp_path: Path) -> None:
    """They are charged as they come: a key without any left loses its WebSocket."""
    async with world(0, 1, facts=LIVE, auth=keys(tmp_path, "a:sk-a tpm=40")) as w:
        w.decode[0].sim.websocket = writing(30)
        socket = await served(w, *KEY)
        await socket.until("transcription.done")
        assert await left(w) == pytest.approx(10, abs=2)
        socket.send(commit())
        found = await socket.until("error")
        assert found[-1]["code"] == "key_tokens"
        assert len(found) < 20
        assert await socket.closed() == 1013
        assert await left(w) < 1


# -- deadlines


async def test_a_client_that_names_no_model() -> None:
    """It gets an event, and the end, after `deadlines.client_body`."""
    clock = ManualClock()
    async with world(0, 1, facts=LIVE, clock=clock, deadlines={"client_body": 21}) as w:
        socket = await opened(w)
        socket.send(audio(0.1))
        await socket.event()
        await clock.reach(21)
        assert "session.update" in (await socket.event())["error"]
        assert await socket.closed() == 1008
        assert passed(w, "client_body")


async def test_nothing_goes_on() -> None:
    """After `deadlines.websocket_idle` it ends, whatever pings come."""
    clock = ManualClock()
    heard: list[str] = []
    engines: list[WebSocket] = []
    async with world(0, 1, facts=LIVE, clock=clock, deadlines={"websocket_idle": 33}) as w:
        w.decode[0].sim.websocket = listening(heard, engines)
        socket = await served(w)
        await clock.advance(17)
        socket.send(audio(0.1))
        await until(lambda: len(heard) == 2)
        await clock.advance(17)
        await engines[0].send_text("{}")
        assert await socket.event() == {}
        await clock.advance(17)
        socket.raw(frame(b"", Opcode.PING))
        await later_turns()
        assert w.inflight == 1
        await clock.advance(17)
        assert "33 s" in (await socket.event())["error"]
        assert await socket.closed() == 1008
        assert passed(w, "websocket_idle")


async def test_a_client_that_answers_no_ping() -> None:
    """Its machine has no power: the connection is dropped behind the second ping, with its place
    and its engine.
    """
    clock = ManualClock()
    async with world(0, 1, facts=LIVE, clock=clock) as w:
        socket = await served(w)
        await clock.reach(PING)
        socket.send({"type": "x"})
        await socket.event()
        assert socket.pings == 1
        await clock.reach(PING)
        await clock.reach(PING)
        await until(lambda: w.inflight == 0)
        assert passed(w, "pong")
        assert (await w.ended()).outcome == "client_left"


async def test_a_client_that_never_reads() -> None:
    """It holds little of what its engine sends, and is dropped after `deadlines.client_write`."""
    clock = ManualClock()
    async with world(0, 1, facts=LIVE, clock=clock, deadlines={"client_write": 12}) as w:
        w.decode[0].sim.websocket = writing(1000, "word " * 20_000)
        socket = await served(w)
        socket.client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: any(one.flow.write_paused for one in w.connections))
        seen: list[int] = []  # the system's buffers may still grow

        def stands_still() -> bool:
            seen.append(held(w))
            return len(seen) > 20 and len({*seen[-20:]}) == 1

        await until(stands_still)
        assert held(w) < 1 << 20
        # what the system's buffers took at first may count for one more
        for _ in range(SAMPLES + 1):
            if 1 in clock.pending():
                await clock.reach(1)
        await until(lambda: w.inflight == 0)
        assert passed(w, "client_write")


# -- engines


async def test_an_engine_that_is_lost() -> None:
    """1011, with an event before; it is not asked again."""
    async with world(0, 2, facts=LIVE) as w:
        socket = await served(w)
        (engine,) = [one for one in w.decode if connected(w)[0] in one.sim.journal.others]
        await engine.sim.kill()
        assert (await socket.event())["type"] == "error"
        assert await socket.closed() == 1011
        assert len(connected(w)) == 1
        ended = await w.ended()
        assert (ended.outcome, ended.status) == ("engine", 101)


async def test_an_engine_that_takes_no_connection() -> None:
    """Another one is asked."""
    async with world(0, 2, facts=LIVE) as w:
        w.decode[0].stop()
        sockets = [await served(w) for _ in range(2)]
        for socket in sockets:
            socket.send(*UTTERANCE)
            await socket.until("transcription.done")
            socket.client.close()
        assert {one.legs[0].decode for one in [await w.ended(1), await w.ended(2)]} == {
            w.decode[1].url
        }


async def test_an_engine_without_the_route() -> None:
    """Its refusal is told, and the WebSocket ends; the engine is as good as before."""
    async with world(0, 1) as w:
        socket = await opened(w)
        socket.send(update())
        assert "answered 403" in (await socket.event())["error"]
        assert await socket.closed() == 1008
        assert (await w.ended()).outcome == "client"
        assert w.proxy.ledger.engines[0].failures == 0


async def test_an_engine_that_never_reads() -> None:
    """One message is sent, and the next ones wait with the client: little is held."""
    async with world(0, 1, facts=LIVE, leaves=True) as w:
        socket = await served(w)
        socket.send({"type": "x"})
        await socket.event()
        await w.decode[0].sim.freeze()
        for number in range(16):
            socket.send(audio(20, number))  # 14 MB in all
        await until(lambda: all(one.flow.read_paused for one in w.connections))
        await later_turns()
        assert held(w) < 2 << 20
        socket.client.reset()
        await w.decode[0].sim.thaw()
        await until(lambda: w.inflight == 0, 40)


@pytest.mark.asyncio_loop
async def test_an_engine_that_answers_no_ping() -> None:
    """Its machine has no power: 1011 behind a ping, without anything that the client sends."""
    async with world(0, 1, facts=LIVE) as w:
        socket = await served(w)
        socket.send({"type": "x"})
        await socket.event()
        await w.decode[0].sim.freeze()
        for seconds in (PING + 1, PING):
            let_loop_time_pass(seconds)
            await later_turns()
        assert (await socket.event())["type"] == "error"
        assert await socket.closed() == 1011
        await w.decode[0].sim.thaw()


async def test_an_engine_that_sends_too_much() -> None:
    """A message over the limit ends it, and one that nobody can read does not."""

    async def huge(scope: Any, receive: Any, send: Any) -> None:
        socket = WebSocket(scope, receive, send)
        await socket.accept()
        await socket.receive_text()
        await socket.send_text("no JSON")
        await socket.send_text("x" * (MAX_EVENT + 1))
        await asyncio.sleep(LONG)

    async with world(0, 1, facts=LIVE) as w:
        w.decode[0].sim.websocket = huge
        socket = await opened(w)
        socket.send(update())
        with pytest.raises(json.JSONDecodeError):
            await socket.event()
        assert (await socket.event())["type"] == "error"
        assert await socket.closed() == 1011
        assert w.proxy.ledger.engines[0].failures == 0


# -- engines whose core stands still


@pytest.mark.parametrize("owed", [True, False])
@pytest.mark.parametrize("asked", [True, False])
async def test_a_core_that_stands_still(owed: bool, asked: bool) -> None:
    """1011, also if nothing else runs there. Where the engine can't be asked for a token, only the
    end of an utterance shows it: before that, nobody may have spoken.
    """
    refusal: Any = scripts.whole(b"{}", 403)
    async with watched(prefills=1, decodes=2, everybody={**LIVE, "eos_every": 0}) as w:
        socket = await WebSocketClient.open(await w.world.client())
        socket.send(update(), commit(), audio(1, 1))
        await socket.until("transcription.delta")
        (sim,) = [one for one in w.sims if REALTIME in [other.path for other in one.journal.others]]
        if not asked:
            sim.scripts.default = refusal
        await sim.freeze_core()
        socket.send(audio(1, 2), *[commit(final=True)] * owed)
        await later_turns()
        await w.pass_(AFTER + LOOK)
        assert w.stalled == [sim.url] * (owed or asked)
        if w.stalled:
            assert "stands still" in (await socket.until("error"))[-1]["error"]
            assert await socket.closed() == 1011
        socket.client.close()
        sim.scripts.default = None
        await sim.thaw_core()


@pytest.mark.parametrize("frozen", [True, False])
async def test_the_only_engine_is_silent(frozen: bool) -> None:
    """For `deadlines.between_tokens`, at the end of an utterance: 1011 if its core shows nothing.
    One that works is waited for.
    """
    deadlines = {"between_tokens": 20.0, "websocket_idle": 30.0}
    async with watched(everybody=LIVE, deadlines=deadlines) as w:
        heard: list[str] = []
        w.pair.d.websocket = listening(heard)
        if frozen:
            await w.pair.d.freeze_core()
        socket = await WebSocketClient.open(await w.world.client())
        socket.send(update(), commit(), audio(1), commit(final=True))
        await until(lambda: len(heard) == 4)
        await later_turns()
        await w.pass_(21)
        allowed = [one.wait for one in w.world.events(SilenceAllowed)]
        assert allowed == ["between_tokens"] * (not frozen)
        await w.pass_(10)
        assert (await socket.event())["type"] == "error"
        assert await socket.closed() == (1011 if frozen else 1008)
        waits = {one.wait for one in w.world.events(DeadlinePassed)}
        assert waits >= {"between_tokens" if frozen else "websocket_idle"}
        assert w.stalled == []


# -- ends


async def test_a_key_that_is_taken_away(tmp_path: Path) -> None:
    """1008 behind an event, also before it has an engine; the engine is told."""
    path = tmp_path / "keys"
    path.write_text("a:sk-a\na:sk-b\n")
    async with world(0, 1, facts=LIVE, auth={"api_keys_file": str(path)}) as w:
        sockets = [await opened(w, *KEY), await served(w, *KEY)]
        other = await served(w, *bearer("sk-b"))
        path.write_text("a:sk-b\n")
        w.look_at_files()
        for socket in sockets:
            assert (await socket.event())["code"] == "key_revoked"
            assert await socket.closed() == 1008
        other.send(*UTTERANCE)
        await other.until("transcription.done")
        other.close()
        assert await other.closed() == 1000
        assert len(w.events(RequestEnded)) == 3


async def test_a_drain() -> None:
    """It may go on until `deadlines.drain`, and ends with 1001; a new one is refused."""
    async with world(0, 1, facts=LIVE, deadlines={"drain": 0.5}) as w:
        socket, late = await served(w), await opened(w)
        draining = asyncio.ensure_future(w.drain())
        await until(lambda: w.proxy.admission.closed)
        late.send(update())
        assert (await late.event())["code"] == "draining"
        assert await late.closed() == 1001
        socket.send({"type": "x"})
        assert (await socket.event())["code"] == "unknown_event"
        assert (await socket.event())["code"] == "draining"
        assert await socket.closed() == 1001
        await draining


# -- engines of these tests


async def echoing(scope: Any, receive: Any, send: Any) -> None:
    """An engine that sends back what it gets."""
    socket = WebSocket(scope, receive, send)
    await socket.accept()
    while True:
        await socket.send_text(await socket.receive_text())


def listening(heard: list[str], engines: list[WebSocket] | None = None) -> Any:
    """An engine that answers nothing. It notes what it hears, and its ends of WebSockets."""

    async def listen(scope: Any, receive: Any, send: Any) -> None:
        socket = WebSocket(scope, receive, send)
        await socket.accept()
        if engines is not None:
            engines.append(socket)
        while True:
            heard.append(await socket.receive_text())

    return listen


def writing(words: int, word: str = "word ") -> Any:
    """An engine that writes so many words behind each event."""

    async def write(scope: Any, receive: Any, send: Any) -> None:
        socket = WebSocket(scope, receive, send)
        await socket.accept()
        while True:
            await socket.receive_text()
            for _ in range(words):
                await socket.send_json({"type": "transcription.delta", "delta": word})
                await asyncio.sleep(0)
            usage = {"prompt_tokens": 0, "completion_tokens": words, "total_tokens": words}
            await socket.send_json({"type": "transcription.done", "text": "", "usage": usage})

    return write
