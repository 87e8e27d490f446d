"""Requests at which every engine fails take nothing from other clients and are paid, and engines
that fail are still found.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pdproxy.observe.events import RequestEnded
from pdproxy.serving.dispatch.decode_leg import DecodeLeg
from tests.fakes import answers, scripts
from tests.fakes.client import bearer
from tests.fakes.clock import ManualClock
from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.passed import RESPONSES, responses
from tests.fakes.world import CHAT, COMPLETIONS, TEXT, World, chat, completion, until, world
from tests.proxy.test_quotas import keys, left

TOKENIZE = "/tokenize"
POISON = "poison"
FAILURES = 3
"""The default of `limits.breaker_failures`."""
Answers = Callable[[Reply], Awaitable[None]]
fails = scripts.whole(answers.INTERNAL_500, 500)
fails_in_a_stream = scripts.streams(answers.error_event(), answers.DONE)


def fails_at(word: str, then: Answers = fails) -> Answers:
    """An engine that fails at requests with a word, and serves all others. "": it serves none."""

    async def script(reply: Reply) -> None:
        await (then(reply) if word.encode() in reply.request.body else reply.serve())

    return script


def everywhere(script: Answers, path: str, *engines: FakeEngine) -> list[str]:
    """Have engines answer a path so. Return the list of the engines that were asked."""
    asked: list[str] = []
    for engine in engines:

        async def noted(reply: Reply, engine: FakeEngine = engine) -> None:
            if POISON.encode() in reply.request.body:
                asked.append(engine.url)
            await script(reply)

        engine.default = noted
        if path not in (COMPLETIONS, CHAT):
            engine.admin = {**engine.admin, path: noted}
    return asked


ALONE: dict[str, tuple[str, dict[str, Any], Answers]] = {
    "completion": (COMPLETIONS, completion(echo=True, user=POISON), fails),
    "streamed completion": (
        COMPLETIONS,
        completion(echo=True, user=POISON, stream=True),
        fails_in_a_stream,
    ),
    "chat": (CHAT, chat(prompt_logprobs=0, user=POISON), fails),
    "tokenize": (TOKENIZE, {"model": "tiny", "prompt": POISON}, fails),
    "responses": (RESPONSES, responses(user=POISON), fails),
}


def untouched(w: World) -> None:
    """All engines and all pairs are in use as before."""
    now = w.proxy.now()
    assert [engine.state(now) for engine in w.proxy.ledger.engines] == ["up"] * len(w.engines)
    assert not any(engine.failures for engine in w.proxy.ledger.engines)
    assert not w.proxy.ledger.transfers.suspects
    assert not [found for one in w.workers for found in one.ledger.transfers.faults]


@pytest.mark.parametrize("ask", ALONE)
async def test_a_failure_that_follows_its_request_counts_for_no_engine(ask: str) -> None:
    """The second engine's error is the client's answer, and no third one is asked."""
    path, body, how = ALONE[ask]
    async with world(prefill=1, decode=3, leaves=True) as w:
        asked = everywhere(fails_at(POISON, how), path, *w.engines)
        for number in range(2 * FAILURES):
            answer = await w.ask(path, body)
            assert (answer.status, answer.json["error"]["type"]) == (500, "InternalServerError")
            assert len(set(asked[2 * number :])) == 2, asked
        untouched(w)
        assert (await w.ask(COMPLETIONS, completion())).status == 200


@pytest.mark.parametrize("ask", ALONE)
async def test_an_engine_that_fails_each_request_opens_its_breaker(ask: str) -> None:
    """Each time another engine answers the request: behind so many it gets no more."""
    path, body, how = ALONE[ask]
    async with world(prefill=1, decode=3) as w:
        bad = w.decode[1]
        everywhere(fails_at(POISON, lambda reply: reply.serve()), path, *w.engines)
        asked = everywhere(fails_at("", how), path, bad)
        for _ in range(6 * FAILURES):
            assert (await w.ask(path, body)).status == 200
        assert asked == [bad.url] * FAILURES
        assert w.proxy.engines[bad.url].in_ledger.state(w.proxy.now()) == "excluded"


@pytest.mark.parametrize("ask", ALONE)
async def test_two_of_three_engines_that_fail_each_request(ask: str) -> None:
    """They fail one request together, and nobody knows more than that. All others are tried at the
    third one, and show it.
    """
    path, body, how = ALONE[ask]
    async with world(prefill=1, decode=3) as w:
        good, *bad = w.decode
        everywhere(fails_at(POISON, lambda reply: reply.serve()), path, good)
        everywhere(fails_at("", how), path, *bad)
        statuses = [(await w.ask(path, body)).status for _ in range(8 * FAILURES)]
        assert statuses.count(200) >= len(statuses) - 1, statuses
        assert {w.proxy.engines[one.url].in_ledger.state(w.proxy.now()) for one in bad} == {
            "excluded"
        }
        assert w.proxy.engines[good.url].in_ledger.state(w.proxy.now()) == "up"


@pytest.mark.parametrize("ask", ALONE)
async def test_the_only_engine_opens_its_breaker_by_itself(ask: str) -> None:
    """Nothing else would show that it is broken. It gets requests all the same: there is no other
    one.
    """
    path, body, how = ALONE[ask]
    async with world(prefill=1, decode=1, leaves=True) as w:
        (only,) = w.decode
        asked = everywhere(fails_at(POISON, how), path, only)
        assert (await w.ask(path, body)).status == 500
        assert asked == [only.url] * 3, "of `limits.attempts`"
        await w.told()
        assert w.proxy.engines[only.url].in_ledger.state(w.proxy.now()) == "excluded"
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        assert only.requests[-1].kv is not None, "prompts are still split"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_kv_is_not_blamed_for_a_request_that_fails_without_kv_too(
    path: str, stream: bool
) -> None:
    """The prefill leg does not carry a grammar: only decode engines fail at it. The next prompts
    are split as ever.
    """
    grammar = {"json": {"$ref": "#"}}
    ask = completion if path == COMPLETIONS else chat
    async with world(prefill=2, decode=3, leaves=True) as w:
        for engine in w.engines:
            engine.default = fails_at("structured_outputs")
        for _ in range(3 * FAILURES):
            assert (await w.ask(path, ask(structured_outputs=grammar, stream=stream))).status == 500
        untouched(w)
        before = [len(engine.requests) for engine in w.prefill]
        for _ in range(6):
            assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        assert all(
            len(engine.requests) > count for engine, count in zip(w.prefill, before, strict=True)
        )


async def test_prefill_engines_that_fail_at_a_request_that_no_engine_serves() -> None:
    """Neither of them counts. No third prefill engine is asked, and one engine alone has the last
    word.
    """
    async with world(prefill=3, decode=2, leaves=True) as w:
        for engine in w.engines:
            engine.default = fails_at(POISON)
        for _ in range(2 * FAILURES):
            before = sum(len(engine.requests) for engine in w.prefill)
            assert (await w.ask(COMPLETIONS, completion(user=POISON))).status == 500
            assert sum(len(engine.requests) for engine in w.prefill) == before + 2
        untouched(w)


def one_after_the_other(w: World, *scripts_: Answers) -> list[str]:
    """Have engines answer so, whichever of them is asked first. Return the list of those that were
    asked.
    """
    asked: list[str] = []

    async def script(reply: Reply) -> None:
        asked.append(reply.engine.url)
        await scripts_[(len(asked) - 1) % len(scripts_)](reply)

    for engine in w.decode:
        engine.default = script
    return asked


async def test_it_counts_with_the_first_data_of_another_engines_stream() -> None:
    """A stream may last for minutes. What its client does then changes nothing."""
    async with world(prefill=0, decode=2) as w:
        asked = one_after_the_other(
            w, fails, scripts.after_word(asyncio.Event(), scripts.one_more_word)
        )
        client = await w.client()
        client.post(COMPLETIONS, completion(stream=True))
        await client.head()
        assert await client.piece() == scripts.WORD
        await w.told()
        assert w.proxy.engines[asked[0]].in_ledger.failures == 1
        client.close()
        await w.ended()


async def test_a_client_that_leaves_before_the_second_answer_shows_nothing() -> None:
    """Otherwise it could have each failure count by leaving before the next one."""
    async with world(prefill=0, decode=2, leaves=True) as w:
        asked = one_after_the_other(w, fails, scripts.stall)
        for _ in range(FAILURES):
            asked.clear()
            client = await w.client()
            client.post(COMPLETIONS, completion())
            await until(lambda: len(asked) == 2)
            client.close()
            await until(lambda: w.inflight == 0)
        untouched(w)


async def test_an_end_for_another_reason_shows_nothing() -> None:
    """The other engine is full: it has not tried the request."""
    full = scripts.whole(answers.INTERNAL_500, 503)
    async with world(prefill=0, decode=3, leaves=True) as w:
        for _ in range(FAILURES):
            one_after_the_other(w, fails, full, full)
            assert (await w.ask(COMPLETIONS, completion())).status == 503
        untouched(w)


MADE = 50_000
LARGE = json.dumps(
    {
        "id": "x",
        "object": "text_completion",
        "created": 1,
        "model": "tiny",
        "choices": [
            {"index": 0, "text": "x" * 2_000_000, "logprobs": None, "finish_reason": "length"}
        ],
        "usage": {"prompt_tokens": 40, "completion_tokens": MADE, "total_tokens": MADE + 40},
    }
).encode()


async def test_a_stream_that_its_client_did_not_read_is_paid(tmp_path: Path) -> None:
    """The engine makes its tokens also if nobody reads them: what the proxy has read of them is not
    all.
    """
    minute, most = 10_000_000, 200_000

    async def flood(reply: Reply) -> None:
        await reply.start()
        while True:
            await reply.piece(answers.piece(False, "x" * 30_000))

    auth = keys(tmp_path, f"a:sk-a tpm={minute}")
    async with world(prefill=1, decode=1, auth=auth, leaves=True) as w:
        w.decode[0].default = flood
        client = await w.client(receive_buffer=16384)
        client.post(COMPLETIONS, completion(stream=True, max_tokens=most), bearer("sk-a"))
        await client.head()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        every = [one.engines[w.decode[0].url].open_legs.legs for one in w.workers]
        await until(
            lambda: any(
                isinstance(leg, DecodeLeg) and leg.relay.paused for legs in every for leg in legs
            )
        )
        client.close()
        await until(lambda: w.events(RequestEnded))
        assert most <= minute - await left(w) < most + 100


@pytest.mark.parametrize("limit", [None, 50_000])
async def test_a_stream_that_was_read_before_its_client_stopped_is_paid(
    tmp_path: Path, limit: int | None
) -> None:
    """What the client has read counts, also if that is more than the engine may have made in a
    minute of its key.
    """
    minute, read = 1000, 2000
    stopped = asyncio.Event()

    async def flood(reply: Reply) -> None:
        await reply.start()
        for _ in range(read):
            await reply.piece(answers.piece(False, "x"))
        await stopped.wait()
        while True:
            await reply.piece(answers.piece(False, "x" * 30_000))

    auth = keys(tmp_path, f"a:sk-a tpm={minute}")
    async with world(prefill=1, decode=1, auth=auth, leaves=True, clock=ManualClock()) as w:
        w.decode[0].default = flood
        client = await w.client(receive_buffer=16384)
        body = completion(stream=True, max_tokens=limit)
        client.post(COMPLETIONS, body, bearer("sk-a"))
        await client.head()
        seen = 0
        while seen < read - 200:  # some are cut by the ends of reads
            seen += (await client.reader.read(1 << 16)).count(b"data: ")
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        stopped.set()
        every = [one.engines[w.decode[0].url].open_legs.legs for one in w.workers]
        await until(
            lambda: any(
                isinstance(leg, DecodeLeg) and leg.relay.paused for legs in every for leg in legs
            )
        )
        client.close()
        await until(lambda: w.events(RequestEnded))
        assert minute - await left(w) >= read


@pytest.mark.parametrize(
    ("path", "body", "most"),
    [
        (COMPLETIONS, completion(max_tokens=500, logprobs=20), 500),
        ("/v1/embeddings", {"model": "tiny", "input": ["a text"] * 32}, 0),
    ],
)
async def test_an_answer_without_space_costs_no_more_than_was_asked_for(
    tmp_path: Path, path: str, body: dict[str, Any], most: int
) -> None:
    """Others' answers may take the space, and an answer may have many bytes for each token, or none
    at all.
    """
    minute, large = 1_000_000, LARGE[:400_000]
    limits = {"max_answer_bytes": 1 << 20, "max_buffered_answer_bytes": 1 << 20}
    auth = keys(tmp_path, f"a:sk-a tpm={minute}")
    async with world(
        prefill=1, decode=3, auth=auth, limits=limits, leaves=True, clock=ManualClock()
    ) as w:
        w.proxy.answer_budget.held += (1 << 20) - 300_000
        for engine in (*w.prefill, *w.decode):
            engine.admin = {**engine.admin, path: scripts.whole(large)}
        for engine in w.decode:
            engine.default = scripts.whole(large)
        answer = await w.ask(path, body, bearer("sk-a"))
        assert (answer.status, answer.json["error"]["reason"]) == (503, "answers")
        await until(lambda: w.events(RequestEnded))
        w.proxy.answer_budget.held -= (1 << 20) - 300_000
        assert most <= minute - await left(w) < most + 200


@pytest.mark.parametrize(("stream", "part"), [(False, 4), (True, 0)])
async def test_an_answer_without_space_and_limit_costs_what_who_leaves_pays(
    tmp_path: Path, stream: bool, part: int
) -> None:
    """Its bytes say little of its tokens: with `top_logprobs` each has hundreds. A stream of which
    nothing was sent costs its prompt.
    """
    minute = 100_000
    limits = {"max_answer_bytes": 1 << 20, "max_buffered_answer_bytes": 1 << 20}
    auth = keys(tmp_path, f"a:sk-a tpm={minute}")
    async with world(
        prefill=1, decode=1, auth=auth, limits=limits, leaves=True, clock=ManualClock()
    ) as w:
        taken = (1 << 20) - (0 if stream else 300_000)

        async def fills(reply: Reply) -> None:
            w.proxy.answer_budget.held += taken
            await (reply.serve() if stream else scripts.whole(LARGE[:400_000])(reply))

        w.decode[0].default = fills
        body = chat(logprobs=True, top_logprobs=20, stream=stream)
        body.pop("max_tokens", None)
        answer = await w.ask(CHAT, body, bearer("sk-a"))
        assert (answer.status, answer.json["error"]["reason"]) == (503, "answers")
        await until(lambda: w.events(RequestEnded))
        w.proxy.answer_budget.held -= taken
        least = minute / part if part else 0
        assert least <= minute - await left(w) < least + 200


@pytest.mark.parametrize("limit", [100, 5000])
async def test_a_list_without_space_costs_no_more_than_was_reported(
    tmp_path: Path, limit: int
) -> None:
    """The answers that engines have reported count once, as reported."""
    minute, made, count = 10_000_000, 100, 16
    one = json.dumps(
        {
            "id": "x",
            "object": "text_completion",
            "created": 1,
            "model": "tiny",
            "choices": [
                {"index": 0, "text": "x" * 30_000, "logprobs": None, "finish_reason": "length"}
            ],
            "usage": {"prompt_tokens": 20, "completion_tokens": made, "total_tokens": made + 20},
        }
    ).encode()
    limits = {"max_answer_bytes": 400_000, "max_buffered_answer_bytes": 400_000}
    auth = keys(tmp_path, f"a:sk-a tpm={minute}")
    async with world(auth=auth, limits=limits, leaves=True, clock=ManualClock()) as w:
        w.decode[0].default = scripts.whole(one)
        prompts = [f"prompt {number} " for number in range(count)]
        body = completion(prompt=prompts, max_tokens=limit)
        answer = await w.ask(COMPLETIONS, body, bearer("sk-a"))
        assert (answer.status, answer.json["error"]["reason"]) == (503, "answers")
        await until(lambda: w.events(RequestEnded))
        assert minute - await left(w) <= count * (made + 20)


async def test_an_answer_without_space_makes_no_others_of_its_list_free(tmp_path: Path) -> None:
    """Those that engines have reported before are paid as well."""
    minute, made, count = 10_000_000, 5000, 64
    one = json.dumps(
        {
            "id": "x",
            "object": "text_completion",
            "created": 1,
            "model": "tiny",
            "choices": [
                {"index": 0, "text": "x" * 6000, "logprobs": None, "finish_reason": "length"}
            ],
            "usage": {"prompt_tokens": 20, "completion_tokens": made, "total_tokens": made + 20},
        }
    ).encode()
    limits = {"max_answer_bytes": 300_000, "max_buffered_answer_bytes": 300_000}
    auth = keys(tmp_path, f"a:sk-a tpm={minute}")
    async with world(auth=auth, limits=limits, leaves=True, clock=ManualClock()) as w:
        w.decode[0].default = scripts.whole(one)
        prompts = [f"prompt {number} " * 8 for number in range(count)]
        answer = await w.ask(
            COMPLETIONS, completion(prompt=prompts, max_tokens=made), bearer("sk-a")
        )
        assert (answer.status, answer.json["error"]["reason"]) == (503, "answers")
        await until(lambda: w.events(RequestEnded))
        assert minute - await left(w) > 40 * made


async def test_an_answer_without_space_is_paid_as_far_as_it_had_come(tmp_path: Path) -> None:
    """The client itself may be whose answers take all the space."""
    minute, size = 1_000_000, len(LARGE)
    limits = {"max_answer_bytes": 1 << 20, "max_buffered_answer_bytes": 1 << 20}
    auth = keys(tmp_path, f"a:sk-a tpm={minute}")
    async with world(
        prefill=1, decode=3, auth=auth, limits=limits, leaves=True, clock=ManualClock()
    ) as w:
        w.proxy.answer_budget.held += (1 << 20) - 400_000
        for engine in w.decode:
            engine.default = scripts.whole(LARGE[: size // 4])
        answer = await w.ask(COMPLETIONS, completion(max_tokens=MADE * 10), bearer("sk-a"))
        assert (answer.status, answer.json["error"]["reason"]) == (503, "answers")
        await until(lambda: w.events(RequestEnded))
        w.proxy.answer_budget.held -= (1 << 20) - 400_000
        assert minute - await left(w) > 400_000 / 4 - 100


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, completion(max_tokens=MADE)),
        (COMPLETIONS, completion(max_tokens=MADE // 2, n=2, temperature=1)),
        (RESPONSES, responses(max_output_tokens=MADE)),
    ],
)
async def test_an_answer_that_is_too_large_is_paid(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    """It was generated, once: as of a client that leaves before its end, the most that it may have
    been.
    """
    minute = 1_000_000
    limits = {"max_answer_bytes": 1 << 20, "max_buffered_answer_bytes": 4 << 20}
    auth = keys(tmp_path, f"a:sk-a tpm={minute}")
    async with world(
        prefill=1, decode=3, auth=auth, limits=limits, leaves=True, clock=ManualClock()
    ) as w:

        async def large(reply: Reply) -> None:
            loads = reply.request.json.get("max_tokens") == 1
            await (reply.serve() if loads else reply.whole(LARGE))

        for engine in w.decode:
            engine.default = large
            engine.admin = {**engine.admin, RESPONSES: large}
        answer = await w.ask(path, body, bearer("sk-a"))
        assert answer.status == 502
        assert "limits.max_answer_bytes" in answer.json["error"]["message"]
        await until(lambda: w.events(RequestEnded))
        assert MADE <= minute - await left(w) < MADE + 100
        untouched(w)
