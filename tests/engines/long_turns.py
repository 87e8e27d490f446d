"""Conversations whose next turn hands D's KV back to P: texts are a plain engine's, and P computes
only what D did not hold.
"""

# Starts two engines with the notifier and `bidirectional_kv_xfer`, and two without if their version
# of vLLM has handles in streams. PDPROXY_TEST_CONVERSATIONS (default 12) is the number of
# conversations with four turns each.

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from pdproxy.cli.main import main
from pdproxy_lab.sim.since import v033
from tests.fakes.ports import free_port

from .build import wanted_vllm
from .client import Answer, ask
from .connected import PairOptions, pair
from .counters import Counters
from .engine import MODEL, Engine
from .equality import SOURCE
from .fleet import Fleet
from .launcher import Launcher
from .prompts import STORY, ids
from .proxy import Proxy
from .shapes import CHAT, COMPLETIONS, Body

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900, func_only=True)]

CONVERSATIONS, TURNS = int(os.environ.get("PDPROXY_TEST_CONVERSATIONS", "12")), 4
AT_ONCE = 4
ANSWER = 112
"""Tokens per answer. If P has the prompt before it in its own cache, and D holds fewer than 64
tokens (`kv_recompute_threshold`) more, P computes these by itself.
"""
TTL = 120
"""Seconds for which D keeps KV."""
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
USAGE = "vllm:kv_cache_usage_perc"


WAYS = ["notices", "streams"] if v033(wanted_vllm()) else ["notices"]
"""How the proxy learns of what D keeps of a stream."""


@pytest.fixture(scope="module", params=WAYS)
def talkers(
    request: pytest.FixtureRequest,
    launcher: Launcher,
    plain: Engine,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Fleet, int]]:
    """P and D whose KV moves both ways, and the port for their notices, 0 if they send none."""
    extra: dict[str, Any] = {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": TTL}
    kv: dict[str, Any] = {"kv_connector_extra_config": extra}
    env, port = {"VLLM_SERVER_DEV_MODE": "1"}, 0  # the mode has the route that empties a cache
    if request.param == "notices":
        folder, port = tmp_path_factory.mktemp("notifier"), free_port()
        assert main(["notifier", "--out", str(folder)]) == 0
        extra["pdproxy_notify"] = f"tcp://127.0.0.1:{port}"
        kv["kv_connector_module_path"] = "pdproxy_nixl"
        env["PYTHONPATH"] = str(folder)
    options = PairOptions(kv, env={"prefill": env, "decode": env})
    with pair(
        launcher, plain, f"turns-{request.param}", options, {"kv_load_failure_policy": "fail"}
    ) as fleet:
        yield fleet, port


@pytest.fixture(scope="module")
def proxy(talkers: tuple[Fleet, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """pdproxy in front of them. It has proven that its ids are the engines'."""
    fleet, port = talkers
    settings: dict[str, Any] = {
        "pools": [
            {
                "tokenizer": str(fleet.launcher.built.model),
                "turns": {"bidirectional": True, "decoder_kv_blocks_ttl": TTL, "max_blocks": 256},
            }
        ],
    } | ({"kv_ready": {"notifier": True, "port": port}} if port else {})
    proxy = Proxy.start(
        fleet.prefills, fleet.decodes, tmp_path_factory.mktemp("turns"), settings=settings
    )
    asyncio.run(_until_reused(proxy, fleet))
    yield proxy
    assert proxy.stop() == 0, proxy.tail()
    assert _settled(fleet.decodes[0]), "at its end it releases what D keeps"


async def _until_reused(proxy: Proxy, fleet: Fleet) -> None:
    """Converse until a turn is handed back: the proxy has proven that its ids are those of the
    engines' present runs.
    """
    reused, deadline = proxy.counters().sum("pdproxy_turns_reused_total"), time.monotonic() + 90
    while proxy.counters().sum("pdproxy_turns_reused_total") == reused:
        assert time.monotonic() < deadline, proxy.tail()
        await _converse(proxy, fleet, random.Random(1))


async def _said(url: str, path: str, body: Body) -> Answer:
    answer = await ask(url, path, body)
    assert answer.status == 200, answer.body
    assert not answer.broken
    assert b"remote_" not in answer.body, "no client gets a handle, streamed or not"
    return answer


async def _converse(
    proxy: Proxy, fleet: Fleet, chance: random.Random, *, forgets: bool = False
) -> int:
    """One conversation, streamed or not; return the prompt tokens of all its turns.

    `forgets`: P's prefix cache is emptied before each turn.
    """
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": f"{secrets.token_hex(4)} {STORY * 3}"}
    ]
    tokens = 0
    for turn in range(TURNS):
        body = {"model": MODEL, "temperature": 0, "messages": messages, "max_tokens": ANSWER}
        theirs = await _said(fleet.plain.url, CHAT, body)
        if forgets:
            await _forget(fleet.prefills[0])
        ours = await _said(proxy.url, CHAT, body | {"stream": chance.random() < 0.5})
        assert ours.text == theirs.text
        if not ours.streamed:
            assert ours.json["kv_transfer_params"] is None
        tokens += theirs.json["usage"]["prompt_tokens"]
        messages = [
            *messages,
            {"role": "assistant", "content": theirs.text},
            {"role": "user", "content": f"{turn}: go on, and tell what she found there."},
        ]
    return tokens


async def _forget(engine: Engine) -> None:
    """Empty an engine's prefix cache, once no request has blocks there."""
    assert await asyncio.to_thread(_settled, engine)
    assert (await ask(engine.url, "/reset_prefix_cache", {})).status == 200


async def _continue(proxy: Proxy, fleet: Fleet, chance: random.Random) -> int:
    """The same with completions of token ids. A chat's answer is tokenized again; this model's text
    seldom gives the same ids.
    """
    nonce = secrets.token_hex(4)
    prompt, tokens = ids(nonce, 400), 0
    for turn in range(TURNS):
        body = {"model": MODEL, "temperature": 0, "prompt": prompt, "max_tokens": ANSWER}
        theirs = await _said(fleet.plain.url, COMPLETIONS, body | {"return_token_ids": True})
        ours = await _said(proxy.url, COMPLETIONS, body | {"stream": chance.random() < 0.5})
        assert ours.text == theirs.text
        tokens += len(prompt)
        prompt = [*prompt, *theirs.json["choices"][0]["token_ids"], *ids(f"{nonce} {turn}", 24)]
    return tokens


def _settled(engine: Engine, seconds: float = 20) -> bool:
    """Return whether an engine comes to hold no KV for others."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if engine.counters().sum(USAGE) == 0:
            return True
        time.sleep(0.2)
    return False


def _rose(before: Counters, after: Counters, name: str, **labels: str) -> float:
    return after.sum(name, **labels) - before.sum(name, **labels)


async def test_conversations(talkers: tuple[Fleet, int], proxy: Proxy) -> None:
    """The texts are the plain engine's; P pulls what D held of the turn before, instead of
    computing it.
    """
    fleet, _ = talkers
    prefill, decode = fleet.prefills[0], fleet.decodes[0]
    before, counted, expired = prefill.counters(), proxy.counters(), decode.counters()
    places, chance = asyncio.Semaphore(AT_ONCE), random.Random(7)

    async def one(talk: Callable[[Proxy, Fleet, random.Random], Awaitable[int]]) -> int:
        async with places:
            return await talk(proxy, fleet, chance)

    kinds = (_converse, _continue)
    tokens = sum(await asyncio.gather(*(one(kinds[number % 2]) for number in range(CONVERSATIONS))))
    after, shown = prefill.counters(), proxy.counters()
    turns = CONVERSATIONS * TURNS
    assert _rose(counted, shown, "pdproxy_turns_kept_total") == turns
    reused = _rose(counted, shown, "pdproxy_turns_reused_total")
    assert reused >= 0.9 * (turns - CONVERSATIONS), shown.by(
        "pdproxy_turns_dropped_total", "reason"
    )
    pulled = _rose(before, after, SOURCE, source="external_kv_transfer")
    computed = _rose(before, after, SOURCE, source="local_compute")
    assert pulled > 0
    print(
        f"\n{turns} turns of {tokens} prompt tokens: P computed {computed / tokens:.1%}, pulled "
        f"{pulled / tokens:.1%}"
    )
    assert computed < 0.5 * tokens, "most of each later prompt is known to D or to P's own cache"
    assert _rose(counted, shown, "pdproxy_turn_prefill_seconds_saved_total") > 0
    # The first stream after the proxy's start may end before the engine has connected to the socket
    # for notices.
    unknown = sum(
        shown.sum("pdproxy_turns_dropped_total", reason=reason)
        for reason in ("no_notice", "expired")
    )
    assert _rose(expired, decode.counters(), EXPIRED) <= unknown


async def test_a_prefill_engine_that_has_forgotten(
    talkers: tuple[Fleet, int], proxy: Proxy
) -> None:
    """It pulls all of the turn before, as one does that has never seen the conversation."""
    fleet, _ = talkers
    prefill = fleet.prefills[0]
    before, counted, chance = prefill.counters(), proxy.counters(), random.Random(11)
    tokens = sum([await _converse(proxy, fleet, chance, forgets=True) for _ in range(3)])
    after, shown = prefill.counters(), proxy.counters()
    pulled = _rose(before, after, SOURCE, source="external_kv_transfer")
    computed = _rose(before, after, SOURCE, source="local_compute")
    reused = _rose(counted, shown, "pdproxy_turn_tokens_reused_total")
    print(
        f"\nof {tokens} prompt tokens P computed {computed / tokens:.1%}, pulled "
        f"{pulled / tokens:.1%}"
    )
    assert pulled == reused, "it had nothing of its own"
    assert pulled > 0.5 * tokens


async def test_a_changed_history(talkers: tuple[Fleet, int], proxy: Proxy) -> None:
    """An answer that the client has shortened: only the common blocks are used, and the text is
    right.
    """
    fleet, _ = talkers
    counted = proxy.counters()
    for cut in (1, 7, 20, 33):
        prompt = f"{secrets.token_hex(4)} {STORY * 3}"
        body = {
            "model": MODEL,
            "temperature": 0,
            "prompt": prompt,
            "max_tokens": 40,
            "return_token_ids": True,
        }
        choice = (await _said(proxy.url, COMPLETIONS, body)).json["choices"][0]
        changed = [
            *choice["prompt_token_ids"],
            *choice["token_ids"][:-cut],
            *choice["prompt_token_ids"][1:60],
        ]
        following = {"model": MODEL, "temperature": 0, "prompt": changed, "max_tokens": 24}
        ours, theirs = (
            await _said(proxy.url, COMPLETIONS, following),
            await _said(fleet.plain.url, COMPLETIONS, following),
        )
        assert ours.text == theirs.text
    shown = proxy.counters()
    assert _rose(counted, shown, "pdproxy_turns_reused_total", part="trimmed") >= 3


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_is_killed_between_two_turns(
    talkers: tuple[Fleet, int], proxy: Proxy, role: str
) -> None:
    """The next turn's text is right. A new P pulls what D holds; of a new D nothing is pulled."""
    fleet, _ = talkers
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": f"{secrets.token_hex(4)} {STORY * 3}"}
    ]
    body = {"model": MODEL, "temperature": 0, "messages": messages, "max_tokens": ANSWER}
    theirs = await _said(fleet.plain.url, CHAT, body)
    assert (await _said(proxy.url, CHAT, body)).text == theirs.text
    (victim,) = fleet.prefills if role == "prefill" else fleet.decodes
    await asyncio.to_thread(fleet.start_again, victim)
    end = time.monotonic() + 60
    while proxy.ready() != 200:
        assert time.monotonic() < end, "not ready"
        await asyncio.sleep(0.2)
    await _until_reused(proxy, fleet)
    messages += [
        {"role": "assistant", "content": theirs.text},
        {"role": "user", "content": "go on"},
    ]
    theirs = await _said(fleet.plain.url, CHAT, body)
    await _forget(fleet.prefills[0])
    before = fleet.prefills[0].counters()
    assert (await _said(proxy.url, CHAT, body)).text == theirs.text
    pulled = _rose(before, fleet.prefills[0].counters(), SOURCE, source="external_kv_transfer")
    assert (pulled > 0) == (role == "prefill")


async def test_clients_that_leave(talkers: tuple[Fleet, int], proxy: Proxy) -> None:
    """What D keeps for nobody is released: after quiet it holds no more than the proxy knows of."""
    fleet, _ = talkers
    chance = random.Random(3)

    async def leave() -> None:
        body = {
            "model": MODEL,
            "prompt": f"{secrets.token_hex(4)} {STORY}",
            "max_tokens": 64,
            "stream": True,
        }
        asked = asyncio.create_task(ask(proxy.url, COMPLETIONS, body))
        await asyncio.sleep(chance.random())
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    for _ in range(10):
        await asyncio.gather(*(leave() for _ in range(5)))
    end = time.monotonic() + 60
    while True:
        shown, blocks = proxy.counters(), 511
        held = fleet.decodes[0].counters().sum(USAGE) * blocks
        if held <= shown.sum("pdproxy_turn_blocks") + 1 and shown.sum("pdproxy_kv_handles") == 0:
            break
        assert time.monotonic() < end, (
            f"{held} blocks are held, {shown.sum('pdproxy_turn_blocks')} are known"
        )
        await asyncio.sleep(0.5)
