"""An engine that has lost a model: what it listed some seconds ago is no verdict on a request,
another one that has it serves.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdproxy.observe.events import LegFailed
from pdproxy.serving.kv.release import Release
from tests.fakes import several
from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.passed import MESSAGES, RESPONSES, message, responses
from tests.fakes.world import CHAT, CHAT_TEXT, COMPLETIONS, TEXT, World, chat, completion, world

ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (COMPLETIONS, completion()),
    "streamed completion": (COMPLETIONS, completion(stream=True)),
    "chat": (CHAT, chat()),
    "streamed chat": (CHAT, chat(stream=True)),
    "alone": (COMPLETIONS, completion(echo=True)),
    "list": (
        COMPLETIONS,
        completion(prompt=["one two three four " * 20, "five six seven eight " * 20]),
    ),
    "responses": (RESPONSES, responses()),
    "streamed responses": (RESPONSES, responses(stream=True)),
    "messages": (MESSAGES, message()),
    "streamed messages": (MESSAGES, message(stream=True)),
}


@pytest.fixture(autouse=True)
def _released_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without the model does not release KV either. The next one is asked after a third
    of the deadline: not here.
    """
    monkeypatch.setattr(
        Release, "_before_try", lambda release, number: asyncio.sleep(0.05 if number else 0)
    )


def loses(*engines: FakeEngine) -> None:
    """The model was unloaded since the last probe."""
    for engine in engines:
        engine.models = ["other"]


def has_model(w: World, engine: FakeEngine) -> bool:
    return w.proxy.engines[engine.url].in_ledger.serves("tiny")


@pytest.mark.parametrize("ask", ASKS)
async def test_another_decode_engine_that_has_it_serves(ask: str) -> None:
    """The engine is asked once; no client sees its 404."""
    path, body = ASKS[ask]
    async with world(1, 3) as w:
        lost = w.decode[:2]
        loses(*lost)
        for _ in range(12):
            assert (await w.ask(path, body)).status == 200
        assert [has_model(w, engine) for engine in w.decode] == [False, False, True]
        refused = [event for event in w.events(LegFailed) if event.status == 404]
        assert sorted(event.node for event in refused) == sorted(engine.url for engine in lost)
        assert all(event.will_retry for event in refused)


@pytest.mark.parametrize("ask", ["completion", "streamed chat"])
@pytest.mark.parametrize("all_of_them", [False, True])
async def test_a_prefill_engine_that_has_lost_it(ask: str, all_of_them: bool) -> None:
    """Another one makes the KV; without one, a decode engine serves alone."""
    path, body = ASKS[ask]
    async with world(2, 2) as w:
        loses(*(w.prefill if all_of_them else w.prefill[:1]))
        for _ in range(6):
            answer = await w.ask(path, body)
            assert (answer.status, answer.text) == (200, TEXT if path == COMPLETIONS else CHAT_TEXT)
        assert [has_model(w, engine) for engine in w.prefill] == [False, not all_of_them]


@pytest.mark.parametrize("ask", ASKS)
async def test_the_client_gets_404_if_all_refuse(ask: str) -> None:
    """With the engine's own body; more engines than attempts do not keep one that has it from
    serving.
    """
    path, body = ASKS[ask]
    async with world(1, 5) as w:
        loses(*w.engines)
        answer = await w.ask(path, body)
        assert answer.status == 404
        assert b"does not exist" in answer.body
        await w.told()
        assert not any(has_model(w, engine) for engine in w.decode)
    async with world(1, 5) as w:
        loses(*w.decode[:4])
        for _ in range(3):
            assert (await w.ask(path, body)).status == 200


@pytest.mark.parametrize("ask", ["completion", "messages"])
async def test_a_model_that_nobody_lists_is_asked_for_once(ask: str) -> None:
    path, body = ASKS[ask]
    async with world(1, 3) as w:
        assert (await w.ask(path, {**body, "model": "none"})).status == 404
        assert not w.events(LegFailed)


async def test_other_404s_are_the_clients() -> None:
    async with world(1, 2) as w:

        async def not_there(reply: Reply) -> None:
            await reply.whole(b'{"detail":"Not Found"}', 404)

        for engine in w.engines:
            engine.default = not_there
        assert (await w.ask(COMPLETIONS, completion())).status == 404
        assert not w.events(LegFailed)
        assert all(has_model(w, engine) for engine in w.engines)


async def test_a_probe_that_lists_it_again_gives_it_back() -> None:
    async with world(1, 2) as w:
        loses(w.decode[0])
        for _ in range(4):
            await w.ask(COMPLETIONS, completion())
        assert not has_model(w, w.decode[0])
        w.decode[0].models = ["tiny"]
        await w.probe()
        assert has_model(w, w.decode[0])


async def test_workers_know_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "WORKERS", 2)
    async with world(1, 2, leaves=True) as w:
        w.workers[1].pools[0].resources.scheduler.lost_model(w.decode[0].url, "tiny")
        await w.told()
        assert [one.engines[w.decode[0].url].in_ledger.serves("tiny") for one in w.workers] == [
            False,
            False,
        ]
