"""An answer says on request where its time went, and does so without an engine's name."""

from __future__ import annotations

import re

import pytest

from tests.fakes import scripts
from tests.fakes.client import Answer
from tests.fakes.clock import ManualClock
from tests.fakes.engine import Reply, serve
from tests.fakes.world import COMPLETIONS, completion, world

WANTED = [("X-PDProxy-Timing", "1")]


def timing(answer: Answer) -> dict[str, float]:
    """The milliseconds of the header by their names."""
    found = answer.header("server-timing") or ""
    return {name: float(value) for name, value in re.findall(r"(\w+);dur=([0-9.]+)", found)}


async def test_whole_answers_streams_and_errors() -> None:
    """A stream has what was over when it began; what was not asked for has none."""
    clock = ManualClock()
    async with world(decode=1, clock=clock) as w:

        async def slow(reply: Reply) -> None:
            await clock.advance(0.25)
            await serve(reply)

        (prefill,), (decode,) = w.prefill, w.decode
        prefill.script(slow)
        found = timing(await w.ask(COMPLETIONS, completion(), WANTED))
        assert list(found) == ["queue", "prefill", "decode_whole", "total"]
        assert found["prefill"] == 250.0
        assert found["total"] >= 250.0
        decode.script(slow)
        found = timing(await w.ask(COMPLETIONS, completion(stream=True), WANTED))
        assert list(found) == ["queue", "prefill", "kv", "total"]
        assert found["kv"] == 250.0
        decode.script(scripts.whole(b'{"error": {"message": "no", "code": 400}}', 400))
        refused = await w.ask(COMPLETIONS, completion(), WANTED)
        assert refused.status == 400
        assert {"queue", "total"} <= set(timing(refused))
        for headers in ([], [("X-PDProxy-Timing", "0")]):
            answer = await w.ask(COMPLETIONS, completion(), headers)
            assert answer.header("server-timing") is None
        for engine in w.engines:
            assert not [
                name for one in engine.requests for name in one.headers if "pdproxy" in str(name)
            ]


@pytest.mark.parametrize("value", ["2", "yes", ""])
async def test_a_hostile_wish_is_refused(value: str) -> None:
    async with world() as w:
        answer = await w.ask(COMPLETIONS, completion(), [("X-PDProxy-Timing", value)])
        assert answer.status == 400
        assert answer.json["error"]["param"] == "X-PDProxy-Timing"
