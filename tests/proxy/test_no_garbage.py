"""A request is freed by reference counts: whatever became of it, the garbage collector finds
nothing of ours afterwards.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from websockets.frames import Opcode

from pdproxy.kit.errors import PdproxyError
from tests.fakes import garbage, scripts
from tests.fakes.client import request
from tests.fakes.garbage import left_to_the_collector
from tests.fakes.websocket import WebSocketClient, audio, commit, frame, handshake, update
from tests.fakes.world import COMPLETIONS, World, completion, until, world

pytestmark = pytest.mark.timeout(120, method="thread")  # uvloop's own loop does not end by a signal

BATCH = "/v1/chat/completions/batch"
EVENT = b'data: {"id":"x","choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'


async def whole(w: World) -> None:
    assert (await w.ask(COMPLETIONS, completion())).status == 200


async def streamed(w: World) -> None:
    assert (await w.ask(COMPLETIONS, completion(stream=True))).status == 200


async def a_list(w: World) -> None:
    assert (
        await w.ask(COMPLETIONS, completion(stream=True, prompt=["one" * 50, "two" * 50]))
    ).status == 200


async def refused(w: World) -> None:
    assert (await w.ask(COMPLETIONS, b"{")).status == 400


async def no_prefill(w: World) -> None:
    w.prefill[0].script(scripts.eof)
    assert (await w.ask(COMPLETIONS, completion(stream=True))).status == 200


async def no_decode(w: World) -> None:
    w.decode[0].script(scripts.eof, scripts.eof, scripts.eof, scripts.eof)
    assert (await w.ask(COMPLETIONS, completion())).status in (200, 502)


async def broken_off(w: World) -> None:
    w.decode[0].script(scripts.streams(EVENT, then="reset"))
    assert (await w.ask(COMPLETIONS, completion(stream=True))).status == 200


async def left(w: World) -> None:
    w.decode[0].script(scripts.streams(EVENT, then="stall"))
    client = await w.client()
    client.send(request("POST", COMPLETIONS, completion(stream=True)))
    await until(lambda: bool(w.decode[0].requests) and w.inflight == 1)
    client.close()


async def health(w: World) -> None:
    assert (await w.get("/health")).status == 200


async def passed(w: World) -> None:
    assert (await w.ask("/tokenize", {"model": "tiny", "prompt": "one"})).status == 200


def conversations(*contents: object) -> dict[str, object]:
    """The body of a batch."""
    return {
        "model": "tiny",
        "max_tokens": 2,
        "messages": [[{"role": "user", "content": one}] for one in contents],
    }


async def a_batch(w: World) -> None:
    assert (await w.ask(BATCH, conversations("one" * 50, "two" * 50))).status == 200


async def a_whole_batch(w: World) -> None:
    assert (await w.ask(BATCH, {**conversations("one", "two"), "echo": True})).status == 200


async def a_refused_batch(w: World) -> None:
    assert (await w.ask(BATCH, conversations("one" * 50, [{"type": "image_url"}]))).status == 400


async def invoked(w: World) -> None:
    assert (await w.ask("/invocations", completion(stream=True))).status == 200
    assert (await w.ask("/invocations", {"input": "x"})).status == 400


async def spoken(w: World) -> None:
    socket = await WebSocketClient.open(await w.client())
    socket.send(update(), {"type": "session.update"}, commit(), audio(), commit(final=True))
    await socket.until("transcription.done")
    socket.close()
    assert await socket.closed() == 1000


async def spoken_and_left(w: World) -> None:
    socket = await WebSocketClient.open(await w.client())
    socket.send(update(), commit(), audio())
    await socket.event()
    socket.client.close()


async def spoken_wrong(w: World) -> None:
    for sent in (frame(b"", Opcode.BINARY), frame(b"", Opcode.CONT)):
        socket = await WebSocketClient.open(await w.client())
        socket.send(update())
        socket.raw(sent)
        assert await socket.closed() in (1002, 1003)
    assert (await w.exchange(handshake([("content-length", "1")]))).status == 400


async def not_heard(w: World) -> None:
    socket = await WebSocketClient.open(await w.client())
    socket.send(update(), {"type": "x"})
    await socket.event()
    await w.decode[0].sim.restart()
    assert await socket.closed() == 1011


async def unread(w: World) -> None:
    w.decode[0].script(scripts.streams(*[EVENT * 500] * 100, then="stall"))
    client = await w.client(receive_buffer=4096)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.send(request("POST", COMPLETIONS, completion(stream=True)))
    await until(lambda: w.metric("pdproxy_deadline_total", wait="client_write"))


@pytest.mark.parametrize(
    "act",
    [
        *(
            whole,
            streamed,
            a_list,
            refused,
            no_prefill,
            no_decode,
            broken_off,
            left,
            health,
            passed,
            unread,
        ),
        *(a_batch, a_whole_batch, a_refused_batch, invoked),
        *(spoken, spoken_and_left, spoken_wrong, not_heard),
    ],
)
def test_nothing_is_left_to_the_collector(act: Callable[[World], Awaitable[None]]) -> None:
    """All of a request has gone with its last reference."""
    live = world(deadlines={"client_write": 1.2}, facts={"realtime": True})
    garbage.check(live, act, World.quiet, before=streamed)


def test_a_cycle_is_found() -> None:
    """Otherwise the tests above would prove nothing."""
    with left_to_the_collector() as found:
        error = PdproxyError("x")
        error.__cause__ = error
        del error
    assert [type(one) for one in found] == [PdproxyError]
