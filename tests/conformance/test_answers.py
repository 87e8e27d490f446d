"""Answers are read into one form, whatever form they come in; what is none is said to be none."""

from __future__ import annotations

import msgspec
import pytest

from pdproxy_lab.conformance.answers import InvalidAnswerError, SeenAnswer, Stream, read_whole
from pdproxy_lab.conformance.requests import (
    CHAT,
    COMPLETION,
    make_request,
    salted,
    short_text,
    with_field,
    with_mark,
    without_field,
)

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
SAID = SeenAnswer(
    text="ab",
    ids=(7, 8),
    prompt_ids=(1, 2, 3),
    finish="length",
    prompt_tokens=3,
    completion_tokens=2,
)


def bare(answer: SeenAnswer) -> SeenAnswer:
    """An answer without the names of its fields, which each form has of its own."""
    return msgspec.structs.replace(answer, fields=frozenset())


def read(*events: object) -> SeenAnswer:
    """A stream's lines."""
    stream = Stream()
    for event in events:
        data = event if isinstance(event, bytes) else msgspec.json.encode(event)
        for line in (b"data: " + data + b"\n", b"\n", b": a comment\n"):
            stream.line(line)
    return stream.end()


COUNTED = {"input_tokens": 1, "cache_read_input_tokens": 2, "output_tokens": 2}
RESPONSE = {
    "object": "response",
    "status": "length",
    "output": [
        {"type": "reasoning", "content": [{"text": "a"}]},
        {"type": "message", "content": [{"text": "b"}]},
    ],
    "usage": {"input_tokens": 3, "output_tokens": 2},
}
MESSAGE = {
    "type": "message",
    "content": [{"type": "thinking", "thinking": "a"}, {"type": "text", "text": "b"}],
    "stop_reason": "length",
    "usage": COUNTED,
}


def test_responses_and_messages_read_alike() -> None:
    """Whole and streamed."""
    said = msgspec.structs.replace(SAID, ids=(), prompt_ids=())
    assert bare(read_whole(msgspec.json.encode(RESPONSE))) == said
    assert bare(read_whole(msgspec.json.encode(MESSAGE))) == said
    streamed = msgspec.structs.replace(said, events=2)
    begun = {"type": "response.created", "response": {"status": "in_progress", "usage": None}}
    response = [
        {"type": "response.reasoning_text.delta", "delta": "a"},
        {"type": "response.output_text.delta", "delta": "b"},
        {"type": "response.output_text.done", "text": "b"},
        {"type": "response.completed", "response": RESPONSE},
    ]
    assert bare(read(begun, *response)) == streamed
    message = [
        {"type": "message_start", "message": {"usage": {"input_tokens": 3, "output_tokens": 0}}},
        {"type": "content_block_delta", "delta": {"thinking": "a"}},
        {"type": "content_block_delta", "delta": {"text": "b"}},
        {"type": "message_delta", "delta": {"stop_reason": "length"}, "usage": COUNTED},
        {"type": "message_stop"},
    ]
    assert bare(read(*message)) == streamed
    for events in ([begun, *response[:-1]], message[:-1], [begun, {"type": "error"}]):
        with pytest.raises(InvalidAnswerError):
            read(*events)


def test_all_four_forms_read_alike() -> None:
    choice = {
        "text": "ab",
        "token_ids": [7, 8],
        "prompt_token_ids": [1, 2, 3],
        "finish_reason": "length",
    }
    assert bare(read_whole(msgspec.json.encode({"choices": [choice], "usage": USAGE}))) == SAID
    message = {
        "message": {"content": "b", "reasoning": "a"},
        "token_ids": [7, 8],
        "finish_reason": "length",
    }
    whole = {"choices": [message], "prompt_token_ids": [1, 2, 3], "usage": USAGE}
    assert bare(read_whole(msgspec.json.encode(whole))) == SAID
    end = {"choices": [], "usage": USAGE}
    first = {"text": "a", "token_ids": [7], "prompt_token_ids": [1, 2, 3]}
    streamed = read(
        {"choices": [first]},
        {"choices": [{"text": "b", "token_ids": [8], "finish_reason": "length"}]},
        end,
        b"[DONE]",
    )
    assert streamed.events == 2
    assert bare(msgspec.structs.replace(streamed, events=0)) == SAID
    role = {
        "prompt_token_ids": [1, 2, 3],
        "choices": [{"delta": {"role": "assistant", "content": ""}}],
    }
    deltas = [
        {"choices": [{"delta": {"content": "a"}, "token_ids": [7]}]},
        {"choices": [{"delta": {"content": "b"}, "token_ids": [8], "finish_reason": "length"}]},
    ]
    streamed = read(role, *deltas, end, b"[DONE]")
    assert streamed.events == 2
    assert bare(msgspec.structs.replace(streamed, events=0)) == SAID


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b'{"choices":[]}', b"\xff", b'{"choices":[{"text":"a"}]}']
)
def test_what_is_no_answer(body: bytes) -> None:
    with pytest.raises(InvalidAnswerError):
        read_whole(body)


@pytest.mark.parametrize(
    "events",
    [
        [],
        [b"[DONE]"],
        [{"choices": [{"text": "a", "finish_reason": "length"}]}],
        [{"choices": [{"text": "a"}]}, b"[DONE]"],
        [{"error": {"message": "died"}}, b"[DONE]"],
        [b"{"],
    ],
)
def test_what_is_no_whole_stream(events: list[object]) -> None:
    with pytest.raises(InvalidAnswerError):
        read(*events)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ids": (7, 9)}, "token ids differ from D (from token 1 on)"),
        ({"ids": (7,)}, "token ids differ from D (2 and 1 ids)"),
        ({"text": "ac"}, "text is 'ab', D has 'ac'"),
        ({"finish": "stop"}, "finish_reason is 'length', D has 'stop'"),
        ({"prompt_tokens": 4}, "usage.prompt_tokens is 3, D has 4"),
        ({"completion_tokens": 1}, "usage.completion_tokens is 2, D has 1"),
        ({"prompt_ids": ()}, "prompt_token_ids is (1, 2, 3), D has ()"),
    ],
)
def test_any_difference_is_named(changed: dict[str, object], words: str) -> None:
    assert SAID.differences(msgspec.structs.replace(SAID, **changed), "D") == [words]
    assert SAID.differences(msgspec.structs.replace(SAID, seconds=9.0, events=5), "D") == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_field_that_only_one_of_them_has_is_named(stream: bool) -> None:
    """In whichever event. What has no value is no difference, nor is what depends on what was
    cached.
    """

    def answer(**last: object) -> SeenAnswer:
        first = {"text": "a", "token_ids": [7], "prompt_token_ids": [1, 2, 3]}
        choice = {"index": 0, "text": "b", "token_ids": [8], "finish_reason": "length"}
        ended = {"id": "1", "choices": [choice], "metrics": None, "usage": USAGE, **last}
        return (
            read({"id": "1", "choices": [first]}, ended, b"[DONE]")
            if stream
            else read_whole(msgspec.json.encode(ended))
        )

    plain = answer()
    handle, moved = (
        answer(kv_transfer_params={"remote_host": "a"}),
        answer(usage=USAGE | {"prompt_tokens_details": {"a": 1}}),
    )
    assert handle.differences(plain, "D") == [
        "it has the fields kv_transfer_params, kv_transfer_params.remote_host, D has not"
    ]
    assert plain.differences(answer(service_tier="a"), "D") == [
        "it has no fields service_tier, D has"
    ]
    for other in (answer(kv_transfer_params=None, x=None), moved):
        assert plain.differences(other, "D") == other.differences(plain, "D") == []
    assert plain.differences(answer(kv_transfer_params={}), "D") == [], (
        "an engine alone may show it"
    )


def test_a_question_asked_again_differs_in_its_salt_alone() -> None:
    for shape in (COMPLETION, CHAT):
        asked = make_request(shape, "m", "one: text", "one")
        again = salted(asked, "fresh")
        before, after = msgspec.json.decode(asked.body), msgspec.json.decode(again.body)
        assert after.pop("cache_salt") == "fresh"
        assert before == after
        assert (asked.request_id, again.request_id) == (
            "conformance-one",
            "conformance-alone-fresh",
        )


def test_a_question_is_renewed_by_its_mark_and_a_field_comes_and_goes() -> None:
    for shape in (COMPLETION, CHAT):
        asked = make_request(shape, "m", "one: text", "one")
        other = with_mark(asked, "two")
        assert other.body == make_request(shape, "m", "two: text", "two").body
        assert other.request_id == "conformance-two"
        assert without_field(with_field(asked, "x", {"y": 1}), "x") == asked
        assert msgspec.json.decode(with_field(asked, "x", {"y": 1}).body)["x"] == {"y": 1}


@pytest.mark.parametrize("block", [1, 3, 4, 16, 128])
def test_a_short_text_is_under_a_block_in_bytes_with_special_tokens(block: int) -> None:
    text = short_text("0123456789ab", block, block)
    assert not text or len(text) + 2 < block
