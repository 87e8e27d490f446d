"""The WebSocket of a model of live speech: events, refusals and ends as vLLM 0.32.0 has them."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace
from websockets.frames import Opcode

from pdproxy_lab.sim.api.realtime import TOKENS
from pdproxy_lab.sim.server import SimServer
from tests.fakes.client import Client, bearer
from tests.fakes.websocket import WebSocketClient, audio, commit, frame, handshake, update
from tests.sim.moments import FAST


@pytest.fixture
async def live() -> AsyncIterator[SimServer]:
    async with SimServer(replace(FAST, realtime=True, eos_every=0), chance=7) as made:
        yield made
        assert not made.crashes


async def opened(sim: SimServer, **headers: str) -> WebSocketClient:
    return await WebSocketClient.open(await Client.connect(sim.port), [*headers.items()])


async def said(sim: SimServer, *numbers: int) -> list[dict[str, Any]]:
    """What is written of so many seconds of audio."""
    socket = await opened(sim)
    socket.send(update("sim"), commit(), *(audio(1, number) for number in numbers))
    socket.send(commit(final=True))
    found = await socket.until("transcription.done")
    socket.close()
    assert await socket.closed() == 1000
    return found


async def test_audio_becomes_text(live: SimServer) -> None:
    """The same for the same audio, in whatever parts it comes; a piece for each token."""
    *pieces, done = await said(live, 1, 2)
    assert [*done] == ["type", "text", "usage"]
    assert done["text"] == "".join(one["delta"] for one in pieces)
    assert len(pieces) == done["usage"]["completion_tokens"] == 2 * TOKENS
    assert done["usage"]["prompt_tokens"] > 0
    assert (await said(live, 1, 2))[-1] == done != (await said(live, 2, 1))[-1]
    socket = await opened(live)
    socket.send(update("sim"), commit())
    whole = b"".join(base64.b64decode(audio(1, number)["audio"]) for number in (1, 2))
    for at in range(0, len(whole), 10_000):
        part = base64.b64encode(whole[at : at + 10_000]).decode()
        socket.send({"type": "input_audio_buffer.append", "audio": part})
    socket.send(commit(final=True))
    assert (await socket.until("transcription.done"))[-1] == done


@pytest.mark.parametrize(
    ("event", "code", "text"),
    [
        (commit(), "model_not_validated", "Model not validated. Make sure to validate the model"),
        ({"type": "session.update"}, "invalid_event", "Missing required field: model"),
        (update("x"), "model_not_found", "The model `x` does not exist."),
        ({"type": "x"}, "unknown_event", "Unknown event type: x"),
        ({"type": "input_audio_buffer.append", "audio": "AAA"}, "invalid_audio", "Invalid audio"),
        ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "invalid_audio", "Invalid audio"),
        ({"type": "input_audio_buffer.append", "audio": ""}, "invalid_audio", "Invalid audio"),
        (
            {"type": "input_audio_buffer.append"},
            "processing_error",
            "1 validation error for InputAudioBufferAppend\naudio\n  Field required",
        ),
    ],
)
async def test_an_event_that_is_refused(
    live: SimServer, event: dict[str, Any], code: str, text: str
) -> None:
    """With vLLM's code and text; the WebSocket goes on."""
    socket = await opened(live)
    socket.send(event)
    found = await socket.event()
    assert (found["type"], found["code"], found["error"][: len(text)]) == ("error", code, text)
    socket.raw(frame(b"no JSON") + frame(b"[1]"))
    assert (await socket.event())["code"] == "invalid_json"
    assert (await socket.event())["error"] == "'list' object has no attribute 'get'"


async def test_its_ends(live: SimServer) -> None:
    """A binary message ends it without a word, a dead core with an event, and a kill at once."""
    socket = await opened(live)
    socket.raw(frame(b"\0", Opcode.BINARY))
    assert await socket.closed() is None
    socket = await opened(live)
    live.engine.kill_core()
    socket.send(update("sim"), commit(), audio())
    assert (await socket.event())["code"] == "processing_error"
    await live.kill()
    assert await socket.closed() is None


async def test_who_may_open_one() -> None:
    """Without the key 401, without such a model 403."""
    async with SimServer(replace(FAST, realtime=True, api_key="k")) as sim:
        client = await Client.connect(sim.port)
        client.send(handshake())
        assert (await client.answer()).status == 401
        await WebSocketClient.open(await Client.connect(sim.port), bearer("k"))
    async with SimServer(FAST) as sim:
        client = await Client.connect(sim.port)
        client.send(handshake())
        assert (await client.answer()).status == 403
