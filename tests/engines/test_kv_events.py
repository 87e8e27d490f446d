"""What the proxy expects of real engines' caches by their KV events is what they report: after
losses, restarts, when full.
"""

# Starts two plain engines. PDPROXY_TEST_EXPECTED (default 150) is the number of answers, 500 in
# `.ci/full`.

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdproxy.fleet.kv_source import KvEventReader
from pdproxy.settings.engines import ConfiguredEngine, Facts
from pdproxy.settings.health import Probes
from pdproxy.settings.kv import EngineKvEvents, KvEvents, Prefixes
from pdproxy.settings.limits import Deadlines
from pdproxy.settings.pools import Pool, PoolPolicy
from pdproxy.settings.schema import Settings
from tests.fakes.ports import free_port
from tests.fakes.world import World, until
from tests.proxy.prefixes import proxy_before

from .client import ask
from .engine import BLOCK, MODEL, Engine
from .fleet import COMPLETIONS
from .launcher import Launcher

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600, func_only=True)]

ANSWERS = int(os.environ.get("PDPROXY_TEST_EXPECTED", "150"))
CLIENTS = 3
"""In the last part: their prompts evict each other between the choice of an engine and its look
into its cache.
"""
BLOCKS = 96
"""KV blocks of each engine: those of ten prompts or so."""
BEGINNINGS = 16
LONG = 60.0
TTL = 1.0


class Publishing:
    """Two engines that publish, and can be started again."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._ports = [(free_port(), free_port()) for _ in range(2)]
        self.engines = [self._start(at) for at in range(2)]

    def _start(self, at: int, port: int = 0) -> Engine:
        events, replays = self._ports[at]
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{events}",
            "replay_endpoint": f"tcp://*:{replays}",
            "topic": "kv",
        }
        flags = f"--kv-events-config '{json.dumps(config)}' --num-gpu-blocks-override {BLOCKS}"
        return Engine.start(self._launcher, f"events-{at}", "plain", port, flags)

    def endpoint(self, at: int) -> str:
        """Where an engine publishes."""
        return f"tcp://127.0.0.1:{self._ports[at][0]}"

    def wait(self) -> None:
        """Wait until both serve."""
        for engine in self.engines:
            engine.wait().post(
                COMPLETIONS, {"model": MODEL, "prompt": "warm up", "max_tokens": 2, "logprobs": 1}
            )

    def start_again(self, at: int) -> None:
        """End an engine, and start it again at the same port."""
        self.engines[at].stop()
        self.engines[at] = self._start(at, self.engines[at].port)
        self.engines[at].wait()

    def stop(self) -> None:
        """End both."""
        for engine in self.engines:
            engine.terminate()
        for engine in self.engines:
            engine.stop()


@pytest.fixture(scope="module")
def publishing(launcher: Launcher) -> Iterator[Publishing]:
    """Two engines."""
    made = Publishing(launcher)
    try:
        made.wait()
        yield made
    finally:
        made.stop()


@asynccontextmanager
async def proxy(
    engines: Publishing, *, replays: bool = True, only: int | None = None
) -> AsyncIterator[World]:
    """The proxy in front of them, or of one. `replays` False: it can't ask for messages that it has
    not received.
    """
    nodes = []
    for at, engine in enumerate(engines.engines):
        own = (
            EngineKvEvents()
            if replays
            else EngineKvEvents(endpoint=engines.endpoint(at), topic="kv")
        )
        if only in (None, at):
            nodes.append(
                ConfiguredEngine(url=engine.url, role="aggregated", facts=Facts(kv_events=own))
            )
    pool = Pool(
        nodes=tuple(nodes),
        kv_events=KvEvents(enabled=True),
        prefixes=Prefixes(ttl=TTL),
        policy=PoolPolicy(prefill="prefix", decode="prefix"),
    )
    settings = Settings(
        pools=(pool,),
        probes=Probes(interval=0.5, scrape_interval=1.0),
        deadlines=Deadlines(drain=1.0),
    )
    async with proxy_before(settings) as world:
        await until(
            lambda: world.metric("pdproxy_kv_event_sources", state="connected") == len(nodes), LONG
        )
        if replays:
            replayed = "pdproxy_kv_event_replays_total"
            await until(lambda: world.metric(replayed) >= len(nodes), LONG)
        yield world


async def complete(world: World, prompt: list[int], **fields: Any) -> int:
    """Have a prompt answered. Return how much of it was cached."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    answer = await ask(f"http://127.0.0.1:{world.port}", COMPLETIONS, body)
    assert answer.status == 200, answer.body
    found: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def results(world: World) -> dict[str, int]:
    """How many expectations were exact, too high and too low."""
    name = "pdproxy_prefix_predictions_total"
    return {
        one: int(world.metric(name, basis="events", result=one))
        for one in ("exact", "too_high", "too_low")
    }


def prompts(count: int) -> Iterator[list[int]]:
    """Prompts that share beginnings of up to 20 blocks: half of them also with one before."""
    chance = random.Random(19)
    ids = range(300, 4000)
    beginnings = [
        chance.choices(ids, k=BLOCK * chance.randint(1, 16) + chance.randrange(BLOCK))
        for _ in range(BEGINNINGS)
    ]
    known: list[list[int]] = []
    for _ in range(count):
        before = (
            chance.choice(known) if known and chance.random() < 0.5 else chance.choice(beginnings)
        )
        prompt = [*before[: BLOCK * 24], *chance.choices(ids, k=chance.randrange(3 * BLOCK))]
        known = [*known[-20:], prompt]
        yield prompt


async def send(world: World, waiting: Iterator[list[int]], count: int, clients: int = 1) -> None:
    """Have so many prompts answered."""
    left = iter(range(count))

    async def client() -> None:
        for _ in left:
            await complete(world, next(waiting))

    await asyncio.gather(*[client() for _ in range(clients)])


async def test_engines_have_in_their_caches_what_is_expected(
    publishing: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than one answer in a hundred differs."""
    lost = 0
    receive = KvEventReader.receive

    def lossy(source: KvEventReader, number: int, payload: bytes) -> None:
        nonlocal lost
        if lost > 0:
            lost -= 1
        else:
            receive(source, number, payload)

    monkeypatch.setattr(KvEventReader, "receive", lossy)
    part, waiting = ANSWERS // 4, prompts(2 * ANSWERS)
    async with proxy(publishing) as world:
        await send(world, waiting, part)
        print("at first", results(world))
        lost = 2
        await send(world, waiting, part)
        assert lost == 0
        assert world.metric("pdproxy_kv_event_gaps_total", cause="lost") >= 1
        print("after lost messages", results(world))
        await asyncio.to_thread(publishing.start_again, 0)
        await until(lambda: all(engine.up for engine in world.proxy.ledger.engines), LONG)
        await until(lambda: world.metric("pdproxy_kv_event_sources", state="connected") == 2, LONG)
        print("started again", results(world))
        await send(world, waiting, ANSWERS - 2 * part)
        found = results(world)
        reported, expected = (
            world.metric("pdproxy_prefix_tokens_total", what=w) for w in ("reported", "predicted")
        )
        removed = world.metric("pdproxy_prefix_event_blocks_total", result="removed")
        print(
            f"expected of {ANSWERS} answers: {found}; tokens expected {expected:.0f}, reported "
            f"{reported:.0f}"
        )
        print(
            f"evicted {removed:.0f} blocks; refreshes "
            f"{world.metric('pdproxy_prefix_refreshes_total', result='asked'):.0f}"
        )
        assert sum(found.values()) == ANSWERS
        assert (found["too_high"] + found["too_low"]) / ANSWERS < 0.01, found
        assert removed > BLOCKS
        assert reported > 0
        await send(world, waiting, ANSWERS, CLIENTS)
        more = {name: count - found[name] for name, count in results(world).items()}
        print(f"expected of {ANSWERS} answers to {CLIENTS} clients: {more}")
        assert (more["too_high"] + more["too_low"]) / ANSWERS < 0.05, more


async def test_what_was_cached_before_is_reported_on_request(publishing: Publishing) -> None:
    """The proxy was not there when these blocks were stored, and can't ask for the messages:
    requests have them reported.
    """
    prompt = list(range(300, 300 + 6 * BLOCK))
    await asyncio.to_thread(
        publishing.engines[1].post, COMPLETIONS, {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    )
    async with proxy(publishing, replays=False, only=1) as world:
        assert await complete(world, [*prompt, 310]) == 6 * BLOCK
        assert results(world) == {"exact": 0, "too_high": 0, "too_low": 1}
        assert await complete(world, [*prompt, 311]) == 6 * BLOCK
        assert world.metric("pdproxy_prefix_refreshes_total", result="asked") == 1
        await until(
            lambda: world.metric("pdproxy_prefix_event_blocks_total", result="stored") >= 6, LONG
        )
        await asyncio.sleep(2 * TTL)  # longer than what was just sent counts as cached
        before = results(world)
        assert await complete(world, [*prompt, 320]) == 6 * BLOCK
        assert results(world) == before | {"exact": before["exact"] + 1}
