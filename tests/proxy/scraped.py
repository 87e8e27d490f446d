"""Small worlds whose metrics a Prometheus scrapes beside the demo's: connectors, engines and
failures of the sorts that the demo has not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from pdproxy.settings.dns import Dns
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.kv import KvEvents
from pdproxy.settings.pools import PoolPolicy
from pdproxy.settings.schema import Settings
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.server import SimServer
from tests.fakes.client import Answer
from tests.fakes.name_server import name_server
from tests.fakes.pictures import png
from tests.fakes.pool import FAST, pool
from tests.fakes.tokenizer import SimTokenizer
from tests.fakes.world import CHAT, COMPLETIONS, World, completion
from tests.proxy.kv_events import ANY
from tests.proxy.test_continued import UNBROKEN
from tests.proxy.test_encoders import chat, seeing
from tests.proxy.test_turns import BOTH

NAME = "decode.example"
PAUSE = 0.25
"""Seconds between two requests of a world."""
Ask = Callable[[int], Awaitable[Answer]]
"""Sends the request of this number."""


@asynccontextmanager
async def worlds(folder: Path) -> AsyncIterator[list[int]]:
    """Run all of them, with traffic. Yields the ports of their proxies."""
    async with AsyncExitStack() as stack:
        found = [
            await stack.enter_async_context(one)
            for one in (_pushes(), _notices(), _turns(), _encoders(folder))
        ]
        sending = [asyncio.create_task(_traffic(ask)) for _, ask in found]
        try:
            yield [world.port for world, _ in found]
            assert not any(task.done() for task in sending), sending
        finally:
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)


async def _traffic(ask: Ask) -> None:
    for number in range(10_000):
        answer = await ask(number)
        assert answer.status == 200, answer.body
        await asyncio.sleep(PAUSE)


@asynccontextmanager
async def _pushes() -> AsyncIterator[tuple[World, Ask]]:
    """Both legs at once, prefills that fail, streams whose engine fails, and an engine that DNS
    names.
    """
    named = SimFacts(model="tiny", eos_every=0, hardware=FAST, connector="nixl-push", role="decode")
    async with name_server() as server, SimServer(named) as other:
        server.records[NAME, "A"] = (5, ["127.0.0.1"])
        engine = ConfiguredEngine(url=f"dns://{NAME}:{other.port}", role="decode")

        def adjust(settings: Settings) -> Settings:
            (one,) = settings.pools
            one = msgspec.structs.replace(one, nodes=(*one.nodes, engine))
            dns = Dns(servers=(server.address,))
            return msgspec.structs.replace(settings, pools=(one,), dns=dns)

        async with pool("nixl-push", decodes=2, limits=UNBROKEN, adjust=adjust) as pair:
            pair.world.proxy.sources.start()
            pair.p.faults.add("status@queued:rate=0.2")
            pair.d.faults.add("reset@mid_stream:rate=0.3,events=4")
            yield (
                pair.world,
                lambda number: pair.ask(
                    COMPLETIONS, completion(prompt=f"{number} " * 60, stream=True, max_tokens=16)
                ),
            )


@asynccontextmanager
async def _notices() -> AsyncIterator[tuple[World, Ask]]:
    """LMCache's PD mode with a buffer of a known size, and ranks that are silent at times."""
    room = {"pd_buffer_size": 131_072 * 32 * 12, "kv_bytes_per_token": 131_072}
    soon = {"kv_ready": 0.5}
    async with pool("lmcache-pd", ranks=2, deadlines=soon, lmcache=room, limits=UNBROKEN) as pair:
        pair.p.faults.add("lost_notice:rate=0.2")
        yield (
            pair.world,
            lambda number: pair.ask(COMPLETIONS, completion(prompt=f"{number} " * 60)),
        )


@asynccontextmanager
async def _turns() -> AsyncIterator[tuple[World, Ask]]:
    """NIXL with the notifier, turns that hand their KV back, and KV events."""
    policy = PoolPolicy(decode="prefix", prefill="prefix")  # what else would ask for KV events?
    async with pool(
        "nixl",
        tokenizer=SimTokenizer(),
        everybody={**BOTH, "kv_events": ANY},
        turns={"bidirectional": True, "min_tokens": 16},
        pool_settings={"kv_events": KvEvents(enabled=True), "policy": policy},
    ) as pair:
        yield (
            pair.world,
            lambda number: pair.ask(COMPLETIONS, completion(prompt=f"{number} " * 60)),
        )


@asynccontextmanager
async def _encoders(folder: Path) -> AsyncIterator[tuple[World, Ask]]:
    """Pictures that an encoder engine encodes."""
    async with seeing(folder) as w:
        yield w, lambda number: w.ask(CHAT, chat(png(str(number))))
