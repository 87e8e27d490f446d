"""The bodies that vLLM 0.32.0 answers with, byte for byte in the shape of the recorded ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

CREATED = 1795219866
FINGERPRINT = "vllm-0.32.0-e7581fe7"
DONE = b"data: [DONE]\n\n"
WORDS = (" tz", "CF", "object", "list", "xcent", ").", "__p", "write")


def compact(value: object) -> bytes:
    """JSON as vLLM writes it: without spaces."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def event(value: object) -> bytes:
    """A server-sent event of a JSON value."""
    return b"data: " + compact(value) + b"\n\n"


def usage(prompt: int, completion: int) -> dict[str, int]:
    """The usage of an answer."""
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }


def piece(
    chat: bool, text: str, *, index: int = 0, finish: str | None = None, ident: str = "1"
) -> bytes:
    """One event of a stream with text."""
    head = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{ident}",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": CREATED,
        "model": "tiny",
    }
    choice: dict[str, object] = {"index": index}
    if chat:
        choice |= {"delta": {"content": text}, "logprobs": None, "finish_reason": finish}
        choice |= {"stop_reason": None} if finish else {}
        choice |= {"token_ids": None}
    else:
        choice |= {"text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
        choice |= {"prompt_token_ids": None, "token_ids": None}
    return event({**head, "choices": [choice]})


def end(chat: bool = False) -> bytes:
    """The end of a good stream without usage: the event with which its choice ends, and the
    mark.
    """
    return piece(chat, "", finish="length") + DONE


def role(ident: str = "1") -> bytes:
    """A chat's opening event, which the engine sends before it has done anything."""
    choice = {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    head = {
        "id": f"chatcmpl-{ident}",
        "object": "chat.completion.chunk",
        "created": CREATED,
        "model": "tiny",
    }
    return event({**head, "choices": [choice], "prompt_token_ids": None, "prompt_text": None})


def usage_event(chat: bool, prompt: int, completion: int, ident: str = "1") -> bytes:
    """The last event but one of a stream with `include_usage`."""
    kind, prefix = ("chat.completion.chunk", "chatcmpl") if chat else ("text_completion", "cmpl")
    head = {
        "id": f"{prefix}-{ident}",
        "object": kind,
        "created": CREATED,
        "model": "tiny",
        "choices": [],
    }
    return event({**head, "usage": usage(prompt, completion), "system_fingerprint": FINGERPRINT})


def error_event(message: str = "Internal server error", code: int = 500) -> bytes:
    """The event in which a stream's failure comes, with spaces as recorded."""
    error = {
        "error": {"message": message, "type": "InternalServerError", "param": None, "code": code}
    }
    return b"data: " + json.dumps(error).encode() + b"\n\n"


def stream(
    chat: bool, prompt: int, words: Sequence[str], *, with_usage: bool, ident: str = "1"
) -> list[bytes]:
    """All events of a stream, the end mark included."""
    events = [role(ident)] if chat else []
    for number, word in enumerate(words):
        last = number == len(words) - 1
        events.append(piece(chat, word, finish="length" if last else None, ident=ident))
    if with_usage:
        events.append(usage_event(chat, prompt, len(words), ident))
    return [*events, DONE]


def without_usage(events: Sequence[bytes]) -> list[bytes]:
    """The same stream as vLLM sends it without `include_usage`: the fingerprint is in the last
    event before the end mark.
    """
    kept = [event for event in events if b'"choices":[],"usage":{' not in event]
    if len(kept) == len(events):
        return kept
    *others, last, done = kept if kept[-1] == DONE else [*kept, b""]
    return [
        *others,
        last.removesuffix(b"}\n\n") + b',"system_fingerprint":"%b"}\n\n' % FINGERPRINT.encode(),
        done,
    ]


def whole(
    chat: bool,
    prompt_ids: Sequence[int],
    text: str,
    tokens: int,
    *,
    ident: str = "1",
    ids: bool = False,
    kv: Mapping[str, object] | None = None,
) -> bytes:
    """A whole answer. `ids`: with the prompt's token ids; `kv`: with a handle."""
    prompt = list(prompt_ids) if ids else None
    choice: dict[str, object] = {"index": 0}
    if chat:
        choice["message"] = {
            "role": "assistant",
            "content": text,
            "refusal": None,
            "reasoning": None,
        }
    else:
        choice["text"] = text
    choice |= {
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": [7] if ids else None,
    }
    if not chat:
        choice |= {"prompt_logprobs": None, "prompt_token_ids": prompt, "routed_experts": None}
    body: dict[str, object] = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{ident}",
        "object": "chat.completion" if chat else "text_completion",
        "created": CREATED,
        "model": "tiny",
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": {
            **usage(len(prompt_ids), tokens),
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
    }
    if chat:
        body |= {"prompt_logprobs": None, "prompt_token_ids": prompt, "prompt_text": None}
    return compact({**body, "kv_transfer_params": kv, "ec_transfer_params": None, "metrics": None})


def error(message: str, kind: str, code: int, param: str | None = None) -> bytes:
    """An error body."""
    return compact({"error": {"message": message, "type": kind, "param": param, "code": code}})


SCHEMA_400 = error(
    "1 validation error:\n  {'type': 'int_parsing', 'loc': 'body.top_k', 'msg': 'Input should be "
    "a valid integer'}",
    "Bad Request",
    400,
    "body.top_k",
)
HANDLER_400 = error(
    "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)",
    "BadRequestError",
    400,
    "temperature",
)
MODEL_404 = error(
    "The model `nope` does not exist. Valid aliases: tiny.", "NotFoundError", 404, "model"
)
INTERNAL_500 = error("Internal server error", "InternalServerError", 500)
