"""Server-sent events as bytes."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.wire import sse
from tests.fakes import answers

ERRORS = (
    answers.error_event(),
    b'data: {"error":{"message":"x"}}\n\n',
    b'data: {"object":"error","message":"x"}\n\n',
    b'data: {"object": "error", "message":"x"}\n\n',
)


@pytest.mark.parametrize("error", ERRORS)
def test_errors_are_found_alone_and_behind_data(error: bytes) -> None:
    """An error event is one wherever it stands in a batch."""
    data = answers.piece(True, "x")
    assert sse.is_error(error)
    assert not sse.is_error(data)
    assert sse.may_be_special(error)
    assert sse.may_be_special(data + error + answers.DONE)
    assert sse.may_be_special(data + error)


@given(st.text(), st.booleans())
def test_data_is_data_whatever_the_text(text: str, chat: bool) -> None:
    """No text of a model makes an event something else, and its index is found."""
    event = answers.piece(chat, text)
    assert not sse.is_error(event)
    assert not sse.is_done(event)
    assert not sse.is_usage_only(event)
    assert not sse.is_role_only(event)
    assert sse.data_lines(event) == [event.removesuffix(b"\n\n")]
    assert event.count(sse.END) == 1
    renamed = json.loads(sse.payload(sse.with_index(event, 7)))
    assert renamed["choices"][0]["index"] == 7
    before = json.loads(sse.payload(event))
    before["choices"][0]["index"] = 7
    assert renamed == before


def test_the_other_kinds() -> None:
    """The end mark, the usage, a chat's opening and a comment are told apart."""
    usage = answers.usage_event(True, 3, 4)
    assert sse.is_usage_only(usage)
    assert sse.may_be_special(usage)
    assert sse.is_done(answers.DONE)
    assert sse.may_be_special(answers.piece(False, "x") + answers.DONE)
    assert sse.is_role_only(answers.role())
    assert sse.data_lines(b": ping\n\n") == []
    assert sse.data_lines(b":x\nevent: y\ndata:{}\n\n") == [b"data: {}"]
    assert sse.is_regular(b"data: 1\n\ndata: 2\n\n")
    for odd in (
        b"\ndata: 1\n\n",
        b"data: 1\n\n\ndata: 2\n\n",
        b": x\n\n",
        b"data:1\n\n",
        b"data: 1\r\n\n",
        b"data: 1\nx\n\n",
    ):
        assert not sse.is_regular(odd)
        assert sse.may_be_special(odd)
    assert not sse.may_be_special(answers.piece(False, "x") + answers.role())
    assert sse.payload(sse.data(b"{}")) == b"{}"


@pytest.mark.parametrize("chat", [False, True])
def test_the_fingerprint_goes_from_the_usage_event_to_the_finish(chat: bool) -> None:
    """A finish is told from other events; it gets the usage event's fingerprint as its last field,
    and never a second one.
    """
    finish, usage = answers.piece(chat, "x", finish="stop"), answers.usage_event(chat, 3, 4)
    assert sse.is_last_of_choice(finish)
    assert sse.may_be_special(answers.piece(chat, "x") + finish)
    assert not sse.is_last_of_choice(answers.piece(chat, '"finish_reason":"stop"'))
    made = sse.with_fingerprint(finish, usage)
    assert made.endswith(b"}" + sse.END)
    assert json.loads(sse.payload(made)) == {
        **json.loads(sse.payload(finish)),
        "system_fingerprint": answers.FINGERPRINT,
    }
    assert sse.with_fingerprint(made, usage) == made
    assert sse.with_fingerprint(finish, usage.replace(b"system_fingerprint", b"other")) == finish
    behind = usage.replace(b"}" + sse.END, b',"x":1}' + sse.END)
    assert sse.with_fingerprint(finish, behind) == made


def test_the_time_of_creation() -> None:
    """It is read and replaced wherever it stands, and left alone where there is none."""
    event = answers.piece(False, '"created":1,')
    assert sse.created_of(event) == b"%d" % answers.CREATED
    assert json.loads(sse.payload(sse.with_created(event, b"7"))) == {
        **json.loads(sse.payload(event)),
        "created": 7,
    }
    assert sse.created_of(b'data: {"x":1}\n\n') is None
    assert sse.with_created(b'data: {"x":1}\n\n', b"7") == b'data: {"x":1}\n\n'


_OLD = re.compile(rb'("(?:[^"\\]|\\.)*")|[ \t]+')


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=8),
    lambda one: st.lists(one) | st.dictionaries(st.text(max_size=8), one),
)


@given(JSON)
def test_compaction_changes_no_string(value: object) -> None:
    """Whatever is escaped in strings, only what stands between them loses its spaces."""
    line = b'data: {"id": ' + json.dumps(value, ensure_ascii=False).encode() + b"}"
    assert sse.compact(line) == b"data: " + _OLD.sub(rb"\1", line[6:])


@pytest.mark.parametrize("filler", [b'"' * 6000, b"x" * 300_000])
def test_what_would_take_long_to_compact_is_left_as_it_is(filler: bytes) -> None:
    """A line of quotes, and a very long one: neither is an event that has to be known."""
    line = b'data: {"id": "c", "x": "' + filler + b'"}'
    assert sse.compact(line) is line or sse.compact(line) == line


@pytest.mark.parametrize("crumb", [b"\n", b":\n\n", b": ping\n\n", b"data: x\n\n", b"data:\n"])
def test_crumbs(crumb: bytes) -> None:
    """Many lines with nothing in them are no engine's; some are, and events of the shortest kind
    are.
    """
    assert sse.has_tiny_lines(crumb * 2000)
    assert not sse.has_tiny_lines(crumb * 200)
    assert not sse.has_tiny_lines(answers.piece(False, "") * 2000)
    assert not sse.has_tiny_lines(answers.DONE)


EVENTS = st.lists(
    st.sampled_from(
        [
            answers.role(),
            answers.piece(True, "a"),
            answers.piece(True, 'é "finish_reason":"stop"'),
            answers.piece(True, "b", finish="stop"),
            answers.usage_event(True, 3, 4),
            answers.DONE,
            b": ping\n\n",
            *ERRORS,
        ]
    ),
    max_size=6,
)


@given(EVENTS)
def test_what_is_plain_at_the_beginning_is_found_at_once(events: list[bytes]) -> None:
    """Nothing of that is special, not even alone; it goes to the first end of a choice if nothing
    else is in front of that.
    """
    batch = b"".join(events)
    size = sse.plain_size(batch)
    plain = batch[:size].split(sse.END)[:-1]
    assert [event + sse.END for event in plain] == events[: len(plain)]
    assert not any(sse.may_be_special(event + sse.END) for event in plain)
    ended = next((at for at, event in enumerate(events) if sse.is_last_of_choice(event)), None)
    before = events[:ended]
    expected = 0 if not before or any(map(sse.may_be_special, before)) else len(before)
    assert len(plain) == expected


@given(st.lists(st.sampled_from([b"a", b"\n", b"\n\n", b"123,"]), max_size=12).map(b"".join))
def test_the_ends_of_events_are_found_by_one_byte_first(read: bytes) -> None:
    """As a search for the two bytes finds them."""
    assert sse.has_end(read) == (sse.END in read)
    end = read.rfind(sse.END)
    assert sse.whole_size(read) == (end + len(sse.END) if end >= 0 else 0)
