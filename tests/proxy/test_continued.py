"""A stream whose engine fails after its first data goes on: the client gets the same as without the failure."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.observe.events import StreamContinued
from tests.fakes.client import Answer
from tests.fakes.world import CHAT, COMPLETIONS, World, chat, completion, world

TOKENS = 64
UNBROKEN = {"breaker_failures": 1_000_000}
"""One engine fails again and again here."""


def whole(answer: Answer) -> tuple[str, Any, Any, set[Any], bool]:
    """What a client has in the end: text, finish reason, usage, what all events show, whether the end mark came."""
    text, finish, usage = "", None, None
    shown = set()
    for event in answer.events:
        payload = event.removeprefix(b"data: ").strip()
        if payload == b"[DONE]":
            return text, finish, usage, shown, True
        body = json.loads(payload)
        assert "error" not in body, body
        shown.add((body["id"], body["object"], body["created"], body["model"]))
        usage = body.get("usage") or usage
        for choice in body["choices"]:
            part = choice.get("delta", choice)
            text += part.get("content") or part.get("text") or ""
            finish = choice["finish_reason"] or finish
            assert choice.get("token_ids") is None
    return text, finish, usage, shown, False


async def asked(w: World, path: str, body: dict[str, Any]) -> tuple[str, Any, Any]:
    """Ask, and check that one whole stream came."""
    answer = await w.ask(path, body)
    text, finish, usage, shown, done = whole(answer)
    assert (answer.status, done, answer.ended) == (200, True, True)
    assert len(shown) == 1, "one id, one time"
    return text, finish, usage


async def cut(w: World, fault: str, path: str, body: dict[str, Any]) -> tuple[str, Any, Any]:
    """Ask until the fault has happened to the first engine of an answer, which the others of that answer are spared."""
    engine = (w.decode or w.aggregated or w.anything)[0]
    before = len(w.events(StreamContinued))
    engine.sim.faults.add(fault)
    for _ in range(4):  # until it is this engine's turn
        found = await asked(w, path, body)
        if len(w.events(StreamContinued)) > before:
            return found
    raise AssertionError("the fault has not happened")


@pytest.mark.parametrize("kind", ["text", "chat"])
@pytest.mark.parametrize("split", [True, False], ids=["split", "alone"])
async def test_any_cut(kind: str, split: bool) -> None:
    """Cut behind each event in turn: the same text, finish reason and usage."""
    path, make = (COMPLETIONS, completion) if kind == "text" else (CHAT, chat)
    body = make(stream=True, max_tokens=TOKENS, stream_options={"include_usage": True})
    roles = {"prefill": 1, "decode": 2} if split else {"prefill": 0, "decode": 0, "aggregated": 2}
    async with world(**roles, limits=UNBROKEN) as w:  # type: ignore[arg-type]
        expected = await asked(w, path, body)
        for events in range(1, TOKENS):
            assert await cut(w, f"reset@mid_stream:events={events}", path, body) == expected, events
        assert {event.result for event in w.events(StreamContinued)} == {"continued"}
