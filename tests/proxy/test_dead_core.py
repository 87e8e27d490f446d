"""An engine that says that its core has died is down at once: the next request must not find that
out again.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.observe.events import LegFailed, NodeChanged
from pdproxy_lab.sim.error_body import error_body
from tests.fakes.engine import Reply
from tests.fakes.world import COMPLETIONS, PROMPT, TEXT, World, completion, world

VERSIONS = ["0.32.0", "0.33.0"]
DEAD = {
    "0.32.0": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    "0.33.0": "The server had an error while processing your request.",
}
"""What an engine says by its version of vLLM."""


def down(w: World) -> list[str]:
    """The engines that get no requests from one worker."""
    return sorted(
        {
            engine.url
            for one in w.workers
            for engine in one.ledger.engines
            if engine.down_because is not None
        }
    )


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_first_answer_of_a_dead_core_takes_the_engine_out(
    role: str, stream: bool, version: str
) -> None:
    """One request finds it out, and is served by another engine; the next ones do not try it."""
    # the last one of a role would not be risked
    async with world(3, 3, leaves=True, facts={"version": version}) as w:
        for engine in w.prefill if role == "prefill" else w.decode:
            engine.sim.faults.add("dead_core@queued")
            break
        for _ in range(4):
            answer = await w.ask(COMPLETIONS, completion(stream=stream))
            assert (answer.status, answer.text) == (200, TEXT)
        (failed,) = w.events(LegFailed)
        assert down(w) == [failed.node]
        assert [event.reason for event in w.events(NodeChanged) if not event.up] == [
            "its engine core has died"
        ]


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_stream_that_ends_with_it_takes_the_engine_out(version: str) -> None:
    """The error event says so."""
    async with world(1, 1, leaves=True, facts={"version": version}) as w:
        w.decode[0].sim.faults.add("dead_core@mid_stream")
        answer = await w.ask(COMPLETIONS, completion(stream=True, max_tokens=12))
        assert DEAD[version] in answer.body.decode()
        assert down(w) == [w.decode[0].url]


@pytest.mark.parametrize("version", VERSIONS)
async def test_an_engine_that_only_says_so_is_up_again_at_its_probe(version: str) -> None:
    """The probe comes at once, and decides."""

    async def says(reply: Reply) -> None:
        await reply.whole(
            json.dumps(error_body(DEAD[version], "InternalServerError", 500)).encode(), 500
        )

    async with world(1, 2) as w:
        for engine in w.decode:
            engine.script(says)
        assert (await w.ask(COMPLETIONS, completion())).status == 503
        assert len(down(w)) == 2
        await w.probe()
        assert down(w) == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("body", [{"echo": True, "max_tokens": 1}, {}])
async def test_a_text_that_quotes_it_does_nothing(body: dict[str, Any], version: str) -> None:
    """Neither a prompt nor an answer is an error of the engine."""
    async with world(1, 1) as w:
        answer = await w.ask(COMPLETIONS, completion(prompt=f"{DEAD[version]} {PROMPT}", **body))
        assert answer.status == 200
        assert down(w) == []
