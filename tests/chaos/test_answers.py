"""Reading and judging what a client was told: what is right passes, and each way of being wrong is
seen.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.chaos.access import Refusals
from tests.chaos.answers import Answer, MalformedError, Told, read_answer, told
from tests.chaos.oracle import MESSAGES, RESPONSES, Body, judge

RIGHT = Told({0: "one two"}, {0: "length"}, (3, 2, 5))
ERROR = {"message": "m", "type": "t", "param": None, "code": 502}


def event(text: str = "", end: str | None = None, **more: object) -> str:
    choice = {"index": 0, "text": text, "finish_reason": end}
    return "data: " + json.dumps({"choices": [choice], **more}) + "\n\n"


USAGE = (
    'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": '
    "5}}\n\n"
)
DONE = "data: [DONE]\n\n"
FAILED = "data: " + json.dumps({"error": ERROR}) + "\n\n"
GOOD = event("one") + event(" two", "length") + USAGE + DONE


def streamed(body: str) -> tuple[str, str]:
    answer = Answer(
        200, "text/event-stream; charset=utf-8", False, "", bytearray(body.encode()), True
    )
    return judge(answer, Body("/v1/completions", {"stream": True}, RIGHT))


def whole(
    body: object, status: int = 200, allowed: Refusals = frozenset(), again: str = ""
) -> tuple[str, str]:
    answer = Answer(
        status, "application/json", False, again, bytearray(json.dumps(body).encode()), True
    )
    return judge(answer, Body("/v1/completions", {}, RIGHT), allowed)


def test_right_answers() -> None:
    assert streamed(GOOD) == ("right", "")
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert whole(
        {"choices": [{"index": 0, "text": "one two", "finish_reason": "length"}], "usage": usage}
    ) == (
        "right",
        "",
    )
    chat = {
        "choices": [{"index": 0, "message": {"content": "one two"}, "finish_reason": "length"}],
        "usage": usage,
    }
    assert whole(chat) == ("right", "")


MESSAGE = {
    "type": "message",
    "content": [{"type": "text", "text": "one two"}],
    "stop_reason": "length",
    "usage": {"input_tokens": 1, "cache_read_input_tokens": 2, "output_tokens": 2},
}
RESPONSE = {
    "object": "response",
    "output": [{"content": [{"type": "output_text", "text": "one two"}]}],
    "status": "length",
    "usage": {"input_tokens": 3, "output_tokens": 2},
    "error": None,
}
CUT = {**RESPONSE, "status": "completed", "usage": {"input_tokens": 3, "output_tokens": 1}}
CUT["output"] = [{"content": [{"type": "output_text", "text": "one"}]}]


def named(kind: str, **fields: object) -> str:
    """One event of a stream of named events."""
    return f"event: {kind}\ndata: " + json.dumps({"type": kind, **fields}) + "\n\n"


def of_response(*kinds: str, first: int = 0, response: object = RESPONSE) -> str:
    """Events of a response with numbers that follow each other."""
    own: dict[str, dict[str, object]] = {
        "one": {"kind": "response.output_text.delta", "delta": "one"},
        "two": {"kind": "response.output_text.delta", "delta": " two"},
        "end": {"kind": "response.completed", "response": response},
        "error": {"kind": "error", "message": "m", "code": "c"},
    }
    return "".join(
        named(**own[kind], sequence_number=number)  # type: ignore[arg-type]
        for number, kind in enumerate(kinds, first)
    )


def of_message(*kinds: str) -> str:
    """Events of a message."""
    own: dict[str, str] = {
        "one": named("content_block_delta", delta={"text": "one"}),
        "two": named("content_block_delta", delta={"text": " two"}),
        "delta": named("message_delta", delta={"stop_reason": "length"}, usage=MESSAGE["usage"]),
        "stop": named("message_stop"),
        "error": named("error", error={"type": "t", "message": "m"}),
    }
    return "".join(own[kind] for kind in kinds)


RIGHT_RESPONSE = Told({0: "one two"}, {0: "incomplete"}, (3, 2, 5))


@pytest.mark.parametrize(
    ("path", "body", "how"),
    [
        (RESPONSES, of_response("one", "two", "end"), "right"),
        (
            RESPONSES,
            of_response("one") + ": alive\n\n" + of_response("two", "end", first=1),
            "right",
        ),
        (RESPONSES, of_response("one", "error"), "error"),
        (RESPONSES, of_response("one", "end"), "wrong"),
        (RESPONSES, of_response("one", "two"), "wrong"),
        (RESPONSES, of_response("one", "one", "end"), "wrong"),
        (RESPONSES, of_response("two", "error"), "wrong"),
        (RESPONSES, of_response("one", "two", "end", first=1), "wrong"),
        (RESPONSES, of_response("one") + of_response("error", first=2), "wrong"),
        (RESPONSES, of_response("one", "two", "end", "end"), "wrong"),
        (RESPONSES, of_response("one", "two", "end", "error"), "wrong"),
        (RESPONSES, of_response("one", "two", "end")[:-1], "wrong"),
        (RESPONSES, of_response("one", "end", response=CUT), "right"),
        (RESPONSES, of_response("two", "end", response=CUT), "wrong"),
        (MESSAGES, of_message("one", "two", "delta", "stop"), "right"),
        (MESSAGES, ": alive\n\n" + of_message("one", "two", "delta", "stop"), "right"),
        (MESSAGES, of_message("one", "error"), "error"),
        (MESSAGES, of_message("one", "two", "delta"), "wrong"),
        (MESSAGES, of_message("one", "delta", "stop"), "wrong"),
        (MESSAGES, of_message("one", "two", "stop"), "wrong"),
        (MESSAGES, of_message("one", "two", "delta", "stop", "stop"), "wrong"),
        (MESSAGES, of_message("one", "two", "delta", "stop") + "data: [DONE]\n\n", "wrong"),
    ],
)
def test_streams_of_named_events(path: str, body: str, how: str) -> None:
    """Their ends, their numbers and their texts; an engine may give a response up unseen."""
    answer = Answer(200, "text/event-stream", False, "", bytearray(body.encode()), True)
    # the status of these responses is that of a choice but where one was given up
    right = RIGHT if '"completed"' not in body else RIGHT_RESPONSE
    assert judge(answer, Body(path, {"stream": True}, right))[0] == how


@pytest.mark.parametrize(
    ("path", "body", "status", "how"),
    [
        (MESSAGES, MESSAGE, 200, "right"),
        (MESSAGES, {**MESSAGE, "stop_reason": "end_turn"}, 200, "wrong"),
        (MESSAGES, {"type": "error", "error": {"type": "t", "message": "m"}}, 503, "error"),
        (MESSAGES, {"type": "error", "error": {"type": "t", "message": "m"}}, 429, "error"),
        (MESSAGES, {"type": "error", "error": {"type": "t", "message": "m"}}, 401, "wrong"),
        (MESSAGES, {"type": "error", "error": {"type": "t"}}, 503, "wrong"),
        (RESPONSES, RESPONSE, 200, "right"),
        (RESPONSES, {"error": ERROR}, 502, "error"),
        (RESPONSES, {"error": {"message": "m"}}, 502, "wrong"),
    ],
)
def test_whole_responses_and_messages(path: str, body: object, status: int, how: str) -> None:
    """And their errors: those of messages have no place for a reason."""
    content = bytearray(json.dumps(body).encode())
    answer = Answer(status, "application/json", False, "", content, True)
    caused = frozenset({(429, "key_requests")})
    assert judge(answer, Body(path, {}, RIGHT), caused)[0] == how


@pytest.mark.parametrize("stream", [True, False])
def test_a_response_without_text_has_no_item(stream: bool) -> None:
    """The few tokens of a short answer may make none."""
    silent = {**RESPONSE, "output": []}
    body, kind = json.dumps(silent), "application/json"
    if stream:
        body, kind = of_response("end", response=silent), "text/event-stream"
    answer = Answer(200, kind, False, "", bytearray(body.encode()), True)
    assert told(answer) == Told({0: ""}, {0: "length"}, (3, 2, 5))
    assert judge(answer, Body(RESPONSES, {"stream": stream}, RIGHT))[0] == "wrong"


def test_a_response_has_one_item_at_most() -> None:
    twice = {**RESPONSE, "output": RESPONSE["output"] * 2}  # type: ignore[operator]
    body = bytearray(json.dumps(twice).encode())
    with pytest.raises(MalformedError, match="2 items"):
        told(Answer(200, "application/json", False, "", body, True))


def test_well_formed_errors() -> None:
    assert streamed(event("one") + FAILED) == ("error", "event 502")
    assert streamed(event("one") + FAILED + DONE) == ("error", "event 502")
    assert whole({"error": {**ERROR, "reason": "queue_full"}}, 503, again="7") == (
        "error",
        "503 queue_full",
    )
    assert whole({"error": ERROR}, 408, frozenset({(408, "")})) == ("error", "408")
    late = {"error": {**ERROR, "reason": "deadline"}}
    assert whole(late, 503, frozenset({(503, "deadline")}), again="1") == ("error", "503 deadline")


@pytest.mark.parametrize(
    "body",
    [
        event("one") + event(" two", "length") + DONE,  # no usage
        event("one") + event("one") + event(" two", "length") + USAGE + DONE,  # repeated
        event(" two", "length") + USAGE + DONE,  # lost
        event("one two", "stop") + USAGE + DONE,
        event("one two") + USAGE + DONE,  # no finish reason
        GOOD + DONE,
        GOOD[:-1],
        event("one") + event(" two", "length") + USAGE,  # no end
        event("one two", "length") + event("x") + USAGE + DONE,
        event("one", "length") + event(" two", "length") + USAGE + DONE,
        event("two") + FAILED,  # wrong before the error
        FAILED + event("one"),
        'data: {"error": {"message": "m"}}\n\n',
        "data: {no json}\n\n" + DONE,
        "data: 1\n\n" + DONE,
        "event: x\n\n" + DONE,
        "",
        DONE,
        event("one two", "length").replace('"index": 0', '"index": 1') + GOOD,
    ],
)
def test_wrong_streams(body: str) -> None:
    assert streamed(body)[0] == "wrong"


def test_wrong_bodies() -> None:
    assert whole({"error": ERROR})[0] == "wrong", "an error with status 200"
    assert whole({"error": ERROR}, 400)[0] == "wrong", "the request was good"
    assert whole({"error": ERROR}, 408)[0] == "wrong"
    assert whole({"detail": "x"}, 500)[0] == "wrong"
    assert whole([], 500)[0] == "wrong"
    late = {"error": {**ERROR, "reason": "deadline"}}
    assert whole(late, 503, again="1")[0] == "wrong", "it had no deadline"
    assert whole({"error": {**ERROR, "reason": "share"}}, 429, again="1")[0] == "wrong"


@pytest.mark.parametrize("again", ["", "0", "61", "-1", "soon"])
def test_refusals_say_when_to_come_again(again: str) -> None:
    assert whole({"error": {**ERROR, "reason": "queue_full"}}, 503, again=again)[0] == "wrong"


def _read(data: bytes) -> Answer:
    async def main() -> Answer:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        answer = Answer()
        await read_answer(reader, answer)
        return answer

    return asyncio.run(main())


def test_http_is_read() -> None:
    answer = _read(
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nconnection: close\r\ncontent-type: a/b\r\n\r\nabc"
    )
    assert (answer.status, bytes(answer.body), answer.closes, answer.content_type) == (
        200,
        b"abc",
        True,
        "a/b",
    )
    answer = _read(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )
    assert bytes(answer.body) == b"abcde"
    assert answer.complete


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nab", EOFError),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", EOFError),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabcXY0\r\n\r\n",
            MalformedError,
        ),
        (b"HTTP/1.1 200 OK\r\n\r\nabc", MalformedError),
        (b"nonsense\r\n\r\n", MalformedError),
        (b"", EOFError),
    ],
)
def test_answers_that_break_off_or_are_no_http(data: bytes, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        _read(data)


def test_told_keeps_choices_apart() -> None:
    body = event("a") + event("b").replace('"index": 0', '"index": 1') + event("c", "stop") + DONE
    answer = Answer(200, "text/event-stream", False, "", bytearray(body.encode()), True)
    assert told(answer) == Told({0: "ac", 1: "b"}, {0: "stop"})
