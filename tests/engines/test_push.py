"""NIXL's push on real engines (contract `nixl-push`): both engines are asked at once, and answer as
one does.
"""

# PDPROXY_TEST_SHAPES=all takes every shape and 200 clients that leave, as `.ci/full` does; the gate
# takes some.

from __future__ import annotations

import asyncio
import os
import random
import secrets
from collections import Counter
from collections.abc import Iterator

import pytest

from .client import ask
from .compare import differs
from .connected import PairOptions, pair
from .engine import MODEL, Engine
from .equality import SOURCE, equal
from .fleet import Fleet
from .launcher import Launcher
from .prompts import ids
from .proxy import Proxy
from .shapes import CHAT, COMPLETIONS, SHAPES, Shape, question, story
from .test_load import USED, _leave, _until
from .test_split_routes import MESSAGES, RESPONSES, body_of, split

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600, func_only=True)]

ALL = os.environ.get("PDPROXY_TEST_SHAPES") == "all"
EVERY = 1 if ALL else 16
CLIENTS = 200 if ALL else 40
LEASE = 6.0
"""Seconds: only its lease frees KV of a prefill engine that no decode engine waits for."""


@pytest.fixture(scope="module")
def pushers(launcher: Launcher, plain: Engine) -> Iterator[Fleet]:
    """A prefill engine that pushes and a decode engine."""
    options = PairOptions(
        {
            "kv_connector": "NixlPushConnector",
            "kv_connector_extra_config": {"kv_lease_duration": int(LEASE)},
        }
    )
    with pair(launcher, plain, "push", options, {}) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def proxy(pushers: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """pdproxy in front of them, which knows where the prefill engine is reached."""
    settings = {
        "pools": [{"connector": "nixl-push"}],
        "deadlines": {"first_token": 15.0, "prefill": 20.0},
    }
    proxy = Proxy.start(
        pushers.prefills, pushers.decodes, tmp_path_factory.mktemp("push"), settings=settings
    )
    asyncio.run(_meet(proxy))
    yield proxy
    assert proxy.stop() == 0, proxy.tail()


async def _meet(proxy: Proxy) -> None:
    body = {
        "model": MODEL,
        "prompt": story(secrets.token_hex(6)),
        "max_tokens": 4,
        "temperature": 0,
    }
    assert (await ask(proxy.url, COMPLETIONS, body)).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_named_routes_are_pushed(
    pushers: Fleet, proxy: Proxy, path: str, stream: bool
) -> None:
    """Both engines know a message by its header's id, a response by its body's; the client sees its
    own.
    """
    await split(pushers, proxy, path, body_of(path, {"stream": stream}))
    if path == RESPONSES:
        own = body_of(path, {"stream": stream, "request_id": "resp_0123456789abcdef"})
        await split(pushers, proxy, path, own)
        seen = await ask(proxy.url, path, own)
        assert b'"id":"resp_0123456789abcdef"' in seen.body


def _overlaps(proxy: Proxy) -> float:
    return proxy.counters().sum("pdproxy_legs_overlap_seconds_count")


@pytest.mark.parametrize("shape", SHAPES[::EVERY], ids=str)
async def test_answer_is_the_plain_engines(pushers: Fleet, proxy: Proxy, shape: Shape) -> None:
    """Status, body, events, ids and usage equal the plain engine's; the KV was pushed; the prefill
    engine is free.
    """
    await equal(pushers, proxy, shape, at_once=True, several=False)


async def test_both_engines_were_asked_at_once(pushers: Fleet, proxy: Proxy) -> None:
    """The decode engine had the request before the prefill engine answered, and computed nothing of
    the prompt.
    """
    before, overlaps = pushers.decodes[0].counters(), _overlaps(proxy)
    body = {
        "model": MODEL,
        "prompt": ids(secrets.token_hex(6), 640),
        "temperature": 0,
        "max_tokens": 4,
    }
    plain, other = (
        await ask(pushers.plain.url, COMPLETIONS, body),
        await ask(proxy.url, COMPLETIONS, body),
    )
    assert not differs(plain, other)
    after = pushers.decodes[0].counters()
    pushed, computed = (
        after.sum(SOURCE, source=source) - before.sum(SOURCE, source=source)
        for source in ("external_kv_transfer", "local_compute")
    )
    assert (pushed, computed) == (640, 0)
    assert _overlaps(proxy) == overlaps + 1


async def test_cached_tokens_of_a_repeated_prompt(pushers: Fleet, proxy: Proxy) -> None:
    """Only what the prefill engine found in its cache counts as cached: what was pushed does
    not.
    """
    body = {
        "model": MODEL,
        "messages": question(secrets.token_hex(6)),
        "temperature": 0,
        "max_tokens": 5,
    }
    cached = []
    for _ in range(2):
        plain, other = await ask(pushers.plain.url, CHAT, body), await ask(proxy.url, CHAT, body)
        assert not differs(plain, other, warm=True)
        cached.append(other.json["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0
    assert cached[1] >= 64


async def test_nothing_is_held_behind_clients_that_leave(pushers: Fleet, proxy: Proxy) -> None:
    """Both engines are free in the end: by the push, or by the lease; nothing is counted as
    stuck.
    """
    chance, gate = random.Random(7), asyncio.Semaphore(6)

    async def one(number: int) -> str:
        async with gate:
            return await _leave(proxy, random.Random(number))

    went = Counter(await asyncio.gather(*(one(chance.randrange(1 << 30)) for _ in range(CLIENTS))))
    assert went["closed"] + went["reset"] > CLIENTS / 4, went
    await _until(
        lambda: not any(proxy.counters().by("pdproxy_kv_handles", "state").values()),
        60,
        "handles are held",
    )
    engines = (*pushers.prefills, *pushers.decodes)
    await _until(
        lambda: not any(engine.counters().sum(USED) for engine in engines),
        LEASE + 10,
        "KV is still held",
    )
    ended = proxy.counters().by("pdproxy_kv_handles_ended_total", "end")
    print(f"\n{dict(went)}; handles ended {dict(ended)}")
    assert set(ended) <= {"loaded", "aborted", "not_made", "lost"}
    assert proxy.counters().sum("pdproxy_kv_stuck") == 0
