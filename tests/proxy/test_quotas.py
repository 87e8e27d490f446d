"""Limits of keys, over HTTP: what is refused, before which cost, and what is charged for requests
however they end.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from pdproxy.observe.events import RequestEnded
from tests.fakes import scripts
from tests.fakes.admitted import quotas_of
from tests.fakes.client import bearer
from tests.fakes.clock import ManualClock
from tests.fakes.engine import Reply, prefill
from tests.fakes.files import renewed
from tests.fakes.passed import MESSAGES, RESPONSES, everyone, message, responses
from tests.fakes.scripts import WORD
from tests.fakes.world import CHAT, COMPLETIONS, PROMPT, World, chat, completion, until, world

EMBEDDINGS, BATCH, INVOCATIONS = "/v1/embeddings", "/v1/chat/completions/batch", "/invocations"
A, B = bearer("sk-a"), bearer("sk-b")


def keys(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "keys"
    path.write_text(text)
    return {"api_keys_file": str(path)}


async def left(w: World, name: str = "a") -> float:
    """Tokens that a name may still use, once all that was used is known."""
    await w.told()
    return level(w, name)


def level(w: World, name: str = "a") -> float:
    """Tokens that a name may still use, as far as is known now."""
    account = quotas_of(w.proxy)._accounts[name]
    assert account.tokens is not None
    return account.tokens.level


async def test_requests_per_minute(tmp_path: Path) -> None:
    """A 429 with the reason and the time, for this key alone; no engine is asked, and the body is
    not read.
    """
    clock = ManualClock()
    async with world(auth=keys(tmp_path, "a:sk-a rpm=2\nb:sk-b"), clock=clock) as w:
        assert [(await w.ask(COMPLETIONS, completion(), A)).status for _ in range(2)] == [200, 200]
        asked = len(w.prefill[0].requests)
        for path, body in ((COMPLETIONS, b"no JSON"), (CHAT, chat()), (EMBEDDINGS, b"{}")):
            refused = await w.ask(path, body, A)
            assert (refused.status, refused.header("retry-after")) == (429, "30")
            error = refused.json["error"]
            assert (error["reason"], error["type"], error["code"]) == (
                "key_requests",
                "RateLimitError",
                429,
            )
            assert error["message"] == "this key may send 2 requests per minute"
        assert len(w.prefill[0].requests) == asked
        assert w.metric("pdproxy_refusals_total", reason="key_requests", status="429") == 3
        assert (await w.ask(COMPLETIONS, completion(), B)).status == 200
        await clock.advance(30.0)
        assert (await w.ask(COMPLETIONS, completion(), A)).status == 200


async def test_the_report_names_the_key_and_the_reason(tmp_path: Path) -> None:
    async with world(auth=keys(tmp_path, "a:sk-a rpm=1")) as w:
        for _ in range(2):
            await w.ask(COMPLETIONS, completion(), A)
        ended = w.events(RequestEnded)
        assert [(one.key, one.reason, one.outcome) for one in ended] == [
            ("a", None, "ok"),
            ("a", "key_requests", "capacity"),
        ]


async def test_requests_at_once_count_in_the_queue_as_well(tmp_path: Path) -> None:
    """Two keys of one name share the limit; a request that is over is free again, also one whose
    client has left.
    """
    auth = keys(tmp_path, "a:sk-a inflight=2\na:sk-b inflight=2")
    async with world(auth=auth, limits={"max_inflight": 1}) as w:
        go = asyncio.Event()
        w.prefill[0].script(scripts.gate(go, prefill))
        first, second = await w.client(), await w.client()
        first.post(COMPLETIONS, completion(), A)
        await until(lambda: w.inflight == 1)
        second.post(COMPLETIONS, completion(), B)
        await until(lambda: w.waiting == 1)
        refused = await w.ask(COMPLETIONS, completion(), B)
        assert (refused.status, refused.json["error"]["reason"]) == (429, "key_inflight")
        second.close()
        await until(lambda: w.waiting == 0)
        third = await w.client()
        third.post(COMPLETIONS, completion(), B)
        await until(lambda: w.waiting == 1)
        go.set()
        assert [(await client.answer()).status for client in (first, third)] == [200, 200]


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_those_that_engines_reported(tmp_path: Path, stream: bool) -> None:
    clock = ManualClock()
    async with world(auth=keys(tmp_path, "a:sk-a tpm=6000"), clock=clock) as w:
        assert (await w.ask(COMPLETIONS, completion(stream=stream), A)).status == 200
        ended = await w.ended()
        assert ended.prompt_tokens is not None
        assert ended.completion_tokens is not None
        assert await left(w) == 6000 - ended.prompt_tokens - ended.completion_tokens


async def test_a_client_that_leaves_pays_for_what_was_made(tmp_path: Path) -> None:
    """Nobody gets tokens for nothing by closing the connection before the end."""
    clock = ManualClock()
    async with world(auth=keys(tmp_path, "a:sk-a tpm=6000"), clock=clock) as w:
        w.decode[0].script(scripts.streams(*[WORD] * 300, then="stall"))
        client = await w.client()
        client.post(COMPLETIONS, completion(stream=True, max_tokens=1000), A)
        await client.head()
        await until(lambda: w.inflight == 1)
        await asyncio.sleep(0.1)
        client.close()
        await until(lambda: w.inflight == 0)
        assert await left(w) < 6000 - 100


TURNS = [{"role": "user", "content": "hello"}]
UNREAD = [
    (COMPLETIONS, {"model": "tiny", "prompt_embeds": ["AAAA"] * 100, "max_tokens": 4000}),
    (COMPLETIONS, completion(n="100", max_tokens=4000)),
    (INVOCATIONS, chat(n="100", max_tokens=4000)),
    (BATCH, chat(messages=[TURNS] * 100, max_tokens=4000, echo=True)),
]
"""Requests for 100 answers of 4,000 tokens that only an engine reads."""


@pytest.mark.parametrize(
    ("path", "body"), UNREAD, ids=["embeddings", "text", "invocation", "batch"]
)
async def test_who_leaves_pays_for_all_answers_that_only_an_engine_counts(
    tmp_path: Path, path: str, body: dict[str, object]
) -> None:
    """No form of a request hides how many it asks for."""
    async with world(auth=keys(tmp_path, "a:sk-a tpm=1000000"), clock=ManualClock()) as w:
        asked = asyncio.Event()

        async def silent(reply: Reply) -> None:
            asked.set()
            await reply.stall()

        everyone(w, path, silent)
        for engine in w.engines:
            engine.script(silent)
        client = await w.client()
        client.post(path, body, A)
        await asyncio.wait_for(asked.wait(), 30)
        assert 400_000 < 1_000_000 - await left(w) < 410_000, "reserved"
        client.close()
        await until(lambda: w.inflight == 0)
        assert 400_000 < 1_000_000 - await left(w) < 410_000, "paid"


async def test_a_batch_that_one_engine_serves_costs_what_the_engine_reports(tmp_path: Path) -> None:
    """Of each conversation as much as of one alone."""
    async with world(auth=keys(tmp_path, "a:sk-a tpm=1000000000"), clock=ManualClock()) as w:
        usage = {"prompt_tokens": 5000, "completion_tokens": 4_000_000, "total_tokens": 4_005_000}
        everyone(
            w, BATCH, scripts.whole(json.dumps({"id": "x", "choices": [], "usage": usage}).encode())
        )
        body = chat(messages=[TURNS] * 500, max_tokens=8000, echo=True)
        assert (await w.ask(BATCH, body, A)).status == 200
        assert await left(w) == 1_000_000_000 - 4_005_000


@pytest.mark.parametrize(
    "documents", [["x"] * 1500, [{"content": [{"type": "text", "text": "x"}]}] * 300]
)
async def test_a_query_is_paid_with_each_document(tmp_path: Path, documents: list[object]) -> None:
    """An engine may compute it as often. It is reserved, and paid if it is reported."""
    count, query = len(documents), "word " * 4000
    reported = count * 4001
    body = {"model": "tiny", "query": query, "documents": documents}
    whole = json.dumps(
        {"id": "1", "model": "tiny", "usage": {"total_tokens": reported, "prompt_tokens": reported}}
    ).encode()
    async with world(auth=keys(tmp_path, "a:sk-a tpm=100000000"), clock=ManualClock()) as w:
        everyone(w, "/rerank", scripts.whole(whole))
        assert (await w.ask("/rerank", body, A)).status == 200
        assert 100_000_000 - await left(w) == reported
        go_on, before = asyncio.Event(), await left(w)
        everyone(w, "/rerank", scripts.gate(go_on, scripts.whole(whole)))
        asked = asyncio.create_task(w.ask("/rerank", body, A))
        while before - await left(w) < count * len(query) / 4:
            await asyncio.sleep(0.01)
        go_on.set()
        assert (await asked).status == 200


QUERY, TEXTS = json.dumps("word " * 4000), json.dumps(["x"] * 500)
PAIRED = {
    "documents": f'"query": {QUERY}, "documents": {TEXTS}',
    "items": f'"queries": {QUERY}, "items": {TEXTS}',
    "other fields before": f'"text_1": {QUERY}, "text_2": {TEXTS}, "query": "", "documents": []',
    (
        "quotation marks in a list of one"
    ): f'"text_1": [{json.dumps("word " * 4000 + """ "hi" """)}], "text_2": {TEXTS}',
    "white space": f'"query": {QUERY}, "documents": [{" " * (1 << 20)}{TEXTS[1:]}',
    (
        "read in another process"
    ): f'"query": {QUERY}, "documents": {TEXTS}, "pad": {json.dumps(["x"] * 200_000)}',
}


@pytest.mark.parametrize("fields", PAIRED.values(), ids=PAIRED)
async def test_however_a_query_is_written_it_is_paid_with_each_document(
    tmp_path: Path, fields: str
) -> None:
    reported = 500 * 4001
    usage = {"total_tokens": reported, "prompt_tokens": reported}
    whole = scripts.whole(json.dumps({"id": "1", "model": "tiny", "usage": usage}).encode())
    async with world(auth=keys(tmp_path, "a:sk-a tpm=10000"), clock=ManualClock()) as w:
        everyone(w, "/score", whole)
        assert (await w.ask("/score", f'{{"model": "tiny", {fields}}}'.encode(), A)).status == 200
        assert 10_000 - await left(w) == reported


@pytest.mark.parametrize(
    "text", ["plain words " * 100, json.dumps({f"key {i}": f"value {i}" for i in range(60)})]
)
async def test_what_a_query_reserves_depends_on_the_number_of_texts_alone(
    tmp_path: Path, text: str
) -> None:
    """A text of many quotation marks is one text: its client needs no more of its minute for it."""
    go_on, minute, query = asyncio.Event(), 1_000_000, "some words " * 200
    body = {"model": "tiny", "query": query, "documents": [text] * 50}
    async with world(auth=keys(tmp_path, f"a:sk-a tpm={minute}"), clock=ManualClock()) as w:
        everyone(w, "/rerank", scripts.gate(go_on, scripts.whole(b"{}")))
        asked = asyncio.create_task(w.ask("/rerank", body, A))
        await until(lambda: w.inflight == 1)
        size = len(json.dumps(body)) + 49 * len(query)
        assert minute - await left(w) < size / 4 + 100
        go_on.set()
        assert (await asked).status == 200


async def test_a_query_with_many_texts_is_let_in_beside_others(tmp_path: Path) -> None:
    """Engines read a few of its pairs at once: where tokens are limited, nobody waits until all
    other requests are over.
    """
    hold = asyncio.Event()
    body = {"model": "tiny", "query": "q " * 20_000, "documents": ["x"] * 900}
    async with world(
        0, 0, aggregated=2, limits={"max_inflight": 100, "max_inflight_tokens": 4_000_000}
    ) as w:
        for engine in w.aggregated:
            engine.default = scripts.gate(hold, Reply.serve)
        everyone(w, "/rerank", scripts.whole(b"{}"))
        long = asyncio.create_task(w.ask(COMPLETIONS, completion()))
        await until(lambda: w.inflight == 1)
        assert (await w.ask("/rerank", body)).status == 200
        hold.set()
        assert (await long).status == 200


@pytest.mark.parametrize("path", [COMPLETIONS, BATCH])
@pytest.mark.parametrize("split", [0, 1])
async def test_a_wrong_prompt_at_the_end_of_a_list_makes_no_answer_free(
    tmp_path: Path, path: str, split: int
) -> None:
    """Answers that were begun before count, since nobody has seen them; those behind it may be as
    wrong.
    """
    count, at = 4, 2
    prompts = [f"{PROMPT} number {index}" for index in range(count)]
    body = completion(prompt=prompts, max_tokens=2000)
    if path == BATCH:
        body = chat(
            messages=[[{"role": "user", "content": prompt}] for prompt in prompts], max_tokens=2000
        )
    auth, clock = keys(tmp_path, "a:sk-a tpm=1000000"), ManualClock()
    async with world(
        prefill=split, decode=split, aggregated=1 - split, auth=auth, clock=clock
    ) as w:
        answering = w.decode[0] if split else w.engines[0]
        begun = 0
        wrong = scripts.whole(
            json.dumps({"error": {"message": "wrong", "code": 400}}).encode(), 400
        )

        async def answer(reply: Reply) -> None:
            nonlocal begun
            begun += 1
            if b"number %d" % at not in reply.request.body:
                await reply.stall()
            await until(lambda: begun == count)
            await wrong(reply)

        everyone(w, BATCH, wrong)
        answering.script(*[answer] * count)
        assert (await clock.through(w.ask(path, body, A))).status == 400
        await until(lambda: w.inflight == 0)
        assert at * 2000 < 1_000_000 - await left(w) < at * 2000 + 1000


async def test_what_no_engine_worked_on_is_free(tmp_path: Path) -> None:
    """Requests that are wrong, or refused for want of a place."""
    clock = ManualClock()
    async with world(
        auth=keys(tmp_path, "a:sk-a tpm=6000"),
        limits={"max_inflight": 1, "max_queue": 0},
        clock=clock,
    ) as w:
        assert (await w.ask(COMPLETIONS, b"no JSON", A)).status == 400
        assert (
            await w.ask(COMPLETIONS, completion(), [*A, ("x-request-timeout", "0")])
        ).status == 503
        assert await left(w) == 6000


async def test_a_key_in_debt_waits(tmp_path: Path) -> None:
    clock = ManualClock()
    async with world(auth=keys(tmp_path, "a:sk-a tpm=60"), clock=clock) as w:
        long = completion(prompt="word " * 800)
        assert (await w.ask(COMPLETIONS, long, A)).status == 200
        refused = await w.ask(COMPLETIONS, completion(), A)
        assert (refused.status, refused.json["error"]["reason"]) == (429, "key_tokens")
        assert refused.header("retry-after") == "60", (
            "it is longer, but clients ask again once a minute"
        )
        await clock.advance(2000.0)
        assert (await w.ask(COMPLETIONS, completion(), A)).status == 200


async def test_a_file_that_changes_counts_at_once_and_forgets_nothing(tmp_path: Path) -> None:
    auth = keys(tmp_path, "a:sk-a rpm=1")
    clock = ManualClock()
    async with world(auth=auth, clock=clock) as w:
        assert (await w.ask(COMPLETIONS, completion(), A)).status == 200
        renewed(tmp_path / "keys", "a:sk-new rpm=2\nb:sk-b")
        w.look_at_files()
        new = bearer("sk-new")
        assert [(await w.ask(COMPLETIONS, completion(), new)).status for _ in range(2)] == [
            200,
            429,
        ]
        renewed(tmp_path / "keys", "a:sk-new rpm=wrong")
        w.look_at_files()
        assert (await w.ask(COMPLETIONS, completion(), new)).status == 429, (
            "the last good file is in force"
        )
        renewed(tmp_path / "keys", "sk-new")
        w.look_at_files()
        assert (await w.ask(COMPLETIONS, completion(), new)).status == 200


async def test_what_an_engine_refuses_as_wrong_is_free(tmp_path: Path) -> None:
    """It may have asked for a million answers."""
    clock = ManualClock()
    async with world(auth=keys(tmp_path, "a:sk-a tpm=6000"), clock=clock) as w:
        assert (await w.ask(COMPLETIONS, completion(n=1_000_000), A)).status == 400
        assert await left(w) == 6000


LIE = 2**38
LIES = {"prompt_tokens": LIE, "completion_tokens": LIE, "input_tokens": LIE, "output_tokens": LIE}


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, completion(prompt="a")), (MESSAGES, message()), (EMBEDDINGS, {})],
)
@pytest.mark.parametrize("tpm", [2000, 600_000])
async def test_no_engine_locks_a_key_out(
    tmp_path: Path, path: str, body: dict[str, object], tpm: int
) -> None:
    """Whatever it reports: the key waits for minutes, and no counter jumps."""
    clock = ManualClock()
    async with world(auth=keys(tmp_path, f"a:sk-a tpm={tpm}"), clock=clock) as w:
        choice = {"index": 0, "text": "x", "finish_reason": "stop"}
        lies = {
            "id": "x",
            "object": "text_completion",
            "model": "tiny",
            "choices": [choice],
            "usage": LIES,
        }
        if path == COMPLETIONS:
            w.decode[0].script(scripts.whole(json.dumps(lies).encode()))
        else:
            everyone(w, path, scripts.whole(json.dumps({"usage": LIES}).encode()))
        assert (await w.ask(path, body, A)).status == 200
        ended = await w.ended()
        assert -10 * tpm <= await left(w) < 0
        assert w.metric("pdproxy_tenant_tokens_total", tenant="a") < 2**22
        assert (ended.prompt_tokens or 0) + (ended.completion_tokens or 0) < 2**22


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(max_tokens=None)),
        (RESPONSES, responses(max_output_tokens=None, background="off")),
    ],
)
async def test_a_right_of_the_key_bounds_what_is_reserved(
    tmp_path: Path, path: str, body: dict[str, object]
) -> None:
    """A request without a limit gets the key's, and reserves no quarter of the minute then."""
    asked = asyncio.Event()

    async def silent(reply: Reply) -> None:
        asked.set()
        await reply.stall()

    clock = ManualClock()
    async with world(auth=keys(tmp_path, "a:sk-a tpm=60000 max_tokens=100"), clock=clock) as w:
        if path == CHAT:
            w.decode[0].script(silent)
        else:
            everyone(w, path, silent)
        client = await w.client()
        client.post(path, body, A)
        await asyncio.wait_for(asked.wait(), 30)
        assert 60_000 - 100 - len(json.dumps(body)) < await left(w) < 60_000 - 100
        client.close()
        await clock.through(until(lambda: w.events(RequestEnded)), 1.0)


async def test_a_list_of_models_counts_in_the_limits_of_its_key(tmp_path: Path) -> None:
    """Engines are asked for it. Keys without limits, and their own places, are left alone."""
    async with world(
        auth=keys(tmp_path, "a:sk-a rpm=2 inflight=1\nb:sk-b"), clock=ManualClock()
    ) as w:
        answers = [await w.get("/v1/models", A) for _ in range(4)]
        assert [answer.status for answer in answers] == [200, 200, 429, 429]
        assert answers[-1].json["error"]["reason"] == "key_requests"
        assert (await w.ask(COMPLETIONS, completion(), A)).status == 429
        assert [(await w.get("/v1/models", B)).status for _ in range(3)] == [200] * 3
