"""How each route tells a client that its request has failed, whole and in a stream: OpenAI's
error, Anthropic's, or a connection that is closed. Pure.

Source: vLLM 0.32.0 and 0.33.0, `entrypoints/anthropic` and `entrypoints/openai/responses`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError

from pdproxy_lab.sim import since
from pdproxy_lab.sim.error_body import error_body, error_event

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
COHERE = "/cohere/v2/chat"
_INTERNAL = "InternalServerError"
INTERNAL = "Internal server error"
"""What is said of KV that did not come."""


class StreamCutError(Exception):
    """A stream of Responses has failed. vLLM's server closes the connection: no event tells of it,
    and the body has no end.
    """


class _Chunk(BaseModel):
    """What vLLM 0.32.0 takes each event of a chat for."""

    model_config = ConfigDict(title="ChatCompletionStreamResponse", protected_namespaces=())

    model: str
    choices: list[Any]


def whole(
    path: str, version: str, message: str, kind: str, status: int, param: str | None = None
) -> dict[str, object]:
    """Return the body of an error that a route answers; `version`: vLLM's."""
    if path == MESSAGES:
        found = since.message_error(version, kind, status)
        return {"type": "error", "error": {"type": found, "message": message}}
    if path == COHERE:
        return of_cohere(message)
    return error_body(message, kind, status, param)


def in_message(version: str, error: dict[str, Any], closing: Sequence[bytes]) -> list[bytes]:
    """Return the last events of a Messages stream whose chat has failed.

    `error`: the chat's error. `closing`: the events that would close the open block. 0.32.0 does
    not close it, and its error is the complaint that the chat's error is no chunk.
    """
    if not since.v033(version):
        return [named("error", error={"type": "internal_error", "message": _complaint(error)})]
    kind = since.message_error(version, error["type"], error["code"])
    return [*closing, named("error", error={"type": kind, "message": error["message"]})]


def of_cohere(message: str, request_id: str | None = None) -> dict[str, object]:
    """Return the body of an error of Cohere's chat."""
    return {"message": message} if request_id is None else {"message": message, "id": request_id}


def in_cohere(version: str, error: dict[str, Any], closing: Sequence[bytes]) -> list[bytes]:
    """Return the last events of a Cohere stream whose chat has failed, without `[DONE]`; arguments
    as for `in_message`.
    """
    text, before = error["message"], closing
    if not since.v033(version):
        # the route takes each error for a bad request, but for KV that did not come
        code = error["code"] if text == INTERNAL else 400
        text, before = _complaint({**error, "code": code}), []
    # written by another encoder than the other events
    ending = {"type": "message-end", "delta": {"error": text, "finish_reason": "ERROR"}}
    return [*before, b"data: %b\n\n" % json.dumps(ending).encode()]


def streamed(
    path: str, version: str, message: str, status: int = 500, *, due: bytes = b""
) -> list[bytes] | None:
    """Return the events with which a route's stream ends behind a failure, without `[DONE]`. None:
    its connection is closed.

    `due`: the event that would have come next; it says whether a block of a message is open.
    """
    if path == RESPONSES:
        return None
    if path == MESSAGES:
        error: Any = error_body(message, _INTERNAL, status)["error"]
        opened = due.startswith(b"event: content_block_delta\n")
        closing = [named("content_block_stop", index=_index(due))] if opened else []
        return in_message(version, error, closing)
    if path == COHERE:
        error = error_body(message, _INTERNAL, status)["error"]
        opened = b'"type":"content-delta"' in due
        return in_cohere(version, error, [_ended(due)] if opened else []) if due else []
    return [error_event(message, status=status)]


def named(kind: str, **fields: Any) -> bytes:
    """Return an event of a Messages stream."""
    data = msgspec.json.encode({"type": kind, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _ended(due: bytes) -> bytes:
    """Return the event that ends the block of a Cohere stream's delta."""
    index = msgspec.json.decode(due.removeprefix(b"data: "))["index"]
    return b"data: %b\n\n" % msgspec.json.encode({"index": index, "type": "content-end"})


def _index(event: bytes) -> int:
    found: int = msgspec.json.decode(event.partition(b"\ndata: ")[2])["index"]
    return found


def _complaint(error: dict[str, Any]) -> str:
    try:
        _Chunk.model_validate_json(msgspec.json.encode({"error": error}))
    except ValidationError as complaint:
        return str(complaint)
    raise AssertionError("an error is no chunk")  # pragma: no cover - it has neither field
