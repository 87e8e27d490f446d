"""Streams of real engines beside each other: what a late engine does is no difference, and what a
proxy loses is one.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engines.client import Answer
from tests.engines.compare import differs

STREAM = {"Content-Type": "text/event-stream; charset=utf-8"}
WHOLE = ["Hel", "lo", " ", "", "é", "", "", "漢", "!"]
"""Texts of a stream's events, a token each. Characters of two and three tokens are among them."""


def stream(texts: list[str], **more: Any) -> Answer:
    chunks = [chunk(text, **more) for text in texts] + [chunk("", finish_reason="stop", **more)]
    events = [json.dumps(one) for one in chunks] + ["[DONE]"]
    return Answer(200, STREAM, "".join(f"data: {event}\n\n" for event in events).encode())


def chunk(text: str, finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        **more,
    }


@pytest.mark.parametrize(
    "texts",
    [
        WHOLE,
        ["Hello", " ", "", "é", "", "", "漢", "!"],
        ["Hel", "lo", " ", "é", "", "漢", "!"],
        ["Hel", "lo", " ", "", "é", "漢!"],
        ["Hel", "lo ", "é", "漢", "!"],
    ],
)
def test_a_late_engine_joins_tokens(texts: list[str]) -> None:
    assert differs(stream(WHOLE), stream(texts)) == ""
    assert differs(stream(texts), stream(WHOLE)) == ""


@pytest.mark.parametrize(
    "texts",
    [
        ["Hel", " ", "", "é", "", "", "漢", "!"],  # an event is lost
        ["lo", "Hel", " ", "", "é", "", "", "漢", "!"],  # or at the wrong place
        ["Hel", "lo", " ", "", "é", "", "", "漢"],
        ["Hel", "lo", " ", "", "e", "", "", "漢", "!"],
        ["Hel", "lo", "", " ", "", "é", "", "", "漢", "!"],  # nothing is half of a space
        ["Hel", "lo", " ", "", "é", "", "", "漢", "!", ""],
    ],
)
def test_a_proxy_that_loses_or_adds_something_is_found(texts: list[str]) -> None:
    assert differs(stream(WHOLE), stream(texts))
    assert differs(stream(texts), stream(WHOLE))


def test_two_answers_in_one_stream_are_found() -> None:
    mixed = stream(WHOLE)
    mixed.body = mixed.body.replace(b'"created": 1', b'"created": 2', 1)
    assert "created" in differs(stream(WHOLE), mixed)
