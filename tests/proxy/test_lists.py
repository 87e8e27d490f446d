"""A list of prompts: one exchange each, and one answer as a single engine would have given it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy_lab.sim.tokenizer import BuiltInTokenizer
from tests.fakes import answers, scripts
from tests.fakes.engine import Reply, prefill
from tests.fakes.world import COMPLETIONS, PROMPT, completion, world

TEXTS = [PROMPT + "1", PROMPT + "22", PROMPT + "333"]
IDS = [list(range(1, 40 + n)) for n in range(3)]


async def _echo(reply: Reply) -> None:
    """Answer with the prompt's last character, so that choices can be distinguished."""
    ids = reply.engine.ids(reply.request)
    text = f"<{ids[-1]}>"
    if reply.request.kv is not None:
        reply.engine.loaded(reply.request)
    if reply.request.json.get("stream"):
        await reply.start()
        with_usage = "stream_options" in reply.request.json
        await reply.pieces(
            *answers.stream(
                False, len(ids), [text, "!"], with_usage=with_usage, ident=reply.request.ident
            )
        )
        await reply.finish()
    else:
        await reply.whole(answers.whole(False, ids, text + "!", 2, ident=reply.request.ident))


@pytest.mark.parametrize(
    ("prompts", "lengths"),
    [(TEXTS, [len(BuiltInTokenizer().encode(t)) for t in TEXTS]), (IDS, [39, 40, 41])],
)
async def test_a_list_is_merged(prompts: list[Any], lengths: list[int]) -> None:
    """Choices come in the list's order with their index, the usage is the sum, each prompt has a
    handle of its own.
    """
    async with world(prefill=2, decode=2) as w:
        for engine in w.decode:
            engine.default = _echo
        answer = await w.ask(COMPLETIONS, completion(prompt=prompts), [("x-request-id", "r")])
        assert answer.status == 200
        body = answer.json
        last = [p[-1] if isinstance(p, list) else BuiltInTokenizer().encode(p)[-1] for p in prompts]
        assert [(c["index"], c["text"]) for c in body["choices"]] == [
            (n, f"<{last[n]}>!") for n in range(3)
        ]
        assert body["usage"]["prompt_tokens"] == sum(lengths)
        assert body["usage"]["completion_tokens"] == 6
        assert body["usage"]["total_tokens"] == sum(lengths) + 6
        assert body["id"] == "cmpl-r"
        assert list(body) == list(json.loads(answers.whole(False, [1], "", 1))), (
            "the fields of a single engine's answer"
        )
        await w.quiet()
        assert w.books.endings == {"loaded": 3}
        assert sorted(len(r.json["prompt"]) for e in w.decode for r in e.requests) == sorted(
            len(p) for p in prompts
        )
        report = await w.ended()
        assert (len(report.legs), report.prompt_tokens) == (3, sum(lengths))


@pytest.mark.parametrize("stream", [False, True])
async def test_one_prompts_cached_tokens_stand_for_all(stream: bool) -> None:
    """As from one engine: a whole answer has the cached tokens of its last prompt, a stream those
    of its first.
    """
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    prompts = ["first " * 40, "second " * 60, "third " * 90]
    async with world(facts={"enable_prompt_tokens_details": True}) as w:
        for known in prompts:
            for cached in prompts:
                for engine in w.engines:
                    engine.sim.engine._core.pool.forget_all()  # type: ignore[union-attr]
                await w.ask(COMPLETIONS, completion(prompt=cached))
                answer = await w.ask(
                    COMPLETIONS, completion(prompt=[p for p in prompts if p != known], **options)
                )
                merged = json.loads(answer.events[-2][6:]) if stream else answer.json
                found = merged["usage"]["prompt_tokens_details"]["cached_tokens"]
                asked = [p for p in prompts if p != known]
                assert (found > 0) is (cached == asked[0 if stream else -1])


@pytest.mark.parametrize("usage", [True, False])
async def test_a_streamed_list_is_merged(usage: bool) -> None:
    """Each prompt's events carry its index and come in its own order; one usage event, if asked
    for; one end mark.
    """
    async with world(prefill=2, decode=2) as w:
        for engine in w.decode:
            engine.default = _echo
        options = {"stream_options": {"include_usage": True}} if usage else {}
        answer = await w.ask(COMPLETIONS, completion(prompt=TEXTS, stream=True, **options))
        assert answer.ended
        assert answer.events[-1] == answers.DONE
        assert answer.body.count(b"[DONE]") == 1
        chunks = [json.loads(event[6:]) for event in answer.events[:-1]]
        texts = ["", "", ""]
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [f"<{BuiltInTokenizer().encode(text)[-1]}>!" for text in TEXTS]
        with_usage = [chunk for chunk in chunks if chunk.get("usage")]
        if usage:
            assert chunks[-1] is with_usage[0]
            assert chunks[-1]["choices"] == []
            assert chunks[-1]["usage"]["prompt_tokens"] == sum(
                len(BuiltInTokenizer().encode(text)) for text in TEXTS
            )
            assert chunks[-1]["usage"]["completion_tokens"] == 6
        assert len(with_usage) == (1 if usage else 0)
        await w.quiet()
        assert w.books.endings == {"loaded": 3}


async def test_one_prompt_of_a_list_that_is_refused_refuses_the_list() -> None:
    """A prompt that the engines refuse makes the whole answer their 400, as with a single
    engine.
    """

    async def refuse_long(reply: Reply) -> None:
        if reply.request.json["prompt"] == TEXTS[1]:
            await reply.whole(answers.HANDLER_400, 400)
        else:
            await prefill(reply)

    async with world() as w:
        w.prefill[0].default = w.decode[0].default = refuse_long
        answer = await w.ask(COMPLETIONS, completion(prompt=TEXTS))
        assert (answer.status, answer.body) == (400, answers.HANDLER_400)
        await w.quiet()


async def test_one_stream_of_a_list_that_fails_ends_them_all() -> None:
    """An engine that dies in one of the streams: an error event, no end mark, the others' legs
    closed.
    """

    async def die(reply: Reply) -> None:
        await reply.start()
        await reply.piece(scripts.WORD)
        if reply.request.json["prompt"] == TEXTS[1]:
            for other in reply.engine.requests:
                assert not other.left.is_set()
            reply.eof()
        else:
            await reply.stall()

    async with world() as w:
        w.decode[0].default = die
        answer = await w.ask(COMPLETIONS, completion(prompt=TEXTS, stream=True))
        assert answer.status in (200, 502)
        assert b"[DONE]" not in answer.body
        assert b'"error"' in answer.body
        await w.quiet()
        assert len(w.decode[0].requests) >= 2


async def test_short_prompts_of_a_list_go_alone() -> None:
    """The rules hold for each prompt by itself."""
    async with world() as w:
        w.decode[0].default = _echo
        answer = await w.ask(COMPLETIONS, completion(prompt=["short", PROMPT]))
        assert [c["index"] for c in answer.json["choices"]] == [0, 1]
        assert len(w.prefill[0].requests) == 1
        assert w.metric("pdproxy_alone_total", reason="short_prompt") == 1


async def test_a_list_under_a_rule_goes_whole_to_one_engine() -> None:
    """A list with `n: 2` is one engine's work, in one piece."""
    async with world() as w:
        await w.ask(COMPLETIONS, completion(prompt=TEXTS, n=2, temperature=1))
        assert w.decode[0].requests[0].json["prompt"] == TEXTS
        assert len(w.decode[0].requests) == 1
