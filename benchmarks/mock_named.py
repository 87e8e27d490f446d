"""The answers of `mock_engine.py` on Responses and Messages, whose events have names."""

from __future__ import annotations

import functools
import json
from typing import Any

RESPONSES, MESSAGES = b"/v1/responses", b"/v1/messages"
_ID = "msg_8d0f1c0f9f6c4b3a"
_PLACE = {"content_index": 0, "item_id": _ID, "output_index": 0}


def _event(name: str, **fields: Any) -> bytes:
    data = json.dumps({**fields, "type": name}, separators=(",", ":"))
    event = f"event: {name}\ndata: {data}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


def _response(status: str, prompt: int, made: int | None, handle: object = None) -> dict[str, Any]:
    usage = {"input_tokens": prompt, "output_tokens": made, "total_tokens": prompt + (made or 0)}
    details = {"input_tokens_details": {"cached_tokens": 0}}
    return {
        "id": "resp_91e491f871e03068",
        "created_at": 1795219866,
        "model": "m",
        "object": "response",
        "output": [],
        "status": status,
        "usage": None if made is None else usage | details,
        "kv_transfer_params": handle,
    }


def _message(prompt: int, made: int, text: str, handle: object = None) -> dict[str, Any]:
    return {
        "id": "chatcmpl-91e491f871e03068",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": text}],
        "model": "m",
        "stop_reason": "max_tokens",
        "usage": {"input_tokens": prompt, "output_tokens": made},
        "kv_transfer_params": handle,
    }


def whole(path: bytes, chunks: int, prompt: int, handle: object) -> dict[str, Any]:
    """Return an answer that is not streamed."""
    if path == MESSAGES:
        return _message(prompt, chunks, " hello" * chunks, handle)
    answer = _response("incomplete", prompt, chunks, handle)
    content = [{"type": "output_text", "text": " hello" * chunks, "annotations": []}]
    answer["output"] = [{"id": _ID, "type": "message", "content": content}]
    if handle is not None:
        tokens = list(range(1000, 1000 + prompt))
        answer["input_messages"] = [{"message": "", "tokens": tokens, "type": "raw"}]
    return answer


@functools.lru_cache(256)
def opening(path: bytes, prompt: int) -> bytes:
    """Return the events before the first token, as HTTP chunks."""
    if path == MESSAGES:
        begun = _message(prompt, 0, "") | {"content": [], "stop_reason": None}
        block = {"type": "text", "text": ""}
        return _event("message_start", message=begun) + _event(
            "content_block_start", index=0, content_block=block
        )
    begun = _response("in_progress", prompt, None)
    names = ("response.created", "response.in_progress")
    first = b"".join(
        _event(name, response=begun, sequence_number=at) for at, name in enumerate(names)
    )
    item = {"id": _ID, "type": "message", "content": []}
    first += _event("response.output_item.added", item=item, output_index=0, sequence_number=2)
    return first + _event("response.content_part.added", **_PLACE, part={}, sequence_number=3)


@functools.cache
def outputs(path: bytes, chunks: int) -> tuple[bytes, ...]:
    """Return the events that carry a stream's output, as HTTP chunks."""
    if path == MESSAGES:
        delta = {"type": "text_delta", "text": " hello"}
        return (_event("content_block_delta", index=0, delta=delta),) * chunks
    return tuple(
        _event(
            "response.output_text.delta",
            content_index=0,
            delta=" hello",
            item_id=_ID,
            logprobs=[],
            output_index=0,
            sequence_number=4 + at,
        )
        for at in range(chunks)
    )


@functools.lru_cache(256)
def ending(path: bytes, chunks: int, prompt: int) -> bytes:
    """Return the events behind the last token, and the end of the body."""
    if path == MESSAGES:
        delta = {"stop_reason": "max_tokens", "stop_sequence": None}
        usage = {"input_tokens": prompt, "output_tokens": chunks}
        last = _event("content_block_stop", index=0)
        last += _event("message_delta", delta=delta, usage=usage) + _event("message_stop")
    else:
        answer = _response("incomplete", prompt, chunks)
        text = " hello" * chunks
        last = _event(
            "response.output_text.done", **_PLACE, text=text, sequence_number=4 + chunks
        ) + _event("response.completed", response=answer, sequence_number=5 + chunks)
    return last + b"0\r\n\r\n"
