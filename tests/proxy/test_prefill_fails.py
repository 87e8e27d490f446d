"""When the prefill engine fails: another one, else one engine alone; the client sees nothing of
it.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from pdproxy.observe.events import LegFailed
from pdproxy.serving.dispatch.attempt import Attempt
from pdproxy.serving.dispatch.prompt_request import PromptRequest
from pdproxy.transfer.contract import Contract
from tests.fakes import answers, scripts
from tests.fakes.engine import Reply, Script, prefill, prefilled
from tests.fakes.pool import pool
from tests.fakes.world import CHAT, COMPLETIONS, TEXT, chat, completion, until, world

BROKEN: dict[str, Script] = {
    "500": scripts.whole(answers.INTERNAL_500, 500),
    "503": scripts.whole(b"busy", 503),
    "429": scripts.whole(answers.error("full", "RateLimit", 429), 429),
    "302": scripts.whole(b"", 302),
    "reset": scripts.reset,
    "eof": scripts.eof,
    "half": scripts.half,
    "garbage": scripts.garbage,
    "not json": scripts.whole(b"<html>"),
    "no completion": scripts.whole(b"[1]"),
}
NO_HANDLE: dict[str, Script] = {
    "no handle": scripts.whole(answers.whole(False, [1, 2], "x", 1, ids=True)),
    "no blocks": scripts.kv(remote_block_ids=[[]]),
    "no block groups": scripts.kv(remote_block_ids=[]),
    "do_remote_prefill false": scripts.kv(do_remote_prefill=False),
    "null engine": scripts.kv(remote_engine_id=None),
    **{
        f"without {name}": scripts.without([name])
        for name in ("remote_request_id", "remote_host", "remote_block_ids")
    },
}


@pytest.mark.parametrize("broken", [*BROKEN, *NO_HANDLE])
async def test_another_prefill_engine_takes_over(broken: str) -> None:
    """Whatever one prefill engine does wrong, the next is asked, and its KV is what the decode
    engine gets.
    """
    script = {**BROKEN, **NO_HANDLE}[broken]
    async with world(prefill=2) as w:
        for engine in w.prefill:
            engine.script(script)
        # Both have the script for their first request: the first request of each world meets it
        # once or twice.
        w.prefill[0].scripts.clear()
        w.prefill[1].scripts.clear()
        first = w.prefill[1]  # round robin begins behind the first
        first.script(script)
        answer = await w.ask(COMPLETIONS, completion())
        assert (answer.status, answer.text) == (200, TEXT)
        assert len(first.requests) == 1
        assert len(w.prefill[0].requests) == 1
        assert w.decode[0].requests[0].kv is not None
        await w.quiet()
        assert w.books.endings == {"loaded": 1}
        failed = w.events(LegFailed)
        assert [(f.node, f.phase, f.will_retry) for f in failed] == [(first.url, "prefill", True)]
        assert w.metric("pdproxy_leg_failures_total", node=first.url, phase="prefill") == 1


@pytest.mark.parametrize("broken", [*BROKEN, *NO_HANDLE])
async def test_one_engine_alone_where_no_prefill_engine_is_left(broken: str) -> None:
    """With no other prefill engine the decode engine serves by itself, without any handle, and the
    reason is counted.
    """
    async with world() as w:
        w.prefill[0].script({**BROKEN, **NO_HANDLE}[broken])
        answer = await w.ask(COMPLETIONS, completion(stream=True))
        assert (answer.status, answer.text) == (200, TEXT)
        assert "kv_transfer_params" not in w.decode[0].requests[0].json
        reason = "no_handle" if broken in NO_HANDLE else "prefill_failed"
        assert w.metric("pdproxy_alone_total", reason=reason) == 1


async def test_a_prefill_engine_that_refuses_connections() -> None:
    """A refused connection shuts the engine out until a probe succeeds; the request goes on without
    it.
    """
    async with world() as w:
        w.prefill[0].refuse()
        answer = await w.ask(CHAT, chat())
        assert answer.status == 200
        assert w.metric("pdproxy_alone_total", reason="prefill_failed") == 1
        assert w.metric("pdproxy_node_up", node=w.prefill[0].url) == 0
        await w.ask(CHAT, chat())
        assert w.metric("pdproxy_alone_total", reason="no_pair") == 1, (
            "not tried again while it is down"
        )
        await w.prefill[0].listen()
        await w.probe()
        await w.ask(CHAT, chat())
        assert len(w.prefill[0].requests) == 1, "back after a good probe"


async def test_a_prefill_engine_that_says_nothing() -> None:
    """The prefill deadline ends the wait, is counted once, and another way is found; after a grace
    the leg is closed.
    """
    async with world(deadlines={"prefill": 0.15, "abandoned_prefill": 0.15}) as w:
        w.prefill[0].script(scripts.stall)
        answer = await w.ask(COMPLETIONS, completion())
        assert answer.status == 200
        assert w.metric("pdproxy_deadline_total", wait="prefill") == 1
        assert w.metric("pdproxy_alone_total", reason="prefill_failed") == 1
        await w.quiet()
        await until(w.prefill[0].requests[0].left.is_set)  # the leg was closed


async def test_a_prefill_engine_that_is_just_too_late() -> None:
    """The client has had its answer from one engine alone; the KV that comes after all is given
    back, not left to its lease.
    """
    go = asyncio.Event()
    async with world(deadlines={"prefill": 0.15}) as w:
        w.prefill[0].script(scripts.gate(go, prefill))
        answer = await w.ask(COMPLETIONS, completion())
        assert answer.status == 200
        assert w.metric("pdproxy_alone_total", reason="prefill_failed") == 1
        assert w.metric("pdproxy_node_inflight", node=w.prefill[0].url) == 0
        go.set()
        await w.decode[0].given_back()
        await w.quiet()
        assert w.books.endings == {"released": 1}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [401, 404, 422])
async def test_what_is_the_clients_fault_passes_through(
    path: str, stream: bool, status: int
) -> None:
    """A 4xx of the prefill engine is the client's answer as it is; no decode engine is asked."""
    said = answers.error(
        "This model's maximum context length is 2048 tokens",
        "BadRequestError",
        status,
        "input_tokens",
    )
    async with world() as w:
        w.prefill[0].script(scripts.whole(said, status))
        body = completion(stream=stream) if path == COMPLETIONS else chat(stream=stream)
        answer = await w.ask(path, body)
        assert (answer.status, answer.body) == (status, said)
        assert answer.header("content-type") == "application/json"
        assert not w.decode[0].requests
        assert (await w.ended()).outcome == "client"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_has_the_words_for_the_request_as_it_came(stream: bool) -> None:
    """The prefill leg lacks fields. Where it is refused, a decode engine reads the whole request
    and names its first fault.
    """
    async with world() as w:
        body = completion(
            prompt="word " * 9000, stream=stream, structured_outputs={"regex": "a", "choice": ["b"]}
        )
        answer = await w.ask(COMPLETIONS, body)
        assert answer.status == 400
        assert answer.json["error"]["param"] == "structured_outputs"
        assert (len(w.prefill[0].requests), len(w.decode[0].requests)) == (1, 1)
        assert (await w.ended()).outcome == "client"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_only_the_prefill_engine_refuses_is_served_alone(stream: bool) -> None:
    """A prefill engine whose limits are narrower than the decode engine's costs the split, not the
    answer.
    """
    said = answers.error(
        "This model's maximum context length is 16 tokens", "BadRequestError", 400, "input_tokens"
    )
    async with world() as w:
        w.prefill[0].script(scripts.whole(said, 400))
        answer = await w.ask(COMPLETIONS, completion(stream=stream))
        assert (answer.status, answer.text) == (200, TEXT)
        assert w.metric("pdproxy_alone_total", reason="prefill_refused") == 1


async def test_all_fail() -> None:
    """With every engine failing the client gets an error status with an OpenAI body, and never a
    200.
    """
    async with world(prefill=2, decode=2, limits={"attempts": 3}) as w:
        for engine in w.engines:
            engine.default = scripts.reset
        for stream in (False, True):
            answer = await w.ask(COMPLETIONS, completion(stream=stream))
            assert answer.status == 502
            error = answer.json["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["code"], error["type"]) == (502, "BadGatewayError")


async def test_nothing_listens_at_all() -> None:
    """Engines that are all gone are a 503 that may be retried, with an OpenAI body."""
    async with world() as w:
        for engine in w.engines:
            engine.stop()
        for _ in range(2):
            answer = await w.ask(COMPLETIONS, completion())
            assert answer.status == 503
            assert answer.json["error"]["type"] == "ServiceUnavailableError"
            assert (
                answer.header("retry-after") == "1"
                or "no connection" in answer.json["error"]["message"]
            )


async def test_attempts_are_bounded() -> None:
    """`limits.attempts` bounds the tries: with 1, a failed prefill goes straight to one engine
    alone.
    """
    async with world(prefill=3, limits={"attempts": 1}) as w:
        for engine in w.prefill:
            engine.default = scripts.whole(answers.INTERNAL_500, 500)
        answer = await w.ask(COMPLETIONS, completion())
        assert answer.status == 200
        assert sum(len(engine.requests) for engine in w.prefill) == 1


async def test_the_breaker_shuts_out_an_engine_that_keeps_failing() -> None:
    """After `breaker_failures` in a row an engine is left alone for the cooldown, which /ready
    says.
    """
    async with world(prefill=2, limits={"breaker_failures": 2, "breaker_cooldown": 60.0}) as w:
        bad = w.prefill[0]
        bad.default = scripts.whole(answers.INTERNAL_500, 500)
        for _ in range(8):
            assert (await w.ask(COMPLETIONS, completion())).status == 200
        assert len(bad.requests) == 2
        details = (await w.get("/ready")).json["details"]
        assert any(bad.url in line and "failed 2 times in a row" in line for line in details), (
            details
        )


async def test_ids_that_the_prefill_engine_does_not_say() -> None:
    """Without prompt ids in the answer the handle goes on as it is."""

    async def script(reply: Reply) -> None:
        body = json.loads(reply.request.body)
        ids = reply.engine.tokenize(body)
        params = await prefilled(reply.engine, ids)
        await reply.whole(answers.whole(False, ids, "x", 1, ids=False, kv=params))

    async with world() as w:
        w.prefill[0].script(script)
        assert (await w.ask(COMPLETIONS, completion())).status == 200
        assert "prompt_token_ids" not in (w.decode[0].requests[0].kv or {})


async def test_an_attempt_that_cannot_be_prepared_leaks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A defect of a contract is answered with 500, and the engines that were leased are free
    again.
    """

    def fails(self: Attempt, contract: Contract, request: PromptRequest) -> None:
        raise RuntimeError("a defect")

    async with pool("nixl-push") as pair:
        with monkeypatch.context() as patch:
            patch.setattr(Attempt, "_named_dispatch", fails)
            assert (await pair.ask(COMPLETIONS, completion())).status == 500
        assert [
            engine.requests
            for one in pair.world.workers
            for engine in one.ledger.engines
            if engine.requests
        ] == []
        assert (await pair.ask(COMPLETIONS, completion())).status == 200


async def test_an_engine_that_was_not_asked_is_not_named() -> None:
    """A prefill engine answered the client: the report names no decode engine, though one was
    leased.
    """
    async with world() as w:
        w.prefill[0].script(
            scripts.whole(
                b'{"error":{"message":"no","type":"NotFoundError","param":null,"code":404}}', 404
            )
        )
        assert (await w.ask(COMPLETIONS, completion())).status == 404
        (legs,) = (await w.ended()).legs
        assert (legs.prefill, legs.decode) == (w.prefill[0].url, None)
