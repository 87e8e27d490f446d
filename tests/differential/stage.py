"""A proxy over simulated 1P1D beside a plain simulated engine, kept for many requests; each starts with empty caches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from pdproxy.sim.tokenizer import EOS, FIRST_BYTE, FIRST_PIECE, PIECES, VOCABULARY
from tests.differential.alike import difference
from tests.differential.dialect import Dialect
from tests.differential.generate import Generated
from tests.fakes.books import Books
from tests.fakes.client import Answer, Client, request
from tests.fakes.engine import FakeEngine
from tests.fakes.world import World, world

CONTEXT = 512
SIMULATED = Dialect(
    model="tiny",
    block_size=16,
    max_model_len=CONTEXT,
    vocab_size=len(VOCABULARY),
    ids=(FIRST_PIECE, FIRST_PIECE + len(PIECES)),
    eos=EOS,
    half=FIRST_BYTE + 0xC3,
    rest=FIRST_BYTE + 0xA4,
    long_prompt=300,
    longest_answer=40,
    reasons=False,
)


class Stage:
    """What a request is asked of. Not for two at once."""

    def __init__(self, w: World, plain: FakeEngine) -> None:
        self.world = w
        self.plain = plain

    async def differs(self, wanted: Generated) -> str:
        """Ask both; return the first difference between their answers, "" where there is none."""
        for engine in (*self.world.engines, self.plain):
            core = engine.sim.engine._core
            assert core is not None
            core.pool.forget_all()
        for _ in range(wanted.times):
            plain, other = await asyncio.gather(_ask(self.plain.port, wanted), _ask(self.world.port, wanted))
            if why := difference(plain, other, cached=not wanted.shares_a_block):
                return why
            await self.world.quiet()
        return ""


async def _ask(port: int, wanted: Generated) -> Answer:
    client = await Client.connect(port)
    try:
        client.send(request("POST", wanted.path, wanted.body.encode(), wanted.headers))
        return await client.answer()
    finally:
        client.close()


@asynccontextmanager
async def stage(**facts: object) -> AsyncIterator[Stage]:
    """Set the stage; `facts` are every engine's."""
    books = Books()
    facts = {"max_model_len": CONTEXT, "enable_prompt_tokens_details": True, "eos_every": 31} | facts

    def alike(w: World) -> None:
        for engine in w.engines:
            engine.be(**facts)

    async with AsyncExitStack() as stack:
        plain = FakeEngine("aggregated", books)
        plain.be(connector="none", **facts)
        await plain.listen()
        stack.push_async_callback(plain.close)
        w = await stack.enter_async_context(world(1, 1, before=alike))
        for engine in w.engines:
            await engine.sim.restart()
        for engine in w.decode:
            for other in w.prefill:
                engine.meet(other)
        await w.probe()
        yield Stage(w, plain)
