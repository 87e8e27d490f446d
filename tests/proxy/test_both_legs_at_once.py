"""Both engines are asked at once, and the prefill engine answers while the decode engine's answer
is processed.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdproxy.observe.events import HandleEnded
from pdproxy.serving.dispatch.decode_leg import DecodeLeg
from pdproxy_lab.sim.faults.book import PlannedFault
from pdproxy_lab.sim.reply import ScriptedReply
from tests.fakes.pool import pool
from tests.proxy.test_both_legs import PUSH, fails, known
from tests.proxy.test_both_legs_races import completed
from tests.proxy.test_connectors import COMPLETIONS, bare, completion, events


@pytest.mark.parametrize(
    "fields", [{}, {"stream": True, "max_tokens": 1, "stream_options": {"include_usage": True}}]
)
async def test_counts_of_an_answer_that_comes_while_the_decode_engines_is_processed(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode engine's answer was read before the prefill engine's, and goes to the client
    behind it.
    """

    first_data = DecodeLeg._first_data

    async def processed_later(leg: DecodeLeg) -> Any:
        got = await first_data(leg)
        await asyncio.sleep(0.3)
        return got

    async with pool(PUSH, everybody={"enable_prompt_tokens_details": True}) as pair:
        await known(pair)
        pair.p.faults.add(PlannedFault(kind="slow", at="head", args={"delay": 0.1}))
        monkeypatch.setattr(DecodeLeg, "_first_data", processed_later)
        ours = await pair.ask(COMPLETIONS, completion(**fields))
        theirs = await pair.asked_plain(COMPLETIONS, completion(**fields))
        assert events(ours.body) == events(theirs.body)
        assert bare(ours.json if not fields else {}) == bare(theirs.json if not fields else {})


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prefill_that_fails_while_the_decode_engines_answer_is_processed(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode engine had its KV, or needed none: its answer is the client's, and nothing is
    stuck.
    """
    answered = asyncio.Event()

    first_data = DecodeLeg._first_data

    async def processed_later(leg: DecodeLeg) -> Any:
        got = await first_data(leg)
        answered.set()
        await asyncio.sleep(0.3)
        return got

    async def fails_then(reply: ScriptedReply) -> None:
        await answered.wait()
        await fails()(reply)

    async def says(reply: ScriptedReply) -> None:
        if not stream:
            await reply.whole(completed(3))
            return
        await reply.start()
        choice = b'{"id":"cmpl-x","choices":[{"index":0,"text":"a","finish_reason":"length"}]}'
        await reply.pieces(b"data: %b\n\ndata: [DONE]\n\n" % choice)
        await reply.finish()

    async with pool(PUSH) as pair:
        await known(pair)
        pair.p.faults.script(fails_then, fails_then)
        pair.d.faults.script(says)
        monkeypatch.setattr(DecodeLeg, "_first_data", processed_later)
        assert (await pair.ask(COMPLETIONS, completion(stream=stream))).text == "a"
        await pair.world.quiet()
        assert [event.end for event in pair.world.events(HandleEnded)] == ["loaded"]
        assert pair.world.metric("pdproxy_kv_stuck") == 0
