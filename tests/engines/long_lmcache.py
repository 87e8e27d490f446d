"""LMCache's PD mode (contract `lmcache-pd`) on real engines."""

# Runs only if this file is named, as in `.ci/full`. Starts two engines, one that pushes KV and one
# that receives it, with LMCache 0.5.6 and the code that it lacks on a CPU
# (`connectors/cpu_lmcache.py`). At the end it starts two more with unmodified LMCache: those never
# send a notice.

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pdproxy.wire.route_form import Alone

from .build import ensure, ensure_overlay
from .client import ask
from .compare import differs
from .connected import (
    BARE_LMCACHE,
    CHUNK,
    CPU_LMCACHE,
    DECODES_BEHIND,
    Ports,
    by_lmcache,
    lmcache_settings,
    pair,
)
from .engine import MODEL, Engine
from .equality import SETTLED, SOURCE, Increases, Moved, equal
from .fleet import Fleet
from .launcher import Launcher
from .long_token_ids import SPLIT as SPLIT_IDS
from .long_token_ids import body_of, compared
from .prompts import EOS, ids
from .proxy import Proxy
from .shapes import COMPLETIONS, SHAPES, Shape, story

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]

ENV = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
"""LMCache finds chunks by Python's hashes, which need a fixed seed."""

KV_BYTES = 2 * 4 * 2 * 64 * 4
"""Bytes of KV per token: keys and values, layers, heads, head size, bytes of a float
(make_model.py).
"""

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
"""The prefill engine makes the first token, and the decode engine continues behind it."""
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
"""The first token is the last one: no decode engine generates."""
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
"""Requests that depend on their own output, are parsed, or have no limit: the decode engine makes
the first token, from the KV of all prompt tokens but the last.
"""
NO_TEXT = Alone.FIRST_TOKEN.value
NOT_SHOWN = [BY_NAME[name] for name in ("completion-eos-ignored", "chat-ignore-eos")]
"""The first token has no text."""
IGNORED = {"created_cache_tokens"}
"""Completions don't report it, and a chat reports it for both legs; these engines have no prefix
cache, the plain one has.
"""


@dataclass(frozen=True)
class Pushing:
    """The engines, and their ports."""

    fleet: Fleet
    ports: Ports


@pytest.fixture(scope="module")
def lmcache_launcher() -> Iterator[Launcher]:
    """Starts engines with LMCache, and with the older numpy that it needs."""
    built = ensure()
    launcher = Launcher(built, [ensure_overlay(built, "lmcache")], ENV)
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def pushing(
    lmcache_launcher: Launcher, plain: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pushing]:
    """An engine that pushes KV, and one that receives it."""
    ports = Ports()
    options = by_lmcache(tmp_path_factory.mktemp("lmcache"), ports, CPU_LMCACHE)
    with pair(lmcache_launcher, plain, "lmcache", options, DECODES_BEHIND) as fleet:
        yield Pushing(fleet, ports)


def started(
    pushing: Pushing, folder: Path, settings: dict[str, Any] | None = None, **lmcache: Any
) -> Proxy:
    """Start pdproxy in front of them. Only one at a time: it binds the port for notices."""
    return Proxy.start(
        [],
        [],
        folder,
        settings=_merged(lmcache_settings(pushing.fleet, pushing.ports, **lmcache), settings),
    )


def _merged(tree: dict[str, Any], more: dict[str, Any] | None) -> dict[str, Any]:
    return tree | {key: tree.get(key, {}) | value for key, value in (more or {}).items()}


class TestFirstTokenFromPrefill:
    """The default: the client gets the prefill engine's token, if it can't see a difference."""

    @pytest.fixture(scope="class")
    def proxy(self, pushing: Pushing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
        proxy = started(pushing, tmp_path_factory.mktemp("prefill"))
        yield proxy
        counters = proxy.counters()
        assert proxy.stop() == 0, proxy.tail()
        # A notice is late if the first token was the last one: nobody waits any more.
        assert set(counters.by("pdproxy_kv_notices_total", "result")) <= {"awaited", "late"}
        assert counters.sum("pdproxy_deadline_total", wait="kv_ready") == 0

    @pytest.mark.parametrize("shape", BEHIND, ids=str)
    async def test_decode_goes_on_behind_it(
        self, pushing: Pushing, proxy: Proxy, shape: Shape
    ) -> None:
        """Both engines make one answer; the decode engine computes only that token's KV for each
        prompt.
        """

        def moved(increases: Increases) -> bool:
            return increases["pulled"] == increases["prompt"] > 0 and increases[
                "computed"
            ] == shape_prompts(shape)

        before = awaited(proxy)
        await behind(pushing.fleet, proxy, shape, moved)
        assert awaited(proxy) > before

    @pytest.mark.parametrize("shape", AT_FIRST, ids=str)
    async def test_it_may_be_the_last(self, pushing: Pushing, proxy: Proxy, shape: Shape) -> None:
        """Then the decode engine only reads what was pushed, and makes a token that is dropped."""

        def moved(increases: Increases) -> bool:
            return increases["pulled"] == increases["prompt"] and increases["computed"] == 1

        await behind(pushing.fleet, proxy, shape, moved)

    @pytest.mark.parametrize("shape", FROM_THE_START, ids=str)
    async def test_decode_may_have_to_make_it(
        self, pushing: Pushing, proxy: Proxy, shape: Shape
    ) -> None:
        """The decode engine computes the prompt's last token."""
        await equal(pushing.fleet, proxy, shape, moved=all_but_one, ignored=IGNORED)

    @pytest.mark.parametrize("shape", NOT_SHOWN, ids=str)
    async def test_a_first_token_without_a_text_is_made_again(
        self, pushing: Pushing, proxy: Proxy, shape: Shape
    ) -> None:
        """One engine makes it and all tokens behind it; what was pushed is still read."""
        before = Moved.now(pushing.fleet, proxy, 1)
        body = shape.make(secrets.token_hex(6))
        plain, other = (
            await ask(pushing.fleet.plain.url, shape.path, body),
            await ask(proxy.url, shape.path, body),
        )
        assert not differs(plain, other, ignored=IGNORED)
        deadline = time.monotonic() + SETTLED
        while not (
            (increases := before.since(NO_TEXT))["pulled"]
            == increases["prompt"]
            == increases["computed"] - 1
        ):
            assert time.monotonic() < deadline, increases
            await asyncio.sleep(0.1)
        assert (increases["alone"], increases["expected_reason"]) == (1, 1)

    async def test_nothing_is_reported_as_cached(self, pushing: Pushing, proxy: Proxy) -> None:
        """KV that the decode engine received is not a cache hit for the client."""
        body = {
            "model": MODEL,
            "prompt": story(secrets.token_hex(6)),
            "temperature": 0,
            "max_tokens": 5,
        }
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
    async def test_answer_is_the_plain_engines(
        self, pushing: Pushing, proxy: Proxy, shape: Shape
    ) -> None:
        """Status, body and events are equal; all KV moved except the last token of each prompt."""
        await equal(pushing.fleet, proxy, shape, moved=all_but_one, ignored=IGNORED)


async def behind(
    fleet: Fleet, proxy: Proxy, shape: Shape, moved: Callable[[Increases], bool]
) -> None:
    """Like `equal`, but try again if a prompt's first token was half a letter: then one engine
    makes the answer.
    """
    for last in (False, False, True):
        before = half_letters(proxy)
        try:
            await equal(fleet, proxy, shape, moved=moved, ignored=IGNORED)
            return
        except AssertionError:
            if last or half_letters(proxy) == before:
                raise


def half_letters(proxy: Proxy) -> float:
    """Return how many prompts one engine served because their first token has no text."""
    return proxy.counters().sum("pdproxy_alone_total", reason=NO_TEXT)


def shape_prompts(shape: Shape) -> int:
    """Return how many prompts a shape's request has."""
    prompt = shape.make("0").get("prompt")
    return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1


def all_but_one(increases: Increases) -> bool:
    """Return whether the decode engine got all tokens except the last of each prompt, for at most
    three prompts.
    """
    return (
        increases["prompt"] == increases["pulled"] + increases["computed"]
        and 1 <= increases["computed"] <= 3
    )


def awaited(proxy: Proxy) -> float:
    """Return how many notices ended a wait."""
    return proxy.counters().sum("pdproxy_kv_notices_total", event="ready", result="awaited")


class TestTokenIds:
    """`/inference/v1/generate`, whose prompt is what the legs need."""

    @pytest.fixture(scope="class")
    def given(
        self, lmcache_launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Pushing]:
        ports, flag = Ports(), "--enable-scale-out"
        options = by_lmcache(tmp_path_factory.mktemp("ids"), ports, CPU_LMCACHE)
        options = replace(options, flags=f"{options.flags} {flag}")
        plain = Engine.start(lmcache_launcher, "ids-plain", "plain", flags=flag)
        try:
            plain.wait()
            with pair(lmcache_launcher, plain, "ids", options, DECODES_BEHIND) as fleet:
                yield Pushing(fleet, ports)
        finally:
            plain.stop()

    @pytest.fixture(scope="class")
    def proxy(self, given: Pushing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
        proxy = started(given, tmp_path_factory.mktemp("ids"))
        yield proxy
        assert proxy.stop() == 0, proxy.tail()

    @pytest.mark.parametrize("fields", SPLIT_IDS.values(), ids=SPLIT_IDS)
    async def test_answer_is_the_plain_engines(
        self, given: Pushing, proxy: Proxy, fields: dict[str, Any]
    ) -> None:
        """The decode engine makes every token; all KV moved except that of the last token."""
        before = Moved.now(given.fleet, proxy, 1)
        await compared(given.fleet, proxy, await body_of(given.fleet, fields))
        await before.settled(lambda found: all_but_one(found) and not found["alone"])


class TestASmallBuffer:
    """The decode engine's buffer has space for one prompt: anything left in it would block the next
    one permanently.
    """

    @pytest.fixture(scope="class")
    def small(
        self, lmcache_launcher: Launcher, plain: Engine, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Pushing]:
        ports = Ports()
        options = by_lmcache(
            tmp_path_factory.mktemp("small"), ports, CPU_LMCACHE, buffer=14 * CHUNK * KV_BYTES
        )
        with pair(lmcache_launcher, plain, "small", options, DECODES_BEHIND) as fleet:
            yield Pushing(fleet, ports)

    async def test_nothing_stays_in_it(self, small: Pushing, tmp_path: Path) -> None:
        """Prompts of eleven chunks, one after the other: continued, from the start, ended,
        abandoned.
        """
        bound = {"pd_buffer_size": 14 * CHUNK * KV_BYTES, "kv_bytes_per_token": KV_BYTES}
        proxy = started(small, tmp_path, {"deadlines": {"prefill": 20}}, **bound)
        rounds: list[dict[str, Any]] = [
            {"max_tokens": 4},
            {"max_tokens": 4, "logprobs": 1},
            {"max_tokens": 1},
        ]
        rounds += [{"max_tokens": 4, "logit_bias": {EOS: 100}}]
        try:
            for fields in rounds * 6:
                body = {
                    "model": MODEL,
                    "prompt": ids(secrets.token_hex(6), 330),
                    "temperature": 0,
                    **fields,
                }
                answer = await ask(proxy.url, COMPLETIONS, body)
                assert not differs(
                    await ask(small.fleet.plain.url, COMPLETIONS, body), answer, ignored=IGNORED
                )
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


class TestNoNotices:
    """Unmodified LMCache: on a CPU it sends neither KV nor notices."""

    @pytest.fixture(scope="class")
    def silent(
        self, lmcache_launcher: Launcher, plain: Engine, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Pushing]:
        ports = Ports()
        options = by_lmcache(tmp_path_factory.mktemp("silent"), ports, BARE_LMCACHE)
        with pair(lmcache_launcher, plain, "silent", options, DECODES_BEHIND) as fleet:
            yield Pushing(fleet, ports)

    @pytest.mark.parametrize("name", ["completion", "chat-streamed-usage", "completion-logprobs"])
    async def test_decode_computes(self, silent: Pushing, tmp_path: Path, name: str) -> None:
        """After the deadline the client gets the whole, right answer; the metric shows the reason
        of the delay.
        """
        shape = BY_NAME[name]
        proxy = started(silent, tmp_path, {"deadlines": {"kv_ready": 1.5}})
        try:
            body, before = shape.make(secrets.token_hex(6)), time.monotonic()
            other = await ask(proxy.url, shape.path, body)
            assert time.monotonic() - before >= 1.5
            assert not differs(
                await ask(silent.fleet.plain.url, shape.path, body),
                other,
                strict=False,
                ignored=IGNORED,
            )
            counters = proxy.counters()
            assert counters.sum("pdproxy_deadline_total", wait="kv_ready") >= 1
            assert counters.sum("pdproxy_kv_silent_ranks_total") >= 1 or half_letters(proxy)
            assert counters.sum("pdproxy_kv_notices_total") == 0
        finally:
            assert proxy.stop() == 0, proxy.tail()

    @pytest.mark.parametrize("stream", [False, True])
    async def test_the_request_fails(self, silent: Pushing, tmp_path: Path, stream: bool) -> None:
        """With `on_timeout: fail`: 504 in OpenAI's form, and the decode engine gets no request."""
        settings = {"deadlines": {"kv_ready": 1.0}, "kv_ready": {"on_timeout": "fail"}}
        proxy = started(silent, tmp_path, settings)
        (decode,) = silent.fleet.decodes
        before = decode.counters().sum(SOURCE)
        try:
            body = {
                "model": MODEL,
                "prompt": ids(secrets.token_hex(6), 320),
                "max_tokens": 4,
                "stream": stream,
            }
            answer = await ask(proxy.url, COMPLETIONS, body)
            assert (answer.status, answer.headers["Content-Type"]) == (504, "application/json")
            error = answer.json["error"]
            assert (error["code"], error["type"]) == (504, "GatewayTimeoutError")
            assert "did not report in 1 s that the KV is ready" in error["message"]
            assert proxy.counters().sum("pdproxy_deadline_total", wait="kv_ready") == 1
            assert decode.counters().sum(SOURCE) == before
        finally:
            assert proxy.stop() == 0, proxy.tail()
