"""Error statuses of engines, on both routes: what the client gets, and whether the engine is used
again.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import answers, scripts
from tests.fakes.world import CHAT, CHAT_TEXT, COMPLETIONS, TEXT, World, chat, completion, world

SAID = {
    400: answers.error("no such thing", "BadRequestError", 400, "prompt"),
    429: answers.error("too many", "RateLimitError", 429),
    500: answers.INTERNAL_500,
    503: answers.error("backend unavailable", "ServiceUnavailableError", 503),
    504: answers.error("backend is late", "GatewayTimeoutError", 504),
}
SHUTS_OUT = {400: False, 429: False, 500: True, 503: False, 504: True}
"""Whether one such answer shuts an engine out where `breaker_failures` is 1. One that is full, or
has refused, is not broken.
"""
STATUS = pytest.mark.parametrize("status", list(SAID))
ROUTE = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
BREAKS = {"breaker_failures": 1, "breaker_cooldown": 60.0}


def body(path: str, stream: bool) -> dict[str, Any]:
    """A request that is split."""
    return completion(stream=stream) if path == COMPLETIONS else chat(stream=stream)


def text(path: str) -> str:
    """Its answer."""
    return TEXT if path == COMPLETIONS else CHAT_TEXT


async def shut_out(w: World) -> list[str]:
    """The engines that `/ready` names as failing."""
    details = (await w.get("/ready")).json["details"]
    return [
        engine.url
        for engine in w.engines
        for line in details
        if engine.url in line and "in a row" in line
    ]


@STATUS
async def test_what_all_engines_answer_is_the_clients_answer(status: int) -> None:
    """With its status, and never as the head of a 200."""
    async with world(prefill=2, decode=2) as w:
        for engine in w.engines:
            engine.default = scripts.whole(SAID[status], status)
        for path in (COMPLETIONS, CHAT):
            for stream in (False, True):
                answer = await w.ask(path, body(path, stream))
                assert answer.status == status
                assert answer.header("content-type") == "application/json"
                assert answer.json["error"]["code"] == status
                if status < 500:
                    assert answer.body == SAID[status]


@STATUS
@ROUTE
async def test_a_prefill_engines_error_reaches_nobody(path: str, status: int) -> None:
    """Another prefill engine is asked; what the client itself may have done wrong is asked of a
    decode engine.
    """
    async with world(prefill=2, limits=BREAKS) as w:
        first = w.prefill[1]  # round robin begins behind the first
        first.script(scripts.whole(SAID[status], status))
        answer = await w.ask(path, body(path, stream=True))
        assert (answer.status, answer.text) == (200, text(path))
        assert len(w.prefill[0].requests) == (status != 400)
        assert (w.decode[0].requests[0].kv is None) == (status == 400)
        assert await shut_out(w) == ([first.url] if SHUTS_OUT[status] else [])


@STATUS
@ROUTE
async def test_a_decode_engines_error_before_its_first_data(path: str, status: int) -> None:
    """Another one is asked; a refusal is the client's answer. With one prefill engine, KV that
    could not be loaded is the decode engine's fault: no prompt is split with it until one has its
    KV, and it serves whole ones.
    """
    stream = path == CHAT
    async with world(decode=2, limits=BREAKS, leaves=status == 400) as w:
        first, second = w.decode[1], w.decode[0]
        first.script(scripts.whole(SAID[status], status))
        answer = await w.ask(path, body(path, stream))
        if status == 400:
            assert (answer.status, answer.body) == (400, SAID[400])
            assert not second.requests
        else:
            assert (answer.status, answer.text if stream else len(second.requests)) == (
                200,
                text(path) if stream else 1,
            )
        assert await shut_out(w) == ([first.url] if SHUTS_OUT[status] else [])
        assert not any(engine.failures for engine in w.proxy.ledger.engines)
        assert first.url not in {
            n.url for n in w.proxy.ledger.engines if n.down_because is not None
        }


@STATUS
async def test_an_engine_that_serves_alone_is_judged_by_its_own_answers(status: int) -> None:
    """No other engine's KV can be the reason."""
    async with world(decode=2, limits=BREAKS) as w:
        request = completion(echo=True)
        w.decode[1].script(scripts.whole(SAID[status], status))
        answer = await w.ask(COMPLETIONS, request)
        assert answer.status == (400 if status == 400 else 200)
        assert await shut_out(w) == ([w.decode[1].url] if SHUTS_OUT[status] else [])
