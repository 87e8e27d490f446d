"""A proxy over simulated engines beside a plain one, kept for many requests; each starts with empty
caches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pdproxy.observe.events import LegFailed
from pdproxy_lab.sim.tokenizer import EOS, FIRST_BYTE, FIRST_PIECE, PIECES, VOCABULARY
from tests.differential.alike import difference
from tests.differential.dialect import Dialect
from tests.differential.generate import Generated
from tests.fakes.books import Books
from tests.fakes.client import exchange, request
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
    long_prompt=300,
    longest_answer=40,
)


class Stage:
    """What a request is asked of. Not for two at once."""

    def __init__(self, w: World, plain: FakeEngine) -> None:
        self.world = w
        self.plain = plain

    def forget_caches(self) -> None:
        """Have all engines forget the prompts that they know."""
        for engine in (*self.world.engines, self.plain):
            core = engine.sim.engine._core
            assert core is not None
            core.pool.forget_all()

    async def differs(self, wanted: Generated) -> str:
        """Ask both; return the first difference between their answers, "" where there is none.

        No handle may be left, and no engine be blamed: all of them are well.
        """
        self.forget_caches()
        # With several prefill engines, the one that is asked again may not have seen the prompt.
        cached = wanted.times == 1 or len(self.world.prefill) == 1
        cached = cached and not (wanted.shares_a_block or wanted.wants_several)
        for _ in range(wanted.times):
            sent = request("POST", wanted.path, wanted.body.encode(), wanted.headers)
            plain, other = await asyncio.gather(
                *(exchange(port, sent) for port in (self.plain.port, self.world.port))
            )
            if why := difference(plain, other, cached=cached):
                return why
            await self.world.settled()
        failed = self.world.events(LegFailed)
        self.world.forget()
        return f"a leg failed that nothing was wrong with: {failed}" if failed else ""


@asynccontextmanager
async def stage(prefill: int = 1, decode: int = 1, **facts: Any) -> AsyncIterator[Stage]:
    """Set the stage with so many engines behind the proxy; `facts` are every engine's."""
    facts = {
        "max_model_len": CONTEXT,
        "enable_prompt_tokens_details": True,
        "eos_every": 31,
    } | facts
    plain = FakeEngine("aggregated", Books(), connector="none", **facts)
    await plain.listen()
    try:
        async with world(prefill, decode, facts=facts) as w:
            yield Stage(w, plain)
    finally:
        await plain.close()
