"""The load, which pdproxy answers itself; a tokenizer's description and scores, which one engine
answers.
"""

from __future__ import annotations

import asyncio

from tests.fakes.engine import Reply
from tests.fakes.passed import asked, everyone
from tests.fakes.world import PROMPT, until, world


async def test_a_tokenizers_description_is_an_engines() -> None:
    """Where the engine's flag allows it; otherwise the engine's own 404. No body is sent, and none
    is needed.
    """
    async with world(facts={"enable_tokenizer_info_endpoint": True}) as w:
        answer = await w.get("/tokenizer_info", [("x-request-id", "mine"), ("traceparent", "00-1")])
        assert (answer.status, answer.json["tokenizer_class"]) == (200, "Tokenizer")
        request = next(
            one for one in w.decode[0].sim.journal.others if one.path == "/tokenizer_info"
        )
        assert answer.json == await w.decode[0].get("/tokenizer_info")
        assert (request.method, request.body, request.header("traceparent")) == ("GET", b"", "00-1")
        assert request.header("content-type") is None
        assert (await w.ask("/tokenizer_info", b"{}")).status == 405
        ended = await w.ended()
        assert (ended.endpoint, ended.outcome) == ("/tokenizer_info", "ok")
    async with world() as w:
        answer = await w.get("/tokenizer_info")
        assert (answer.status, answer.json) == (404, {"detail": "Not Found"})
        assert asked(w.decode[0], "/tokenizer_info") == 1


async def test_a_tokenizers_description_needs_a_key() -> None:
    """As every route that asks an engine."""
    async with world(
        auth={"api_keys": ("ours",)}, facts={"enable_tokenizer_info_endpoint": True}
    ) as w:
        assert (await w.get("/tokenizer_info")).status == 401
        assert (await w.get("/tokenizer_info", [("authorization", "Bearer ours")])).status == 200


async def test_the_load_is_that_of_the_proxy() -> None:
    """Requests of all routes that are in flight, those that wait among them; in vLLM's form,
    without a key.
    """
    go = asyncio.Event()

    async def slow(reply: Reply) -> None:
        await go.wait()
        await reply.whole(b"{}")

    async with world(limits={"max_inflight": 2}, auth={"api_keys": ("one",)}) as w:
        assert (await w.get("/load")).body == b'{"server_load":0}'
        seen = everyone(w, "/pooling", slow)
        key = [("authorization", "Bearer one")]
        asking = [
            asyncio.ensure_future(w.ask("/pooling", {"model": "tiny"}, key)) for _ in range(3)
        ]
        await until(lambda: len(seen) == 2 and w.waiting)
        assert (await w.get("/load")).json == {"server_load": 3}
        assert not any(asked(engine, "/load") for engine in w.engines)
        go.set()
        assert [(await one).status for one in asking] == [200] * 3
        assert (await w.get("/load")).json == {"server_load": 0}


async def test_scores_are_an_engines() -> None:
    """A generating engine's own scores; the items of a request are bounded as prompts are."""
    body = {"model": "tiny", "query": PROMPT, "items": ["yes", "no"], "label_token_ids": [300, 301]}
    async with world(limits={"max_prompts": 2}) as w:
        answer = await w.ask("/generative_scoring", body, [("x-request-id", "r")])
        w.port, port = w.decode[0].port, w.port
        plain = await w.ask("/generative_scoring", body, [("x-request-id", "r")])
        w.port = port
        assert answer.status == 200
        assert len({one["score"] for one in answer.json["data"]}) == 2
        assert {**answer.json, "created": 0} == {**plain.json, "created": 0}
        for items in (["a", "b", "c"], [[1], [2], [3]]):
            refused = await w.ask("/generative_scoring", {**body, "items": items})
            assert (refused.status, refused.json["error"]["param"]) == (400, "items")
