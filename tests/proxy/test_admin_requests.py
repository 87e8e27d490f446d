"""Requests that run, as the admin API shows them."""

from __future__ import annotations

import asyncio

import jsonschema
import pytest

from pdproxy.observe import recent
from tests.fakes import answers, scripts
from tests.fakes.admin import admin
from tests.fakes.engine import Reply, serve
from tests.fakes.scripts import WORD
from tests.fakes.tokenizer import Shelf, SimTokenizer
from tests.fakes.world import COMPLETIONS, completion, until, world
from tests.proxy.test_tokenize import always, judged


async def _rest(reply: Reply) -> None:
    await reply.pieces(WORD, answers.DONE)
    await reply.finish()


async def test_requests_that_run() -> None:
    """They come first, the longest-running one at the top, with where they are; at their end they
    are like all others.
    """
    async with world(decode=1, limits={"max_inflight": 2}) as w, admin(w) as api:
        go = asyncio.Event()
        (decode,) = w.decode
        decode.script(scripts.after_word(go, _rest), scripts.gate(go, serve))
        for number in range(3):
            client = await w.client()
            client.post(COMPLETIONS, completion(stream=True), [("X-Request-Id", f"id{number}")])
            if not number:
                await client.head()
                assert await client.piece() == WORD
            await until(lambda: api.running == number + 1)  # noqa: B023 - it is awaited here
        await until(lambda: len(decode.requests) == 2)
        document = (await api.ask("GET", "/openapi.json")).json
        found = await api.get("/requests")
        schema = {
            "components": document["components"],
            **document["components"]["schemas"]["RequestList"],
        }
        jsonschema.validate(found, schema)
        shown = found["requests"]
        assert [(one["id"], one["phase"]) for one in shown] == [
            ("id0", "streaming"),
            ("id1", "working"),
            ("id2", "waiting"),
        ]
        assert {(one["outcome"], one["ended_s"]) for one in shown} == {("running", None)}
        (prompt,) = shown[0]["prompts"]
        assert (prompt["prefill"], prompt["decode"], shown[0]["status"]) == (
            w.prefill[0].url,
            decode.url,
            200,
        )
        assert (
            shown[0]["total_s"]
            >= shown[1]["total_s"]
            >= shown[2]["total_s"]
            >= shown[2]["queue_s"]
            > 0
        )
        assert shown[2]["prompts"] == []
        assert [one["id"] for one in (await api.get("/requests?limit=1"))["requests"]] == ["id0"]
        assert [one["id"] for one in (await api.get("/requests?id=id1"))["requests"]] == ["id1"]
        assert (await api.get("/requests?outcome=ok"))["requests"] == []
        go.set()
        await until(lambda: not api.running)
        assert (await api.get("/requests?outcome=running"))["requests"] == []
        ended = (await api.get("/requests"))["requests"]
        assert sorted(one["id"] for one in ended) == ["id0", "id1", "id2"]
        assert {one["phase"] for one in ended} == {None}


async def test_clients_that_leave_are_no_running_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is what is refused; and no more are shown than are kept of those that have ended."""
    async with world(decode=1) as w, admin(w) as api:
        w.decode[0].script(*[scripts.stall] * 3)
        clients = [await w.client() for _ in range(3)]
        for client in clients:
            client.post(COMPLETIONS, completion())
        await until(lambda: api.running == 3)
        monkeypatch.setattr(recent, "KEPT", 2)
        assert len((await api.get("/requests"))["requests"]) == 2
        for client in clients:
            client.close()
        await until(lambda: not api.running)
        assert (await w.ask(COMPLETIONS, b"{")).status == 400
        assert not api.running
    async with world() as w:
        assert (
            w.proxy.service.lifecycle.running,
            w.proxy.service.passthrough.lifecycle.running,
        ) == (None, None)


async def test_the_time_for_token_ids_is_shown() -> None:
    """Of a prompt that has waited for its ids, also behind a failed attempt; of others none."""
    async with (
        world(adjust=always(), library=Shelf(model=SimTokenizer("chatml"))) as w,
        admin(w) as api,
    ):
        await judged(w)
        w.prefill[0].script(scripts.whole(b"{}", 500))
        assert (await w.ask(COMPLETIONS, completion())).status == 200
        await until(lambda: not api.running)
        (one,) = (await api.get("/requests"))["requests"]
        assert one["prompts"][0]["attempts"] > 1
        assert one["prompts"][0]["tokenize_s"] > 0
    async with world() as w, admin(w) as api:
        await w.ask(COMPLETIONS, completion())
        await until(lambda: not api.running)
        (one,) = (await api.get("/requests"))["requests"]
        assert one["prompts"][0]["tokenize_s"] is None
