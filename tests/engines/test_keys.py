"""Keys on real engines: tenants find only their own KV in caches, and a key that is taken away ends
its stream on the engines.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from .client import Answer, ask
from .engine import MODEL
from .fleet import Fleet
from .prompts import CHAT, COMPLETIONS
from .proxy import Proxy

KEYS = {
    "alice": secrets.token_hex(16),
    "bob": secrets.token_hex(16),
    "carol": secrets.token_hex(16),
}
RIGHTS = {"carol": "routes=chat max_tokens=4"}
ENDS = 30.0
"""Seconds until engines have stopped: a busy machine needs some."""
RUNNING = "vllm:num_requests_running"


def write(path: Path, names: list[str]) -> None:
    """Write the lines of these keys, at once."""
    lines = [
        " ".join(part for part in (f"{name}:{KEYS[name]}", RIGHTS.get(name, "")) if part)
        for name in names
    ]
    new = path.with_suffix(".new")
    new.write_text("\n".join(lines) + "\n")
    new.chmod(0o600)
    new.replace(path)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    write(path, list(KEYS))
    return path


@pytest.fixture(scope="module")
def proxy(fleet: Fleet, keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """pdproxy in front of one pair, for clients of three tenants."""
    settings = {"auth": {"api_keys_file": str(keys)}}
    proxy = Proxy.start(
        fleet.prefills[:1], fleet.decodes[:1], tmp_path_factory.mktemp("proxy"), settings=settings
    )
    yield proxy
    assert proxy.stop() == 0, proxy.tail()


async def asked(proxy: Proxy, name: str, path: str, body: dict[str, Any]) -> Answer:
    return await ask(proxy.url, path, body, headers={"Authorization": f"Bearer {KEYS[name]}"})


def cached(answer: Answer) -> int:
    assert answer.status == 200, answer.body
    found: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


async def test_tenants_find_only_their_own_kv(fleet: Fleet, proxy: Proxy) -> None:
    """The same prompt: its own tenant finds it in the cache, another one does not; and the answers
    are the plain engine's.
    """
    body = {
        "model": MODEL,
        "prompt": f"{secrets.token_hex(4)} " + "one two three " * 60,
        "max_tokens": 6,
        "temperature": 0,
    }
    plain = await ask(fleet.plain.url, COMPLETIONS, body)
    first, again, others = [
        await asked(proxy, name, COMPLETIONS, body) for name in ("alice", "alice", "bob")
    ]
    assert cached(first) == 0
    assert cached(again) > 100
    assert cached(others) == 0
    assert {first.text, again.text, others.text} == {plain.text}


async def test_a_clients_own_salt_stays_within_its_tenant(proxy: Proxy) -> None:
    body = {
        "model": MODEL,
        "prompt": f"{secrets.token_hex(4)} " + "four five six " * 60,
        "max_tokens": 2,
    }
    salted = body | {"cache_salt": "mine"}
    requests = [("alice", salted), ("bob", salted), ("alice", body), ("alice", salted)]
    found = [cached(await asked(proxy, name, COMPLETIONS, one)) for name, one in requests]
    assert found[:3] == [0, 0, 0]
    assert found[3] > 100


async def test_what_a_key_is_good_for(proxy: Proxy) -> None:
    """A route that the key does not name is refused, and its limit of tokens holds."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "one two"}],
        "max_tokens": 4,
        "ignore_eos": True,
    }
    assert (await asked(proxy, "carol", COMPLETIONS, {"model": MODEL, "prompt": "x"})).status == 403
    assert (await asked(proxy, "carol", CHAT, body | {"max_tokens": 5})).status == 403
    answer = await asked(proxy, "carol", CHAT, body)
    assert (answer.status, answer.json["usage"]["completion_tokens"]) == (200, 4)


async def test_a_key_that_is_taken_away_ends_its_stream(
    fleet: Fleet, proxy: Proxy, keys: Path
) -> None:
    """Within seconds the client has an error event, and the engines work on nothing."""
    body = {
        "model": MODEL,
        "prompt": "one two three",
        "max_tokens": 1500,
        "stream": True,
        "ignore_eos": True,
    }
    headers = {"Authorization": f"Bearer {KEYS['bob']}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{proxy.url}{COMPLETIONS}", json=body, headers=headers) as got,
    ):
        assert got.status == 200
        await got.content.readuntil(b"\n\n")
        write(keys, ["alice", "carol"])
        rest = await asyncio.wait_for(got.content.read(), ENDS)
    assert b"key_revoked" in rest.split(b"\n\n")[-2] + rest.split(b"\n\n")[-3]
    assert (await asked(proxy, "bob", COMPLETIONS, {"model": MODEL, "prompt": "x"})).status == 401
    end = time.monotonic() + ENDS
    while (running := fleet.decodes[0].counters().sum(RUNNING)) and time.monotonic() < end:
        await asyncio.sleep(0.2)
    assert running == 0
    write(keys, list(KEYS))
