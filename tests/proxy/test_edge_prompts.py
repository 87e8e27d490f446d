"""Prompts at the edges of KV blocks, and whatever each engine has of them in its cache: the answer
is always one engine's.
"""

from __future__ import annotations

from typing import Any

import pytest

from pdproxy_lab.sim.server import SimServer
from tests.fakes.pool import pool
from tests.proxy.test_connectors import CHAT, COMPLETIONS, CONNECTORS, completion, same
from tests.proxy.test_registered import KINDS, run

BLOCK = 16
EDGES = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1)
"""Lengths in tokens. LMCache's chunks have two blocks here."""
IDS = list(range(300, 300 + 4 * BLOCK + 1))
CACHING = ("nixl", "nixl-push", "mooncake", "read", "write")
"""Those whose decode engine takes no KV that it has."""
EVERY = pytest.mark.parametrize("connector", [*CONNECTORS, *KINDS])


def engines(connector: str) -> Any:
    """A pair of engines with a proxy."""
    return run(connector) if connector in KINDS else pool(connector)


def sims(found: Any) -> tuple[SimServer, SimServer]:
    """The two engines."""
    p, d = found.p, found.d
    return (p, d) if isinstance(p, SimServer) else (p[0], d[0])


def forgets(*asked: SimServer) -> None:
    """Engines have nothing of earlier prompts any more."""
    for sim in asked:
        core = sim.engine._core
        assert core is not None
        core.pool.forget_all()


def moved(sim: SimServer) -> int:
    """Prompt tokens that an engine had from another one."""
    return int(sim.engine.stats.prompt_tokens_by_source["external_kv_transfer"])


@EVERY
async def test_lengths_around_a_block(connector: str) -> None:
    async with engines(connector) as found:
        for number, length in enumerate(EDGES):
            prompt = [1000 + 100 * number + token for token in range(length)]
            await same(found, COMPLETIONS, completion(prompt=prompt))
            await same(found, COMPLETIONS, completion(prompt=prompt, stream=True, max_tokens=1))


@EVERY
async def test_texts_that_are_shorter_than_a_block(connector: str) -> None:
    """A chat's template makes more of them."""
    async with engines(connector) as found:
        for text in ("x", "Red Hat is ", "."):
            await same(found, COMPLETIONS, completion(prompt=text))
            message = {
                "model": "tiny",
                "messages": [{"role": "user", "content": text}],
                "max_tokens": 3,
                "temperature": 0,
            }
            await same(found, CHAT, message)


@EVERY
async def test_what_each_engine_has_in_its_cache(connector: str) -> None:
    """Nothing; the decode engine all; the decode engine the beginning; the prefill engine all; both
    all.
    """
    async with engines(connector) as found:
        p, d = sims(found)
        loads = []
        longer = [*IDS, *range(600, 640)]
        for prompt, forgetting in (
            (IDS, (p, d)),
            (IDS, (p,)),
            (longer, (p,)),
            (longer, (d,)),
            (longer, ()),
        ):
            forgets(*forgetting)
            before = moved(d)
            await same(found, COMPLETIONS, completion(prompt=prompt))
            await found.world.quiet()
            loads.append(moved(d) - before)
        if connector in CACHING:
            whole = len(longer) - len(longer) % BLOCK
            wanted = [len(IDS), 1, len(longer) - 4 * BLOCK, len(longer), len(longer) - whole]
            assert all(0 <= a - b <= 1 for a, b in zip(wanted, loads, strict=True)), (wanted, loads)
