"""Encoder engines with real vLLM: answers equal one plain engine's, and each picture is encoded
once, by an encoder engine.
"""

import asyncio
import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.pictures import asking, png

from .client import ask
from .compare import differs
from .engine import MODEL, Engine, Role
from .equality import equal
from .fleet import COMPLETIONS, Fleet, exchange
from .launcher import Launcher
from .long_media import SHAPES
from .prompts import CHAT, STORY
from .proxy import Proxy
from .vision import FLAGS, encoded, vision_launcher

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900, func_only=True)]

REQUESTS = int(os.environ.get("PDPROXY_TEST_ENCODED", "60"))
"""Requests to one encoder, one prefill and one decode engine."""
NAMES: dict[str, Role] = {
    "seer": "plain",
    "e0": "encode",
    "e1": "encode",
    "p0": "prefill",
    "p1": "prefill",
    "d0": "decode",
    "d1": "decode",
}
SERVED = [shape for shape in SHAPES if shape.status == 200]


def ec_flags(role: str, folder: Path) -> str:
    """Return the flags of an engine that takes part in the transfer of encoder outputs."""
    config = {
        "ec_connector": "ECExampleConnector",
        "ec_role": role,
        "ec_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return f"{FLAGS} --ec-transfer-config '{json.dumps(config)}'"


@pytest.fixture(scope="module")
def seers(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A plain engine, two encoder, two prefill and two decode engines with a vision-language
    model; and an aggregated one that uses encoder outputs.
    """
    folder = tmp_path_factory.mktemp("outputs")
    seeing = vision_launcher(launcher.built)
    seers = Fleet(seeing)
    flags = {
        "encode": ec_flags("ec_producer", folder),
        "prefill": ec_flags("ec_consumer", folder),
    }
    try:
        for name, role in NAMES.items():
            start: Callable[[int], Engine] = _starter(seeing, name, role, flags.get(role, FLAGS))
            seers.starts[name] = start
            seers.engines[name] = start(0)
        whole = Engine.start(seeing, "whole", "plain", flags=flags["prefill"])
        for engine in (*seers.engines.values(), whole):
            engine.wait()
            if engine.role != "encode":
                body = {"model": MODEL, "prompt": "warm up", "max_tokens": 2, "logprobs": 1}
                engine.post(COMPLETIONS, body)
        for prefill in seers.prefills:
            for decode in seers.decodes:
                exchange(prefill, decode)
        seers.left.append(whole)
        yield seers
    finally:
        seeing.close()
        seers.engines |= {engine.name: engine for engine in seers.left}
        seers.end()


def _starter(launcher: Launcher, name: str, role: Role, flags: str) -> Callable[[int], Engine]:
    return lambda port: Engine.start(launcher, name, role, port, flags)


def encoders(seers: Fleet) -> list[Engine]:
    """Return the encoder engines, in order."""
    return [engine for engine in seers.engines.values() if engine.role == "encode"]


@dataclass
class Counts:
    """How many pictures the engines of each role have encoded."""

    encode: int
    prefill: int
    decode: int

    @classmethod
    def now(cls, seers: Fleet) -> "Counts":
        """Read the engines' logs."""
        engines = (encoders(seers), seers.prefills, seers.decodes)
        return cls(*[sum(map(encoded, some)) for some in engines])

    def since(self, before: "Counts") -> tuple[int, int, int]:
        """Return the increases."""
        return (
            self.encode - before.encode,
            self.prefill - before.prefill,
            self.decode - before.decode,
        )


def proxied(seers: Fleet, count: int, folder: Path, **settings: Any) -> Proxy:
    """Start pdproxy in front of so many engines of each role."""
    nodes = [{"url": one.url, "role": "encode"} for one in encoders(seers)[:count]]
    return Proxy.start(
        seers.prefills[:count],
        seers.decodes[:count],
        folder,
        settings={"pools": [{"nodes": nodes}], **settings},
    )


@pytest.mark.parametrize("count", [1, 2])
async def test_pictures_are_encoded_by_encoder_engines(
    seers: Fleet, tmp_path: Path, count: int
) -> None:
    """Answers are the plain engine's, all KV moves, and neither the prefill engines nor the decode
    engines encode anything.
    """
    proxy = proxied(seers, count, tmp_path)
    before, plain = Counts.now(seers), encoded(seers.plain)
    number = REQUESTS if count == 1 else REQUESTS // 4
    for at in range(number):
        await equal(seers, proxy, SERVED[at % len(SERVED)], count)
    pictures = encoded(seers.plain) - plain
    print(f"{number} requests, {pictures} pictures: {Counts.now(seers).since(before)}")
    assert Counts.now(seers).since(before) == (pictures, 0, 0)
    front = proxy.counters()
    assert front.sum("pdproxy_encoded_media_total", result="encoded") >= pictures > number / 2
    assert front.sum("pdproxy_encoded_media_total") == front.sum(
        "pdproxy_encoded_media_total", result="encoded"
    )
    assert proxy.stop() == 0, proxy.tail()


async def test_an_aggregated_engine_uses_outputs(seers: Fleet, tmp_path: Path) -> None:
    """An engine that prefills and decodes loads what an encoder engine has made."""
    (whole,), (encoder, _) = seers.left, encoders(seers)
    nodes = [{"url": encoder.url, "role": "encode"}, {"url": whole.url, "role": "aggregated"}]
    proxy = Proxy.start([], [], tmp_path, settings={"pools": [{"nodes": nodes}]})
    before = encoded(encoder), encoded(whole)
    for _ in range(10):
        nonce = secrets.token_hex(6)
        body: dict[str, Any] = {
            "messages": [asking(nonce, png(nonce, 140, 84), STORY, png(f"{nonce} second"))]
        }
        body |= {"temperature": 0, "max_tokens": 12}
        plain, other = [await ask(one.url, CHAT, body) for one in (seers.plain, proxy)]
        assert plain.status == 200
        assert not differs(plain, other)
    assert (encoded(encoder) - before[0], encoded(whole) - before[1]) == (20, 0)
    assert proxy.stop() == 0, proxy.tail()


async def test_one_picture_goes_to_one_engine(seers: Fleet, tmp_path: Path) -> None:
    """A picture that comes again is not encoded again, whichever of two engines has it."""
    proxy = proxied(seers, 2, tmp_path)
    before = Counts.now(seers)
    pictures = [png(secrets.token_hex(6)) for _ in range(4)]
    for _ in range(3):
        for picture in pictures:
            message = asking(f"{secrets.token_hex(6)} {STORY}", picture, "What is missing?")
            body = {"messages": [message], "temperature": 0, "max_tokens": 4}
            assert (await ask(proxy.url, CHAT, body)).status == 200
    assert Counts.now(seers).since(before) == (4, 0, 0)
    assert proxy.stop() == 0, proxy.tail()


async def _up(proxy: Proxy, count: int) -> None:
    """Wait until so many encoder engines get requests."""
    deadline = time.monotonic() + 60
    while proxy.counters().sum("pdproxy_node_up", role="encode") < count:
        assert time.monotonic() < deadline, proxy.tail()
        await asyncio.sleep(0.2)


async def test_encoder_engines_that_fail(seers: Fleet, tmp_path: Path) -> None:
    """Frozen ones cost the deadline, dead ones nothing: another one encodes, or the prefill engine
    does. Answers stay right.
    """
    proxy = proxied(seers, 2, tmp_path, deadlines={"encode": 3})
    (broken, left), before = encoders(seers), Counts.now(seers)

    async def some(count: int) -> None:
        for _ in range(count):
            await equal(seers, proxy, SERVED[0], 2)

    broken.signal(signal.SIGSTOP)
    await some(6)
    broken.signal(signal.SIGCONT)
    broken.kill()
    await some(6)
    left.kill()
    await some(6)
    made = Counts.now(seers).since(before)
    assert sum(made) >= 18
    assert made[2] == 0
    assert made[1] >= 6
    seers.start_again(broken, left)
    before = Counts.now(seers)
    await _up(proxy, 2)
    await some(6)
    assert Counts.now(seers).since(before) == (6, 0, 0)
    assert proxy.stop() == 0, proxy.tail()
