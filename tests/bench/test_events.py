"""A streamed answer's bytes: times of tokens, usage, errors, and what is no such stream."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy_lab.bench.events import MAX_EVENT, BrokenStream, ErrorEvent, EventReader

USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def event(**fields: Any) -> bytes:
    return (
        b"data: "
        + json.dumps({"id": "cmpl-1", "object": "text_completion"} | fields).encode()
        + b"\n\n"
    )


def text(word: str = "a", finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": word, "finish_reason": finish}], usage=None)


def delta(finish: str | None = None, **fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish}])


DONE = b"data: [DONE]\n\n"
ANSWER = text() + text("") + text("b", "length") + event(choices=[], usage=USAGE) + DONE


def fed(content: bytes, size: int | None = None, most: int = 100) -> EventReader:
    """Return a reader that has read the bytes in pieces, the n-th at time n."""
    reader = EventReader(most)
    pieces = (
        [content]
        if size is None
        else [content[at : at + size] for at in range(0, len(content), size)]
    )
    for number, piece in enumerate(pieces):
        reader.feed(piece, float(number))
    return reader


@given(size=st.integers(1, 400))
def test_an_answer_is_read_however_it_is_cut(size: int) -> None:
    for content in (
        ANSWER,
        ANSWER.replace(b"\n", b"\r\n"),
        b": ping\n\n" + ANSWER,
        b"event: x\nid: 1\n" + ANSWER,
    ):
        reader = fed(content, size)
        reader.end()
        assert len(reader.times) == 3
        assert reader.times == sorted(reader.times)
        assert (reader.prompt_tokens, reader.output_tokens, reader.done) == (5, 3, True)


def test_each_event_has_the_time_of_its_last_byte() -> None:
    reader = EventReader(10)
    first, second = text(), text("b")
    reader.feed(first + second[:20], 1.0)
    reader.feed(second[20:-1], 2.0)
    reader.feed(second[-1:], 3.0)
    assert reader.times == [1.0, 3.0]


def test_the_role_of_a_chat_is_no_token() -> None:
    content = (
        delta(role="assistant", content="")
        + delta(content="a")
        + delta(reasoning="b")
        + delta("stop", content="")
    )
    assert len(fed(content).times) == 3
    assert len(fed(delta(role="assistant", content="a")).times) == 1
    assert len(fed(delta(role="assistant", tool_calls=[{"index": 0}])).times) == 1


def test_what_follows_the_end_mark_is_dropped() -> None:
    reader = fed(ANSWER + b"garbage\n\n" + text())
    reader.feed(b"more garbage\n\n", 9.0)
    reader.end()
    assert len(reader.times) == 3


def test_usage_in_every_event_is_taken_from_the_last() -> None:
    content = b"".join(
        event(
            choices=[{"index": 0, "text": "a"}],
            usage={"prompt_tokens": 5, "completion_tokens": number},
        )
        for number in (1, 2)
    )
    reader = fed(content)
    assert (reader.prompt_tokens, reader.output_tokens, len(reader.times)) == (5, 2, 2)


@pytest.mark.parametrize(
    ("details", "cached"),
    [
        ({"cached_tokens": 0}, 0),
        ({"cached_tokens": 4, "audio_tokens": None}, 4),
        ({}, None),
        (None, None),
        ({"cached_tokens": -1}, None),
        ({"cached_tokens": "many"}, None),
        (["x"], None),
    ],
)
def test_cached_tokens_are_what_the_usage_says_or_unknown(
    details: object, cached: int | None
) -> None:
    """Details that can't be read do not break the answer."""
    reader = fed(
        text() + event(choices=[], usage=USAGE | {"prompt_tokens_details": details}) + DONE
    )
    reader.end()
    assert (reader.cached_tokens, reader.prompt_tokens) == (cached, 5)


@pytest.mark.parametrize(
    "content",
    [
        b"data: {\n\n",
        b"data: []\n\n",
        b"data: 1\n\n",
        b"data: " + b"[" * 50_000 + b"\n\n",
        b'data: {"x":' + b"[" * 50_000 + b"\n\n",
        b'data: {"choices":{}}\n\n',
        b'data: {"choices":[1]}\n\n',
        b'data: {"usage":{"completion_tokens":-1}}\n\n',
        b'data: {"usage":{"completion_tokens":1e999}}\n\n',
        b'data: {"usage":{"completion_tokens":99999999999999999999}}\n\n',
        b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n',
        b"<html></html>\n\n",
        b"data: " + b"x" * (MAX_EVENT + 1),
        b"\n".join([b"x"] * MAX_EVENT),
        text() * 5,
    ],
    ids=lambda content: repr(content[:30]),
)
def test_what_is_no_answer_breaks_the_stream(content: bytes) -> None:
    with pytest.raises(BrokenStream) as error:
        fed(content, 60_000, most=4)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (event(error={"message": "out\nof memory", "code": 500}), "out of memory"),
        (event(error={"code": 500}), "an error event"),
        (event(error=["x"]), "an error event"),
        (b'data: {"object": "error", "message": "x"}\n\n', "an error event"),
        (text("", "abort"), "abort"),
    ],
)
def test_an_error_event_is_an_error(content: bytes, says: str) -> None:
    with pytest.raises(ErrorEvent, match=says):
        fed(text() + content)


@pytest.mark.parametrize(
    ("content", "says"), [(text(), "without"), (DONE, "no tokens"), (b"", "without")]
)
def test_an_answer_that_is_not_whole_is_broken(content: bytes, says: str) -> None:
    with pytest.raises(BrokenStream, match=says):
        fed(content).end()


@given(st.binary(max_size=300), st.integers(1, 50))
def test_any_bytes_are_read_or_refused(content: bytes, size: int) -> None:
    says = ""
    try:
        fed(content, size)
    except (BrokenStream, ErrorEvent) as error:
        says = str(error)
    assert "\n" not in says
