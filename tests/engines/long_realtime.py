"""Live speech on a real engine: a WebSocket through the proxy gets the events that one without the
proxy gets, and the simulated engine has the same errors.
"""

import asyncio
import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.server import SimServer
from tests.fakes.client import Client
from tests.fakes.websocket import Event, WebSocketClient, audio, commit, frame, update

from .build import ensure_overlay, ensure_realtime_model
from .fleet import Fleet
from .launcher import Launcher
from .proxy import Proxy

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]

FLAGS = """--load-format dummy --limit-mm-per-prompt '{"audio": 1}'"""
VERSION = re.compile(r"(?<=pydantic\.dev/)[\d.]+")
REFUSED: list[Event] = [
    {"type": "input_audio_buffer.append", "audio": "AAA"},
    {"type": "input_audio_buffer.append", "audio": ""},
    {"type": "input_audio_buffer.append"},
    {"type": "input_audio_buffer.append", "audio": 5},
    {"type": "what"},
    {},
    {"type": 5},
    {"type": "input_audio_buffer.commit", "final": "what"},
    update("other"),
]


@pytest.fixture(scope="module")
def live(launcher: Launcher) -> Iterator[Fleet]:
    """A plain engine with a model of live speech."""
    model = ensure_realtime_model(launcher.built)
    # vLLM's code of audio encoders imports torchvision
    overlay = ensure_overlay(launcher.built, "vision")
    hearing = Launcher(dataclasses.replace(launcher.built, model=model), [overlay])
    live = Fleet(hearing, flags=FLAGS)
    try:
        live.launch({"live": "plain"})
        yield live
    finally:
        hearing.close()
        live.end()


@pytest.fixture(scope="module")
def proxy(live: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """pdproxy in front of it."""
    nodes = [{"url": live.plain.url, "role": "aggregated"}]
    folder = tmp_path_factory.mktemp("live")
    proxy = Proxy.start([], [], folder, settings={"pools": [{"nodes": nodes}]})
    yield proxy
    assert proxy.stop() == 0, proxy.tail()


async def opened(port: int) -> WebSocketClient:
    return await WebSocketClient.open(await Client.connect(port))


async def refused(port: int) -> list[Any]:
    """What is answered to events that nobody should send."""
    socket = await opened(port)
    socket.send(update())
    found = []
    for sent in (*(json.dumps(one).encode() for one in REFUSED), b"no JSON", b"[1]"):
        socket.raw(frame(sent))
        found.append(await socket.event())
    socket.close()
    assert await socket.closed() == 1000
    return [one | {"error": VERSION.sub("", one["error"])} for one in found]


async def said(port: int) -> list[Event]:
    """What is written of two utterances: of 9 seconds, and of half a second."""
    socket = await opened(port)
    socket.send(update(), commit(), audio(6, 1), audio(3, 2), commit(final=True))
    found = await socket.until("transcription.done")
    socket.send(commit(), audio(0.5, 3), commit(final=True))
    found += await socket.until("transcription.done")
    socket.close()
    assert await socket.closed() == 1000
    return found


async def test_events_are_the_engines(live: Fleet, proxy: Proxy) -> None:
    """Texts, pieces and usage; of several at once the counts, since a batch may decide ties of a
    model without weights in another way.
    """
    plain = await said(live.plain.port)
    done = [one for one in plain if one["type"] == "transcription.done"]
    assert [bool(one["text"]) for one in done] == [True, True]
    assert all(one["usage"]["completion_tokens"] for one in done)
    assert await said(proxy.port) == plain
    several = await asyncio.gather(*(said(proxy.port) for _ in range(4)))
    assert [len(one) for one in several] == [len(plain)] * 4
    count = proxy.counters().sum("pdproxy_tokens_total", kind="completion")
    assert count == 5 * sum(one["usage"]["completion_tokens"] for one in done)


async def test_errors_are_the_engines_and_the_simulators(live: Fleet, proxy: Proxy) -> None:
    """Byte by byte, but for the version in pydantic's address."""
    plain = await refused(live.plain.port)
    assert await refused(proxy.port) == plain
    async with SimServer(SimFacts(model="tiny", realtime=True)) as sim:
        assert await refused(sim.port) == plain
