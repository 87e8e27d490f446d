"""Bodies of real clients get the answer of one simulated engine through the proxy, and are placed
as they are expected to be.
"""

# `python -m tests.clients.record` makes the bodies again.

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from pdproxy.observe.events import HandleEnded, ServedAlone
from tests.clients.bodies import SPLIT, Body, load
from tests.clients.placement import CHAT, COMPLETIONS, MESSAGES, RESPONSES, why_alone
from tests.clients.trim import LONGEST
from tests.differential.alike import difference
from tests.differential.stage import Stage, stage
from tests.fakes.client import exchange, request

BODIES = load()
FACTS = {"max_model_len": 16_384, "reasoning_parser": "deepseek_r1"}


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def both(runner: asyncio.Runner) -> Iterator[Stage]:
    stack = AsyncExitStack()
    yield runner.run(stack.enter_async_context(stage(**FACTS)))  # type: ignore[arg-type]
    runner.run(stack.aclose())


@pytest.mark.parametrize("body", BODIES, ids=str)
def test_a_client_gets_the_answer_of_one_engine(
    runner: asyncio.Runner, both: Stage, body: Body
) -> None:
    runner.run(_compared(both, body))


async def _compared(both: Stage, body: Body) -> None:
    both.forget_caches()
    both.world.forget()
    sent = request(
        "POST",
        body.route,
        json.dumps(body.fitted("tiny", 0)).encode(),
        tuple(body.headers.items()),
    )
    plain, other = await asyncio.gather(
        *(exchange(port, sent) for port in (both.plain.port, both.world.port))
    )
    # which of several answers finds the other ones' blocks is chance
    cached = (body.body.get("n") or 1) == 1
    assert difference(plain, other, cached=cached) == ""
    await both.world.settled()
    reasons = [event.reason for event in both.world.events(ServedAlone)]
    handles = len(both.world.events(HandleEnded))
    if body.route not in SPLIT:
        assert (reasons, handles) == ([], 0)
    elif body.alone:
        assert (reasons, handles) == ([body.alone], 0)
    elif plain.status == 200:
        assert reasons == []
        assert handles
    else:  # the model takes no images: a prefill engine is the first to say so
        assert reasons in ([], ["prefill_refused"]), plain.body


def test_expectations_are_those_of_the_api() -> None:
    """The recorder wrote what stands beside each body; nobody has changed one by hand."""
    assert [one.name for one in BODIES if one.alone != why_alone(one.route, one.body)] == []


def test_bodies_of_every_kind_are_there() -> None:
    """Of each route, streamed and not, with `stream` left out and false; of each agent; no texts of
    a client's own.
    """
    kinds = {(one.route, one.body.get("stream", "absent")) for one in BODIES}
    assert {(route, kind) for route in (CHAT, COMPLETIONS) for kind in (True, "absent")} <= kinds
    assert {(route, kind) for route in (MESSAGES, RESPONSES) for kind in (True, "absent")} <= kinds
    assert (CHAT, False) in kinds
    clients = {client.partition("@")[0] for one in BODIES for client in one.clients}
    assert clients >= {"codex", "claude-code", "qwen-code", "opencode"}
    assert len(clients) >= 14
    texts = [text for one in BODIES for text in _texts(one.body)]
    assert max(len(text) for text in texts if not text.startswith("data:")) <= LONGEST + 20


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
