"""A virtual world under a load of equal streams, for tests: its sizes are passed, and its clients
judge what they get.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from pdproxy.app.compose import Proxy
from pdproxy.engine_model.hardware import Hardware
from pdproxy.settings.limits import Deadlines, Limits
from pdproxy.settings.schema import Settings
from pdproxy_lab.sim.facts import SimFacts
from tests.chaos import setup
from tests.chaos import world as chaos_world
from tests.chaos.answers import Answer, read_answer, told
from tests.chaos.options import Options
from tests.chaos.oracle import COMPLETIONS, Body, ask_judge
from tests.chaos.setup import MODEL, PORT, PROXY
from tests.chaos.trace import Trace
from tests.chaos.virtual.network import VirtualNetwork
from tests.chaos.world import CLIENTS, World, begin_proxy


class Loaded:
    """The world, what its proxy reports, and what its clients ask."""

    def __init__(self, network: VirtualNetwork, world: World, trace: Trace) -> None:
        self.network = network
        self.world = world
        self.trace = trace

    async def learn(self, *bodies: Body) -> None:
        """Have an engine alone answer bodies, to know what is right."""
        await ask_judge(self.network, self.world.judge.host, PORT, list(bodies))

    async def ask(self, body: Body, ident: str) -> str:
        """Send a request. Return what was wrong with its answer, "" if nothing."""
        transport = await self.network.connect(PROXY, PORT, source=CLIENTS)
        reader, answer = asyncio.StreamReader(), Answer()
        transport.attach(asyncio.StreamReaderProtocol(reader))
        transport.write(body.request(ident, keep=False))
        try:
            await read_answer(reader, answer)
        finally:
            transport.abort()
        if (found := told(answer)) != body.right:
            return f"{ident}: {answer.status} {found} instead of {body.right}"
        return ""


def stream(prompt: str, tokens: int) -> Body:
    """A stream of so many tokens."""
    fields: dict[str, Any] = {
        "model": MODEL,
        "temperature": 0,
        "max_tokens": tokens,
        "prompt": prompt,
        "stream": True,
    }
    return Body(COMPLETIONS, fields)


@asynccontextmanager
async def loaded(
    network: VirtualNetwork,
    monkeypatch: pytest.MonkeyPatch,
    options: Options,
    hardware: Hardware,
    limits: Limits,
    deadlines: dict[str, float],
    **facts: Any,
) -> AsyncIterator[Loaded]:
    """A world with engines of that hardware, from its beginning to its end. `facts`: of its
    engines.
    """
    monkeypatch.setattr(setup, "HARDWARE", hardware)
    monkeypatch.setattr(setup, "SimFacts", partial(SimFacts, **facts))

    def begin(settings: Settings, *others: Any) -> Proxy:
        """Start the proxy with its defaults, but for what is given."""
        given = msgspec.structs.replace(Deadlines(), **deadlines)
        own = Settings(
            listen=settings.listen,
            pools=settings.pools,
            probes=settings.probes,
            deadlines=given,
            limits=limits,
        )
        return begin_proxy(own, *others)

    monkeypatch.setattr(chaos_world, "begin_proxy", begin)
    trace = Trace()
    world = World(options, network, trace)
    await world.begin()
    try:
        yield Loaded(network, world, trace)
    finally:
        await world.end()
        await asyncio.sleep(1.0)
