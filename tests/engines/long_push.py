"""NIXL's push on real engines (contract `nixl-push`): an engine is killed while the other one waits; starts two engines."""

from __future__ import annotations

import asyncio
import secrets
import time

import pytest

from .client import ask
from .compare import differs
from .engine import MODEL, Engine
from .fleet import Fleet
from .proxy import Proxy
from .shapes import COMPLETIONS, story
from .test_load import USED, _until
from .test_push import LEASE, _meet, _overlaps, proxy, pushers

__all__ = ["proxy", "pushers"]  # fixtures

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600, func_only=True)]


async def test_the_prefill_engine_is_killed_while_the_decode_engine_waits(pushers: Fleet, proxy: Proxy) -> None:
    """The client gets the right answer by one engine alone, soon. The blocks that the decode engine keeps are counted."""
    prompt = story(secrets.token_hex(6)) * 6
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    plain = await ask(pushers.plain.url, COMPLETIONS, body)
    (prefill,), (decode,) = pushers.prefills, pushers.decodes
    asked = asyncio.create_task(ask(proxy.url, COMPLETIONS, body))
    waiting = "vllm:num_requests_waiting"
    deadline = time.monotonic() + 10
    while decode.counters().sum(waiting) == 0 and not asked.done() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    prefill.kill()
    seen = await asked
    assert not differs(plain, seen, strict=False, warm=True)
    assert seen.seconds < 30
    held = decode.counters().sum(USED)
    assert not held or proxy.counters().sum("pdproxy_kv_stuck", node=decode.url) > 0, "what nobody frees is counted"
    await asyncio.to_thread(_start_again, pushers)
    await _until(lambda: proxy.ready() == 200, 60, "not ready")
    overlaps, deadline = _overlaps(proxy), time.monotonic() + 60
    while _overlaps(proxy) == overlaps:
        assert time.monotonic() < deadline, "the prefill engine of the new run is not known"
        await _meet(proxy)
        await asyncio.sleep(0.2)
    assert proxy.counters().sum("pdproxy_kv_stuck") == 0, "the decode engine that kept the blocks is gone"


def _start_again(pushers: Fleet) -> None:
    for engine in (*pushers.prefills, *pushers.decodes):
        engine.kill()
        engine.stop()
    options = {"kv_connector": "NixlPushConnector", "kv_connector_extra_config": {"kv_lease_duration": int(LEASE)}}
    for name, engine in list(pushers.engines.items()):
        if engine.role in ("prefill", "decode"):
            again = Engine.start(pushers.launcher, name, engine.role, engine.port, kv=dict(options))
            pushers.engines[name] = again
    for engine in (*pushers.prefills, *pushers.decodes):
        engine.wait()
