"""NIXL's push on real engines (contract `nixl-push`): an engine of each role is killed in each
phase; starts two engines.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import time

import pytest

from .client import Progress, ask
from .compare import differs
from .engine import MODEL, Engine
from .fleet import Fleet
from .proxy import Proxy
from .shapes import COMPLETIONS, story
from .test_faults import broke_honestly
from .test_load import USED, _until
from .test_push import LEASE, _meet, _overlaps, proxy, pushers

__all__ = ["proxy", "pushers"]  # fixtures

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600, func_only=True)]


async def test_the_prefill_engine_is_killed_while_the_decode_engine_waits(
    pushers: Fleet, proxy: Proxy
) -> None:
    """The client gets the right answer by one engine alone, soon. The blocks that the decode engine
    keeps are counted.
    """
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
    assert not held or proxy.counters().sum("pdproxy_kv_stuck", node=decode.url) > 0, (
        "what nobody frees is counted"
    )
    await _start_again(pushers, proxy, prefill, decode)
    assert proxy.counters().sum("pdproxy_kv_stuck") == 0, (
        "the decode engine that kept the blocks is gone"
    )


async def test_the_prefill_engine_is_killed_before_it_is_asked(
    pushers: Fleet, proxy: Proxy
) -> None:
    """The proxy has not noticed: the client gets the right answer, by the decode engine alone."""
    body = {
        "model": MODEL,
        "prompt": story(secrets.token_hex(6)),
        "max_tokens": 8,
        "temperature": 0,
    }
    plain = await ask(pushers.plain.url, COMPLETIONS, body)
    (prefill,) = pushers.prefills
    prefill.kill()
    seen = await ask(proxy.url, COMPLETIONS, body)
    assert not differs(plain, seen, strict=False, warm=True)
    assert seen.seconds < 30
    await _start_again(pushers, proxy, prefill, *pushers.decodes)


async def test_the_decode_engine_is_killed_while_it_waits(pushers: Fleet, proxy: Proxy) -> None:
    """An error soon, or the right answer by the prefill engine alone. Its lease frees the KV that
    nobody asks for.
    """
    body = {
        "model": MODEL,
        "prompt": story(secrets.token_hex(6)) * 3,
        "max_tokens": 8,
        "temperature": 0,
    }
    plain = await ask(pushers.plain.url, COMPLETIONS, body)
    (prefill,), (decode,) = pushers.prefills, pushers.decodes
    prefill.signal(signal.SIGSTOP)
    try:
        asked = asyncio.create_task(ask(proxy.url, COMPLETIONS, body))
        await _until(
            lambda: decode.counters().sum("vllm:num_requests_waiting") > 0, 10, "D was not asked"
        )
        decode.kill()
    finally:
        prefill.signal(signal.SIGCONT)
    seen = await asked
    assert seen.seconds < 30
    if seen.status == 200:
        assert not differs(plain, seen, strict=False, warm=True)
    else:
        assert seen.status in (502, 503)
        assert seen.json["error"]["code"] == seen.status
    await _until(
        lambda: prefill.counters().sum(USED) == 0,
        LEASE + 20,
        "the prefill engine still holds the KV",
    )
    await _until(lambda: proxy.counters().sum("pdproxy_kv_handles") == 0, 30, "handles are held")
    await _start_again(pushers, proxy, decode)


async def test_the_decode_engine_is_killed_in_mid_stream(pushers: Fleet, proxy: Proxy) -> None:
    """At once an error event in OpenAI's form. The KV was pushed: the prefill engine is free."""
    body = {"model": MODEL, "prompt": story(secrets.token_hex(6)), "temperature": 0}
    body |= {"stream": True, "ignore_eos": True, "max_tokens": 400}
    plain = await ask(pushers.plain.url, COMPLETIONS, body)
    (prefill,), (decode,) = pushers.prefills, pushers.decodes
    progress = Progress(events=5)
    asked = asyncio.create_task(ask(proxy.url, COMPLETIONS, body, progress=progress))
    await progress.wait()
    decode.kill()
    killed = time.monotonic()
    broke_honestly(plain, await asked)
    assert time.monotonic() - killed < 2
    await _until(
        lambda: prefill.counters().sum(USED) == 0,
        LEASE + 20,
        "the prefill engine still holds the KV",
    )
    await _start_again(pushers, proxy, decode)


async def _start_again(pushers: Fleet, proxy: Proxy, *engines: Engine) -> None:
    """Start engines again, and wait until the proxy asks both at once again."""
    await asyncio.to_thread(pushers.start_again, *engines)
    await _until(lambda: proxy.ready() == 200, 60, "not ready")
    overlaps, deadline = _overlaps(proxy), time.monotonic() + 60
    while _overlaps(proxy) == overlaps:
        assert time.monotonic() < deadline, "the engines of the new run are not known"
        await _meet(proxy)
        await asyncio.sleep(0.2)
