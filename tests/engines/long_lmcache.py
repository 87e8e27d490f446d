"""LMCache's PD mode (contract `lmcache-pd`) on real engines; runs only where this file is named, as `.ci/full` does.

Two engines of their own, one that pushes KV and one that receives it, with LMCache 0.5.6 and what that lacks on a CPU
(`connectors/cpu_lmcache.py`). At the end two more with LMCache as it comes: those never tell that KV is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdproxy.wire.request import Alone

from .build import ensure, ensure_overlay
from .client import ask
from .compare import differs
from .connected import BARE_LMCACHE, CHUNK, CPU_LMCACHE, DECODES_BEHIND, Ports, by_lmcache, lmcache_settings, pair
from .engine import MODEL, Engine
from .equality import SETTLED, SOURCE, Moved, Rose, equal
from .fleet import Fleet
from .launcher import Launcher
from .prompts import EOS, ids
from .proxy import Proxy
from .shapes import COMPLETIONS, SHAPES, Shape, story

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]

ENV = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
"""Chunks are found by hashes that Python salts."""

KV_BYTES = 2 * 4 * 2 * 64 * 4
"""Bytes of KV a token: keys and values, layers, heads, head size, bytes of a float (make_model.py)."""

BY_NAME = {shape.name: shape for shape in SHAPES}
BEHIND = [
    BY_NAME[name]
    for name in (
        "completion",
        "completion-model-absent",
        "completion-token-ids",
        "completion-list",
        "completion-list-streamed",
        "completion-list-token-ids-returned",
        "completion-1000-tokens",
        "completion-long-text",
        "completion-to-the-context",
        "completion-cache-salt",
        "completion-streamed",
        "completion-streamed-usage",
        "completion-streamed-no-usage",
        "completion-max-tokens-2",
        "completion-max-tokens-2-streamed",
        "completion-max-tokens-absent",
        "completion-stop-token-ids",
        "completion-eos-after-three",
        "completion-min-tokens",
        "completion-ignore-eos",
        "completion-special-shown",
        "completion-token-ids-returned",
        "completion-token-ids-returned-streamed",
        "completion-logit-bias",
        "completion-header-id",
        "chat",
        "chat-streamed",
        "chat-streamed-usage",
        "chat-model-absent",
        "chat-conversation",
        "chat-conversation-streamed",
        "chat-1000-tokens",
        "chat-max-completion-tokens",
        "chat-both-limits",
        "chat-max-tokens-2-streamed",
        "chat-template-arguments",
        "chat-token-ids-returned",
        "chat-token-ids-returned-streamed",
        "chat-header-id-streamed",
    )
]
"""The first token is the prefill engine's, and the decode engine goes on behind it."""
AT_FIRST = [
    BY_NAME[name]
    for name in (
        "completion-max-tokens-1",
        "completion-stop-id-first",
        "completion-eos-first",
        "completion-eos-first-streamed",
        "completion-eos-shown",
        "chat-max-tokens-1",
        "chat-stop-id-first",
        "chat-eos-first",
    )
]
"""The first token is the last: no decode engine is asked."""
FROM_THE_START = [
    BY_NAME[name]
    for name in (
        "completion-streamed-continuous-usage",
        "completion-stop",
        "completion-stop-streamed",
        "completion-logprobs",
        "completion-logprobs-streamed",
        "completion-seed",
        "completion-penalties",
        "completion-regex-streamed",
        "completion-max-tokens-null",
        "completion-user",
        "chat-streamed-continuous-usage",
        "chat-stop-streamed",
        "chat-logprobs-streamed",
        "chat-eos-first-streamed",
        "chat-penalties",
        "chat-tools-auto-called-streamed",
        "chat-json-schema",
        "chat-max-tokens-absent",
    )
]
"""What looks back at its own output, is parsed, or has no limit: the decode engine makes the first token, of all but the last
token's KV."""
NO_TEXT = Alone.FIRST_TOKEN.value
NOT_SHOWN = [BY_NAME[name] for name in ("completion-eos-ignored", "chat-ignore-eos")]
"""The first token has no text."""
UNSAID = {"created_cache_tokens"}
"""Completions don't say it, and both legs of a chat are one; these engines have no prefix cache, the plain one has."""


@dataclass(frozen=True)
class Pushing:
    """The engines, and where they meet."""

    fleet: Fleet
    ports: Ports


@pytest.fixture(scope="module")
def nursery() -> Iterator[Launcher]:
    """Engines with LMCache, and with the older numpy that it wants."""
    built = ensure()
    launcher = Launcher(built, ensure_overlay(built, "lmcache"), ENV)
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def pushing(nursery: Launcher, plain: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pushing]:
    """An engine that pushes KV, and one that receives it."""
    ports = Ports()
    told = by_lmcache(tmp_path_factory.mktemp("lmcache"), ports, CPU_LMCACHE)
    with pair(nursery, plain, "lmcache", told, DECODES_BEHIND) as fleet:
        yield Pushing(fleet, ports)


def started(pushing: Pushing, folder: Path, settings: dict[str, Any] | None = None, **lmcache: Any) -> Proxy:
    """pdproxy in front of them. Only one at a time: it binds the port that notices come to."""
    return Proxy.start(
        [], [], folder, settings=_merged(lmcache_settings(pushing.fleet, pushing.ports, **lmcache), settings)
    )


def _merged(tree: dict[str, Any], more: dict[str, Any] | None) -> dict[str, Any]:
    return tree | {key: tree.get(key, {}) | value for key, value in (more or {}).items()}


class TestFirstTokenFromPrefill:
    """The default: the prefill engine's token is shown, where nobody can tell the difference."""

    @pytest.fixture(scope="class")
    def proxy(self, pushing: Pushing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
        proxy = started(pushing, tmp_path_factory.mktemp("prefill"))
        yield proxy
        counters = proxy.counters()
        assert proxy.stop() == 0, proxy.tail()
        # Late where the first token was the last: nobody waited any more.
        assert set(counters.by("pdproxy_kv_notices_total", "result")) <= {"awaited", "late"}
        assert counters.sum("pdproxy_deadline_total", wait="kv_ready") == 0

    @pytest.mark.parametrize("shape", BEHIND, ids=str)
    async def test_decode_goes_on_behind_it(self, pushing: Pushing, proxy: Proxy, shape: Shape) -> None:
        """One answer of both engines; of each prompt the decode engine computes the KV of that token alone."""

        def moved(rose: Rose) -> bool:
            return rose["pulled"] == rose["prompt"] > 0 and rose["computed"] == shape_prompts(shape)

        before = awaited(proxy)
        await behind(pushing.fleet, proxy, shape, moved)
        assert awaited(proxy) > before

    @pytest.mark.parametrize("shape", AT_FIRST, ids=str)
    async def test_it_may_be_the_last(self, pushing: Pushing, proxy: Proxy, shape: Shape) -> None:
        """Then the decode engine only reads what was pushed to it, and makes a token that nobody gets."""
        await behind(
            pushing.fleet, proxy, shape, lambda rose: rose["pulled"] == rose["prompt"] and rose["computed"] == 1
        )

    @pytest.mark.parametrize("shape", FROM_THE_START, ids=str)
    async def test_decode_may_have_to_make_it_anew(self, pushing: Pushing, proxy: Proxy, shape: Shape) -> None:
        """The prefill engine leaves the prompt's last token to it."""
        await equal(pushing.fleet, proxy, shape, moved=all_but_one, unsaid=UNSAID)

    @pytest.mark.parametrize("shape", NOT_SHOWN, ids=str)
    async def test_a_first_token_without_a_text_is_made_anew(
        self, pushing: Pushing, proxy: Proxy, shape: Shape
    ) -> None:
        """One engine makes it and all behind it; what was pushed is read all the same."""
        before = Moved.now(pushing.fleet, proxy, 1)
        body = shape.make(secrets.token_hex(6))
        plain, other = await ask(pushing.fleet.plain.url, shape.path, body), await ask(proxy.url, shape.path, body)
        assert not differs(plain, other, unsaid=UNSAID)
        deadline = time.monotonic() + SETTLED
        while not ((rose := before.since(NO_TEXT))["pulled"] == rose["prompt"] == rose["computed"] - 1):
            assert time.monotonic() < deadline, rose
            await asyncio.sleep(0.1)
        assert (rose["alone"], rose["expected_reason"]) == (1, 1)

    async def test_nothing_is_said_to_be_cached(self, pushing: Pushing, proxy: Proxy) -> None:
        """What the decode engine was given is no cache hit of the client's."""
        body = {"model": MODEL, "prompt": story(secrets.token_hex(6)), "temperature": 0, "max_tokens": 5}
        answer = await ask(proxy.url, COMPLETIONS, body)
        assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


class TestFirstTokenFromDecode:
    """The decode engine makes every token, from the client's own request."""

    @pytest.fixture(scope="class")
    def proxy(self, pushing: Pushing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
        proxy = started(pushing, tmp_path_factory.mktemp("decode"), first_token="decode")
        yield proxy
        counters = proxy.counters()
        assert proxy.stop() == 0, proxy.tail()
        assert set(counters.by("pdproxy_kv_notices_total", "result")) == {"awaited"}

    @pytest.mark.parametrize("shape", (BEHIND + AT_FIRST + FROM_THE_START)[::3], ids=str)
    async def test_answer_is_the_plain_engines(self, pushing: Pushing, proxy: Proxy, shape: Shape) -> None:
        """Status, body and events; all moved but the last token of each prompt."""
        await equal(pushing.fleet, proxy, shape, moved=all_but_one, unsaid=UNSAID)


async def behind(fleet: Fleet, proxy: Proxy, shape: Shape, moved: Callable[[Rose], bool]) -> None:
    """As `equal`, once more where the prompt's first token happened to be half a letter: one engine makes that."""
    for last in (False, False, True):
        before = half_letters(proxy)
        try:
            await equal(fleet, proxy, shape, moved=moved, unsaid=UNSAID)
            return
        except AssertionError:
            if last or half_letters(proxy) == before:
                raise


def half_letters(proxy: Proxy) -> float:
    """How many prompts one engine served since their first token has no text."""
    return proxy.counters().sum("pdproxy_alone_total", reason=NO_TEXT)


def shape_prompts(shape: Shape) -> int:
    """How many prompts a shape's request has."""
    prompt = shape.make("0").get("prompt")
    return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1


def all_but_one(rose: Rose) -> bool:
    """Whether the decode engine was given all tokens of each prompt but the last one, of at most three prompts."""
    return rose["prompt"] == rose["pulled"] + rose["computed"] and 1 <= rose["computed"] <= 3


def awaited(proxy: Proxy) -> float:
    """How many notices came for a wait."""
    return proxy.counters().sum("pdproxy_kv_notices_total", event="ready", result="awaited")


class TestASmallBuffer:
    """The decode engine's buffer has room for one prompt: whatever stayed in it would block the next one for good."""

    @pytest.fixture(scope="class")
    def small(self, nursery: Launcher, plain: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pushing]:
        ports = Ports()
        told = by_lmcache(tmp_path_factory.mktemp("small"), ports, CPU_LMCACHE, buffer=14 * CHUNK * KV_BYTES)
        with pair(nursery, plain, "small", told, DECODES_BEHIND) as fleet:
            yield Pushing(fleet, ports)

    async def test_nothing_stays_in_it(self, small: Pushing, tmp_path: Path) -> None:
        """Prompts of eleven chunks, one after the other: behind a first token, from the start, ended, left."""
        bound = {"pd_buffer_size": 14 * CHUNK * KV_BYTES, "kv_bytes_per_token": KV_BYTES}
        proxy = started(small, tmp_path, {"deadlines": {"prefill": 20}}, **bound)
        rounds: list[dict[str, Any]] = [{"max_tokens": 4}, {"max_tokens": 4, "logprobs": 1}, {"max_tokens": 1}]
        rounds += [{"max_tokens": 4, "logit_bias": {EOS: 100}}]
        try:
            for fields in rounds * 6:
                body = {"model": MODEL, "prompt": ids(secrets.token_hex(6), 330), "temperature": 0, **fields}
                answer = await ask(proxy.url, COMPLETIONS, body)
                assert not differs(await ask(small.fleet.plain.url, COMPLETIONS, body), answer, unsaid=UNSAID)
                leaving = asyncio.create_task(
                    ask(proxy.url, COMPLETIONS, body | {"prompt": ids(secrets.token_hex(6), 330)})
                )
                await asyncio.sleep(0.02 + 0.02 * len(fields))
                leaving.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await leaving
            counters = proxy.counters()
            assert set(counters.by("pdproxy_alone_total", "reason")) <= {NO_TEXT}
            assert counters.sum("pdproxy_deadline_total") == 0
        finally:
            assert proxy.stop() == 0, proxy.tail()


class TestNobodyTells:
    """LMCache as it comes: on a CPU it sends nothing, and nobody hears of it."""

    @pytest.fixture(scope="class")
    def silent(self, nursery: Launcher, plain: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pushing]:
        ports = Ports()
        told = by_lmcache(tmp_path_factory.mktemp("silent"), ports, BARE_LMCACHE)
        with pair(nursery, plain, "silent", told, DECODES_BEHIND) as fleet:
            yield Pushing(fleet, ports)

    @pytest.mark.parametrize("name", ["completion", "chat-streamed-usage", "completion-logprobs"])
    async def test_decode_computes(self, silent: Pushing, tmp_path: Path, name: str) -> None:
        """After the deadline the client gets the whole, right answer; the metric says why it took so long."""
        shape = BY_NAME[name]
        proxy = started(silent, tmp_path, {"deadlines": {"kv_ready": 1.5}})
        try:
            body, before = shape.make(secrets.token_hex(6)), time.monotonic()
            other = await ask(proxy.url, shape.path, body)
            assert time.monotonic() - before >= 1.5
            assert not differs(await ask(silent.fleet.plain.url, shape.path, body), other, strict=False, unsaid=UNSAID)
            counters = proxy.counters()
            assert counters.sum("pdproxy_deadline_total", wait="kv_ready") >= 1
            assert counters.sum("pdproxy_kv_silent_ranks_total") >= 1 or half_letters(proxy)
            assert counters.sum("pdproxy_kv_notices_total") == 0
        finally:
            assert proxy.stop() == 0, proxy.tail()

    @pytest.mark.parametrize("stream", [False, True])
    async def test_the_request_fails(self, silent: Pushing, tmp_path: Path, stream: bool) -> None:
        """If that is what the operator wants: 504 in OpenAI's form, and the decode engine isn't asked."""
        settings = {"deadlines": {"kv_ready": 1.0}, "kv_ready": {"on_timeout": "fail"}}
        proxy = started(silent, tmp_path, settings)
        (decode,) = silent.fleet.decodes
        before = decode.counters().sum(SOURCE)
        try:
            body = {"model": MODEL, "prompt": ids(secrets.token_hex(6), 320), "max_tokens": 4, "stream": stream}
            answer = await ask(proxy.url, COMPLETIONS, body)
            assert (answer.status, answer.headers["Content-Type"]) == (504, "application/json")
            error = answer.json["error"]
            assert (error["code"], error["type"]) == (504, "GatewayTimeoutError")
            assert "did not tell in 1 s that the KV is ready" in error["message"]
            assert proxy.counters().sum("pdproxy_deadline_total", wait="kv_ready") == 1
            assert decode.counters().sum(SOURCE) == before
        finally:
            assert proxy.stop() == 0, proxy.tail()
