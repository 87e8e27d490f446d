"""Several answers to a prompt, on real engines: they are the plain engine's, P computes the prompt
once, and D loads its KV once.
"""

# `PDPROXY_TEST_GENERATED_REAL` is the number of generated requests, as in `test_generated`.

import asyncio
import json
import os
import secrets
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.differential.dialect import Dialect
from tests.differential.generate import Generated, requests

from .client import ask
from .counters import Counters
from .engine import BLOCK, MODEL
from .equality import SETTLED, SOURCE
from .fleet import Fleet
from .prompts import STORY
from .proxy import Proxy
from .shapes import COMPLETIONS
from .test_generated import compare_generated, dialect_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800, func_only=True)]

COUNT = int(os.environ.get("PDPROXY_TEST_GENERATED_REAL", "40"))
TRANSFERS = "vllm:nixl_xfer_time_seconds_count"
LOADED = "pdproxy_kv_handles_ended_total"
DRAWN: list[dict[str, Any]] = [{"seed": 5}, {"seed": -9}, {"seed": None, "top_k": 1}]


def _several(dialect: Dialect) -> st.SearchStrategy[Generated]:
    """Any request, for two to four answers that are the same each time."""

    def made(parts: tuple[Generated, int, dict[str, Any]]) -> Generated:
        wanted, count, drawn = parts
        asked = json.loads(wanted.body) | {"n": count, "temperature": 0.9} | drawn
        return replace(wanted, body=json.dumps(asked, ensure_ascii=False))

    return st.tuples(requests(dialect), st.integers(2, 4), st.sampled_from(DRAWN)).map(made)


def test_generated_requests_are_answered_as_by_the_plain_engine(
    fleet: Fleet, proxy_1p1d: Proxy
) -> None:
    """For each request the proxy's answers equal the plain engine's; many are split."""
    before = proxy_1p1d.counters().sum(LOADED, end="loaded")
    compare_generated(fleet, proxy_1p1d, _several(dialect_of(fleet)), COUNT)
    assert proxy_1p1d.counters().sum(LOADED, end="loaded") >= before + COUNT // 4


@pytest.mark.parametrize("count", [2, 4, 8])
async def test_who_computes_the_prompt(fleet: Fleet, proxy_1p1d: Proxy, count: int) -> None:
    """P computes all of it, once; D loads all of it, once, and computes no more than the last block
    for each answer.
    """
    engines = fleet.prefills[0], fleet.decodes[0]
    before = [engine.counters() for engine in engines]
    body = {
        "model": MODEL,
        "prompt": f"{secrets.token_hex(6)} {STORY * 4}",
        "n": count,
        "temperature": 0.9,
        "seed": 3,
        "max_tokens": 8,
    }
    answer = await ask(proxy_1p1d.url, COMPLETIONS, body)
    assert answer.status == 200, answer.body
    length = answer.json["usage"]["prompt_tokens"]
    most = count * BLOCK
    deadline = asyncio.get_running_loop().time() + SETTLED
    while True:
        p, d = (_since(old, engine.counters()) for old, engine in zip(before, engines, strict=True))
        if p["local_compute"] == length == d["external_kv_transfer"]:
            break
        assert asyncio.get_running_loop().time() < deadline, (length, p, d)
        await asyncio.sleep(0.2)
    assert d["transfers"] == 1
    assert 0 < d["local_compute"] <= most
    assert d["local_cache_hit"] + d["local_compute"] == count * length


def _since(old: Counters, new: Counters) -> dict[str, float]:
    """Return prompt tokens by the source of their KV, and the number of transfers, since `old`."""
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    found = {one: new.sum(SOURCE, source=one) - old.sum(SOURCE, source=one) for one in sources}
    return found | {"transfers": new.sum(TRANSFERS) - old.sum(TRANSFERS)}
