"""Requests of Responses and Messages that can be split, and what stands in their answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.fakes.client import Answer
from tests.fakes.passed import MESSAGES, RESPONSES
from tests.fakes.world import PROMPT

ENDS = {
    RESPONSES: (b"response.completed", b"response.incomplete"),
    MESSAGES: (b"message_stop",),
}
"""The names of the last event of a stream."""
_FIRST = {RESPONSES: b"response.created", MESSAGES: b"message_start"}


def body(path: str, **fields: Any) -> dict[str, Any]:
    """A request that can be split."""
    messages = [{"role": "user", "content": PROMPT}]
    own: Mapping[str, Any] = (
        {"input": messages, "max_output_tokens": 4}
        if path == RESPONSES
        else {"messages": messages, "max_tokens": 4}
    )
    return {"model": "tiny", "temperature": 0, **own, **fields}


def parts(event: bytes) -> tuple[bytes, dict[str, Any]]:
    """The name and the data of an event, which must be two lines and nothing else."""
    first, second, *rest = event.split(b"\n")
    assert rest == [b"", b""], event
    assert first.startswith(b"event: ")
    assert second.startswith(b"data: ")
    return first[7:], json.loads(second[6:])


def text_of_events(events: Sequence[bytes]) -> str:
    """The text that a stream has brought so far."""
    found = ""
    for name, data in map(parts, events):
        if name == b"response.output_text.delta":
            found += data["delta"]
        elif name == b"content_block_delta":
            found += data["delta"].get("text", "")
    return found


def text_of(answer: Answer) -> str:
    """The text of a whole answer."""
    (item,) = answer.json.get("output") or [answer.json]
    return "".join(part["text"] for part in item["content"])


def failure(path: str, answer: Answer) -> dict[str, Any] | None:
    """The error event at the end of a stream, None if the stream has ended as it should. All else
    about its events must be as the API says.
    """
    events = [parts(event) for event in answer.events]
    assert answer.body.endswith(b"\n\n"), "half an event"
    *before, (last, data) = events
    if path == RESPONSES:
        numbers = [one["sequence_number"] for _, one in events]
        assert numbers == list(range(len(events)))
    assert all(one["type"] == name.decode() for name, one in events)
    assert not {name for name, _ in before} & {b"error", *ENDS[path]}
    if before:
        assert before[0][0] == _FIRST[path]
    if last == b"error":
        message = data["message"] if path == RESPONSES else data["error"]["message"]
        assert isinstance(message, str)
        assert message
        return data
    assert last in ENDS[path]
    if path == RESPONSES:
        assert data["response"]["output"][0]["content"][0]["text"] == text_of_events(answer.events)
    return None
