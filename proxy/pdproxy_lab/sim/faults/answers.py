"""Faults in the content of an answer: cut, invalid, another status, another end."""

from __future__ import annotations

from collections.abc import Mapping
from http.client import responses
from typing import Any

import msgspec

from pdproxy_lab.sim import failed
from pdproxy_lab.sim.faults.kind import FaultError, FaultKind, Occurrence, arguments
from pdproxy_lab.sim.faults.messages import done_of, send_failure, send_stream, send_whole
from pdproxy_lab.sim.faults.moments import ANSWER, BEFORE_HEAD, STREAM, Moment, default_first
from pdproxy_lab.sim.faults.targets import AnswerTarget, Connection
from pdproxy_lab.sim.sse import DONE

NO_HTTP = b"\x16\x03\x01\x02\x00 this is no HTTP \x00\xff\xfe\r\n\r\n"
_NO_JSON = b'{"id":"cmpl-0","object":"text_completion","choices":[{"index":0,"te'
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    429: "RateLimitError",
}


class _HalfChunk(FaultKind):
    name = "half_chunk"
    summary = (
        "half of what is due (an HTTP chunk or a whole body) is sent, then the connection is closed"
    )
    moments = ("mid_stream", "head", "before_first_token", "last_chunk", "before_done")

    async def take_over(self, answer: AnswerTarget, now: Occurrence) -> None:
        if not answer.writer.head_out and answer.start is not None:
            await answer.writer.send(answer.start)
        due = answer.due or {
            "type": "http.response.body",
            "body": b"data: " + _NO_JSON,
            "more_body": True,
        }
        data, _ = await answer.writer.rendered(due)
        await answer.writer.raw(data[: len(data) - len(data) // 2])
        answer.ended()
        answer.connection.close()


class _Garbage(FaultKind):
    name = "garbage"
    summary = (
        "bytes that are no HTTP (what=http; close=true: then the connection is closed) or no "
        "JSON (what=json)"
    )
    moments = default_first("queued", ANSWER)
    args = arguments(what="http", close=False)

    def check(self, at: Moment, args: Mapping[str, Any]) -> None:
        if args["what"] not in ("http", "json"):
            raise FaultError(f"what must be http or json, got {args['what']!r}")
        if args["what"] == "json" and at in ("accept", "after"):
            raise FaultError(f"what = 'json' needs an answer: at = {at!r} has none")

    def on_connection(self, connection: Connection, now: Occurrence) -> bool:
        if now.at == "accept":
            connection.ignore_input()
        connection.write(NO_HTTP)
        if now.args["close"]:
            connection.close()
        return True

    async def take_over(self, answer: AnswerTarget, now: Occurrence) -> None:
        if now.args["what"] == "http":
            await answer.writer.raw(NO_HTTP)
            if now.args["close"]:
                answer.ended()
                answer.connection.close()
        elif answer.streamed:
            await send_stream(answer, b"data: " + _NO_JSON + b"\n\n", done_of(answer))
        elif answer.writer.head_out:  # the length has been sent: the body must have as many bytes
            size = len(_due_body(answer))
            body = (_NO_JSON * (size // len(_NO_JSON) + 1))[:size]
            await answer.writer.send({"type": "http.response.body", "body": body})
            answer.ended()
        else:
            await send_whole(answer, 200, _NO_JSON)


class _Status(FaultKind):
    name = "status"
    summary = "another status with `body` (empty: vLLM's error of that status)"
    moments = BEFORE_HEAD
    args = arguments(status=500, body="", location="/elsewhere")
    replaces = True

    def check(self, at: Moment, args: Mapping[str, Any]) -> None:
        if not 200 <= args["status"] <= 599:
            raise FaultError(f"status must be 200 to 599, got {args['status']}")

    async def take_over(self, answer: AnswerTarget, now: Occurrence) -> None:
        status, body = now.args["status"], now.args["body"].encode()
        headers = []
        if 300 <= status < 400:
            headers.append((b"location", now.args["location"].encode()))
        elif not body:
            phrase = responses.get(status, str(status))
            kind, version = _TYPES.get(status, "InternalServerError"), answer.engine.facts.version
            body = msgspec.json.encode(failed.whole(answer.path, version, phrase, kind, status))
        await send_whole(answer, status, body, *headers)


class _ErrorEvent(FaultKind):
    name = "error_event"
    summary = (
        "an error event, `[DONE]` if `done`, and the stream's regular end; on Responses, as in "
        "vLLM, the connection is closed"
    )
    moments = ("before_first_token", "queued", "prefilling", "handed_over", "head", *STREAM[1:])
    args = arguments(done=True, code=500, message="Internal server error")
    streams = True

    async def take_over(self, answer: AnswerTarget, now: Occurrence) -> None:
        await send_failure(answer, now.args["message"], now.args["code"], done=now.args["done"])


class _TextAfterError(FaultKind):
    name = "text_after_error"
    summary = (
        "an error event, behind it in the same write the due event twice and `[DONE]`, and the "
        "stream's regular end"
    )
    moments = ("mid_stream",)
    streams = True

    async def take_over(self, answer: AnswerTarget, now: Occurrence) -> None:
        await send_failure(answer, "Internal server error", more=2 * _due_body(answer))


class _EmptyBody(FaultKind):
    name = "empty_body"
    summary = "status 200 and a body of no bytes"
    moments = BEFORE_HEAD
    replaces = True

    async def take_over(self, answer: AnswerTarget, now: Occurrence) -> None:
        await send_whole(answer, 200, b"")


class _EmptyStream(FaultKind):
    name = "empty_stream"
    summary = "status 200 and a stream without events (`done`: only `[DONE]`)"
    moments = ("queued", "prefilling", "handed_over", "head")
    args = arguments(done=False)
    streams = True

    async def take_over(self, answer: AnswerTarget, now: Occurrence) -> None:
        await send_stream(answer, done_of(answer) if now.args["done"] else b"")


class _NoDone(FaultKind):
    name = "no_done"
    summary = "the regular end of the chunked body instead of what is due"
    moments = default_first("before_done", STREAM)
    streams = True

    async def take_over(self, answer: AnswerTarget, now: Occurrence) -> None:
        await send_stream(answer)


class _AbortFinish(FaultKind):
    name = "abort_finish"
    summary = (
        'finish_reason "abort" (in a stream with a token) and `[DONE]`: what a terminated vLLM '
        "may send"
    )
    moments = ("mid_stream", "before_first_token", "last_chunk")

    def on_answer(self, answer: AnswerTarget, now: Occurrence) -> bool:
        """On routes without choices the engine ends the request, while it still can."""
        if answer.path not in _OTHERS or now.at == "last_chunk":
            return False
        answer.abort()
        return True

    async def take_over(self, answer: AnswerTarget, now: Occurrence) -> None:
        if answer.path in _OTHERS:
            due = _due_body(answer)
            name, data = due[: due.index(b"{")], due[due.index(b"{") :]
            ending = msgspec.json.encode(_OTHERS[answer.path](msgspec.json.decode(data)))
            if not answer.streamed:
                await send_whole(answer, 200, ending)
                return
            name = name.replace(b".incomplete", b".completed")
            last = failed.named("message_stop") if answer.path == failed.MESSAGES else b""
            await send_stream(answer, name + ending + b"\n\n", last or done_of(answer))
        # vLLM skips events of a choice without any token
        elif answer.streamed and now.at == "before_first_token":
            usage = (
                b"data: " + _only_usage(_due_event(answer)) + b"\n\n"
                if answer.usage_at_end
                else b""
            )
            await send_stream(answer, usage, DONE)
        elif answer.streamed:
            event = _aborted(_due_event(answer))
            await send_stream(answer, b"data: " + event + b"\n\n", DONE)
        else:
            await send_whole(answer, 200, _aborted(_due_body(answer)))


def _aborted_response(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of an aborted response, or of its last event: it is complete."""
    if "response" in body:
        ended = _aborted_response(body["response"])
        return {**body, "response": ended, "type": "response.completed"}
    return {**body, "incomplete_details": None, "status": "completed"}


def _aborted_message(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of an aborted message, or of its `message_delta`: it has no reason."""
    none = {"stop_reason": None, "stop_sequence": None}
    if "delta" in body:
        return {**body, "delta": none}
    return {key: value for key, value in body.items() if key not in none}


def _aborted_cohere(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of an aborted answer of Cohere's, or of its last event: it is complete."""
    if "delta" in body:
        return {**body, "delta": _aborted_cohere(body["delta"])}
    return {**body, "finish_reason": "COMPLETE"}


_OTHERS = {
    failed.RESPONSES: _aborted_response,
    failed.MESSAGES: _aborted_message,
    failed.COHERE: _aborted_cohere,
}
"""The routes whose answers have no choices."""


def _due_body(answer: AnswerTarget) -> bytes:
    assert answer.due is not None
    return bytes(answer.due.get("body", b""))


def _due_event(answer: AnswerTarget) -> bytes:
    return _due_body(answer).removeprefix(b"data: ").strip()


def _only_usage(event: bytes) -> bytes:
    """Return the usage event of a stream without any token."""
    body = msgspec.json.decode(event)
    head = {key: body[key] for key in ("id", "object", "created", "model") if key in body}
    usage = {"prompt_tokens": 1, "total_tokens": 1, "completion_tokens": 0}
    return msgspec.json.encode(head | {"choices": [], "usage": usage})


def _aborted(answer: bytes) -> bytes:
    body = msgspec.json.decode(answer)
    body["choices"] = [_aborted_choice(choice) for choice in body["choices"]]
    return msgspec.json.encode(body)


def _aborted_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice with the finish reason "abort"; keys in vLLM's order."""
    made: dict[str, Any] = {}
    for key, value in choice.items():
        made[key] = value
        if key == "finish_reason":
            made |= {"finish_reason": "abort", "stop_reason": None}
    if "delta" in made:
        made["delta"] = {"content": ""}
    return made


FAMILY: tuple[FaultKind, ...] = (
    _HalfChunk(),
    _Garbage(),
    _Status(),
    _ErrorEvent(),
    _TextAfterError(),
    _EmptyBody(),
    _EmptyStream(),
    _NoDone(),
    _AbortFinish(),
)
