"""Several answers to a prompt: the prefill engine computes it, the decode engine loads its KV once,
and the answers are those of one engine.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pdproxy.observe.events import HandleEnded, RequestEnded
from pdproxy.serving.dispatch.decode_leg import ACCEPT_GRACE
from tests.differential.alike import difference
from tests.differential.stage import Stage, stage
from tests.engines.prompts import TOOLS
from tests.fakes import answers, scripts
from tests.fakes.client import Answer, bearer, exchange, request
from tests.fakes.clock import ManualClock
from tests.fakes.engine import FakeEngine, Reply, Script, serve
from tests.fakes.flagged import FLAGS, GENERATE, generate
from tests.fakes.pool import pool
from tests.fakes.scripts import WORD
from tests.fakes.world import CHAT, COMPLETIONS, PROMPT, World, chat, completion, until, world
from tests.proxy.test_quotas import left

SEVERAL = {"n": 3, "temperature": 1, "seed": 5, "max_tokens": 6}
STREAM = pytest.mark.parametrize("stream", [False, True])
LENGTH = 64
IDS = list(range(1, 1 + LENGTH))
"""A prompt of four blocks."""


def alone(w: World) -> dict[str, float]:
    """The prompts that one engine served alone, by the reason."""
    reasons = ("n", "unusual", "prefill_failed", "prefill_refused", "no_pair", "echo")
    found = {one: w.metric("pdproxy_alone_total", reason=one) for one in reasons}
    return {reason: count for reason, count in found.items() if count}


def sources(engine: FakeEngine) -> dict[str, float]:
    """Where the KV of an engine's prompt tokens came from."""
    stats = engine.sim.engine.stats
    return {source: count for source, count in stats.prompt_tokens_by_source.items() if count}


async def both_answer(both: Stage, path: str, asked: dict[str, Any]) -> tuple[Answer, Answer]:
    sent = request("POST", path, json.dumps(asked).encode(), [("x-request-id", "r")])
    plain, other = await asyncio.gather(
        *(exchange(port, sent) for port in (both.plain.port, both.world.port))
    )
    await both.world.settled()
    return plain, other


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "seed": (COMPLETIONS, completion(**SEVERAL)),
    "a negative seed": (COMPLETIONS, completion(**SEVERAL | {"seed": -9})),
    "top_k 1": (COMPLETIONS, completion(n=4, temperature=1, top_k=1)),
    "token ids": (COMPLETIONS, completion(**SEVERAL, prompt=IDS, return_token_ids=True)),
    "a list of one": (COMPLETIONS, completion(**SEVERAL, prompt=[PROMPT], logprobs=2)),
    "min_tokens and stops": (COMPLETIONS, completion(**SEVERAL, min_tokens=3, stop=["e", "the"])),
    "an end at once": (COMPLETIONS, completion(**SEVERAL, logit_bias={"2": 100})),
    "chat": (CHAT, chat(**SEVERAL)),
    "chat, logprobs": (CHAT, chat(**SEVERAL, logprobs=True, top_logprobs=2, return_token_ids=True)),
    "chat, a called tool": (
        CHAT,
        chat(**SEVERAL | {"max_tokens": 60}, tools=TOOLS, tool_choice="required"),
    ),
    "chat, a schema": (CHAT, chat(**SEVERAL, response_format={"type": "json_object"})),
}


@pytest.mark.parametrize("usage", [None, {}, {"stream_options": {"include_usage": True}}], ids=str)
@pytest.mark.parametrize("name", ASKED)
async def test_the_answers_are_those_of_one_engine(name: str, usage: dict[str, Any] | None) -> None:
    """To the byte, whole and streamed, with the usage and without; P computes the prompt, D loads
    it once.
    """
    path, asked = ASKED[name]
    async with stage(max_model_len=2048) as both:
        w = both.world
        plain, other = await both_answer(
            both, path, asked if usage is None else asked | usage | {"stream": True}
        )
        assert plain.status == 200, plain.body
        # one engine's choices may find each other's blocks in its cache
        assert not difference(plain, other, cached=False)
        assert (alone(w), len(w.prefill[0].requests), len(w.decode[0].requests)) == ({}, 1, 2)
        loading, answer = w.decode[0].requests
        assert loading.kv is not None
        assert (loading.json["max_tokens"], loading.json.get("stream")) == (1, False)
        assert answer.kv is None
        assert answer.json["n"] == asked["n"]
        assert w.books.endings == {"loaded": 1}


@STREAM
async def test_who_computes_what(stream: bool) -> None:
    """P the prompt, once; D loads all of it once, and computes no more than the last block for each
    answer.
    """
    async with world() as w:
        await w.ask(COMPLETIONS, completion(**SEVERAL, prompt=IDS, stream=stream))
        assert sources(w.prefill[0]) == {"local_compute": LENGTH}
        block = w.decode[0].sim.engine.facts.block_size
        assert sources(w.decode[0]) == {
            "external_kv_transfer": LENGTH,
            "local_cache_hit": 3 * (LENGTH - block),
            "local_compute": 3 * block,
        }


@STREAM
async def test_what_is_reported(stream: bool) -> None:
    """One prompt that was split, each answer's tokens; P's own cache stands for the prompt's in a
    stream.
    """
    async with world(facts={"enable_prompt_tokens_details": True}) as w:
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        for cached in (0, LENGTH - 16):
            answer = await w.ask(COMPLETIONS, completion(**SEVERAL, prompt=IDS, **options))
            usage = json.loads(answer.events[-2][6:])["usage"] if stream else answer.json["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (LENGTH, 18)
            found = usage["prompt_tokens_details"]["cached_tokens"]
            assert found == (cached if stream else LENGTH - 16)
        reports = w.events(RequestEnded)
        assert [(one.prompt_tokens, one.completion_tokens) for one in reports] == [(LENGTH, 18)] * 2
        (times,) = reports[-1].legs
        assert (times.prefill, times.decode) == (w.prefill[0].url, w.decode[0].url)
        assert (times.why_alone, times.attempts) == (None, 1)
        assert (times.whole_s is None, times.first_s is None) == (stream, not stream)
        assert w.metric("pdproxy_prompt_tokens_total", served="split") == 2 * LENGTH


REFUSED = [
    (COMPLETIONS, completion(n=2), 0),
    (COMPLETIONS, completion(n=0, temperature=1), 0),
    (COMPLETIONS, completion(n=10**6, temperature=1), 1),
    (CHAT, chat(n=2, stream=True), 0),
    (CHAT, chat(**SEVERAL, top_p=2), 1),
    (CHAT, chat(**SEVERAL | {"max_tokens": 10_000}), 1),
]


@pytest.mark.parametrize(("path", "asked", "prefills"), REFUSED, ids=str)
async def test_a_refusal_is_that_of_one_engine(
    path: str, asked: dict[str, Any], prefills: int
) -> None:
    """In the engine's words; what is known to be refused is not prefilled."""
    async with stage() as both:
        plain, other = await both_answer(both, path, asked)
        assert plain.status == 400, plain.body
        assert not difference(plain, other)
        assert len(both.world.prefill[0].requests) == prefills


@pytest.mark.parametrize(
    ("path", "asked", "reason"),
    [
        (COMPLETIONS, completion(**SEVERAL, prompt=[PROMPT, PROMPT + "x"]), "n"),
        (COMPLETIONS, completion(**SEVERAL, echo=True), "echo"),
    ],
)
async def test_what_stays_with_one_engine(path: str, asked: dict[str, Any], reason: str) -> None:
    async with world() as w:
        assert (await w.ask(path, asked)).status == 200
        assert (alone(w), w.prefill[0].requests) == ({reason: 1}, [])
        assert w.decode[0].requests[0].json == asked


@pytest.mark.parametrize(
    ("connector", "settings"),
    [
        ("nixl", {"d": {"enable_prefix_caching": False}}),
        ("nixl", {"turns": {"bidirectional": True}, "everybody": {"bidirectional_kv_xfer": True}}),
        ("nixl-push", {}),
    ],
    ids=["no prefix cache", "turns", "nixl-push"],
)
async def test_where_nothing_stays_in_the_decode_engines_cache(
    connector: str, settings: dict[str, Any]
) -> None:
    """One engine serves the request whole."""
    async with pool(connector, **settings) as pair:
        answer = await pair.ask(COMPLETIONS, completion(**SEVERAL))
        assert (answer.status, alone(pair.world)) == (200, {"n": 1})


async def test_token_ids_in_and_out() -> None:
    async with pool("nixl", everybody=FLAGS) as pair:
        asked = generate(params={"n": 3, "temperature": 1, "seed": 5})
        answer = await pair.ask(GENERATE, asked)
        assert (answer.status, alone(pair.world)) == (200, {})
        assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2]
        assert len(pair.p.journal.requests) == 1


FAILURES: dict[str, tuple[list[Script], list[Script], str | None]] = {
    "P fails": ([scripts.whole(answers.INTERNAL_500, 500)] * 3, [], "prefill_failed"),
    "P refuses": ([scripts.whole(answers.SCHEMA_400, 400)], [], "prefill_refused"),
    "D refuses to load": ([], [scripts.whole(answers.SCHEMA_400, 400)], "prefill_refused"),
    "D fails to load": ([], [scripts.whole(answers.INTERNAL_500, 500)], None),
    "D is lost as it loads": ([], [scripts.reset], None),
    "D answers with a stream": ([], [scripts.streams(WORD, answers.end())], None),
    "D fails behind that": ([], [serve, scripts.whole(answers.INTERNAL_500, 500)], None),
    "D is lost behind that": ([], [serve, scripts.reset], None),
}


@STREAM
@pytest.mark.parametrize("name", FAILURES)
async def test_an_engine_that_fails(name: str, stream: bool) -> None:
    """The client gets the same answers: from another pair, or from one engine alone. Of what D
    sends as it loads, the client sees nothing.
    """
    of_p, of_d, reason = FAILURES[name]
    async with world(decode=2) as w:
        asked = completion(**SEVERAL, stream=stream)
        expected = await w.ask(COMPLETIONS, asked)
        w.forget()
        w.prefill[0].script(*of_p)
        w.decode[0].script(*of_d)  # round robin: its turn
        answer = await w.ask(COMPLETIONS, asked)
        assert answer.status == 200
        assert [answer.text_of(index) for index in range(3)] == [
            expected.text_of(index) for index in range(3)
        ]
        assert alone(w) == ({reason: 1} if reason else {})
        assert not w.decode[0].scripts
        await w.quiet()


async def test_an_answer_that_fails_everywhere_counts_for_no_engine() -> None:
    """An engine that has loaded the KV has not shown that the request is harmless."""

    async def fails(reply: Reply) -> None:
        own = reply.request.json.get("n") == 3
        await (reply.whole(answers.INTERNAL_500, 500) if own else reply.serve())

    async with world(decode=3) as w:
        for engine in w.decode:
            engine.default = fails
        for _ in range(10):
            assert (await w.ask(COMPLETIONS, completion(**SEVERAL))).status == 500
        now = w.proxy.now()
        assert [engine.state(now) for engine in w.proxy.ledger.engines] == ["up"] * 4
        assert not any(engine.failures for engine in w.proxy.ledger.engines)


async def test_a_decode_engine_that_loads_in_silence() -> None:
    """The loading has the deadline of a first token, though no answer of it is streamed."""
    clock = ManualClock()
    async with world(decode=2, deadlines={"first_token": 7}, clock=clock) as w:
        first = w.decode[1]
        first.script(scripts.stall)
        asked = asyncio.create_task(w.ask(COMPLETIONS, completion(**SEVERAL)))
        await first.asked()
        await clock.reach(7)
        assert (await asked).status == 200
        assert w.metric("pdproxy_deadline_total", wait="first_token") == 1
        assert w.metric("pdproxy_leg_failures_total", node=first.url, phase="decode") == 1
        await w.quiet()


@STREAM
@pytest.mark.parametrize(
    ("script", "end"), [([scripts.stall], "released"), ([serve, scripts.stall], "loaded")]
)
async def test_a_client_that_leaves(script: list[Script], end: str, stream: bool) -> None:
    """While D loads, and behind that: no handle is left, and D's leg is closed."""
    clock = ManualClock()
    async with world(clock=clock) as w:
        w.decode[0].script(*script)
        client = await w.client()
        client.post(COMPLETIONS, completion(**SEVERAL, stream=stream))
        leg = await w.decode[0].asked(len(script))
        client.close()
        if end == "released":
            await clock.reach(ACCEPT_GRACE)
        await until(leg.left.is_set)
        await w.quiet()
        assert [event.end for event in w.events(HandleEnded)] == [end]
        assert (await w.ended()).outcome == "client_left"


@pytest.mark.parametrize(("script", "unseen"), [([scripts.stall], 0), ([serve, scripts.stall], 18)])
async def test_what_a_client_that_leaves_pays(
    tmp_path: Path, script: list[Script], unseen: int
) -> None:
    """Nothing of its answers is made before the KV is loaded."""
    path, clock = tmp_path / "keys", ManualClock()
    path.write_text("a:sk-a tpm=60000")
    async with world(auth={"api_keys_file": str(path)}, clock=clock) as w:
        w.decode[0].script(*script)
        client = await w.client()
        client.post(COMPLETIONS, completion(**SEVERAL, prompt=IDS), bearer("sk-a"))
        await w.decode[0].asked(len(script))
        client.close()
        if not unseen:
            await clock.reach(ACCEPT_GRACE)
        await w.quiet()
        await w.ended()
        assert 60_000 - await left(w) == LENGTH + unseen


async def test_a_decode_engine_may_never_compute_a_prompt() -> None:
    """With `pools[].alone: never` such requests are served, too: it computes none of theirs."""
    async with pool("nixl", pool_settings={"alone": "never"}) as pair:
        assert (await pair.ask(COMPLETIONS, completion(**SEVERAL))).status == 200


async def test_the_loading_is_a_part_of_the_wait_for_the_first_token() -> None:
    clock, go = ManualClock(), asyncio.Event()
    async with world(clock=clock) as w:
        w.decode[0].script(scripts.gate(go, serve))
        asked = asyncio.create_task(w.ask(COMPLETIONS, completion(**SEVERAL, stream=True)))
        await w.decode[0].asked()
        await clock.advance(3)
        go.set()
        assert (await asked).status == 200
        (leg,) = (await w.ended()).legs
        assert leg.first_s == pytest.approx(3)
