"""The generating routes that only clients use: what engines are asked on the two others for them.
Pure.

Owns the rules by which a batch of chats becomes chats, and a SageMaker invocation a chat or a
completion. Where a rule is not certain to give the answer of vLLM's own route, one engine gets the
request whole, on that route. Source: vLLM 0.32.0 `openai/chat_completion/protocol.py`,
`serve/sagemaker/api_router.py`, and `model_hosting_container_standards` 0.1.16.
"""

from __future__ import annotations

import json

import msgspec

from pdproxy.kit.errors import BadRequestError, UnparsableError, UnreadableError
from pdproxy.wire.body_bounds import Body
from pdproxy.wire.fields import Fields, has_value, is_absent
from pdproxy.wire.model import model_name

ADAPTER_HEADER = b"x-amzn-sagemaker-adapter-identifier"
"""The header of an invocation that names its model. vLLM ignores the `model` of the body."""

_SESSION = "requestType"
"""The field of SageMaker's requests about sessions, which has no others beside it."""
_CHAT_ALONE = {
    "stream": b"false",
    "stream_options": b"null",
    "tools": b"null",
    "tool_choice": b'"none"',
    "include_reasoning": b"true",
    "echo": b"false",
    "continue_final_message": b"false",
    "prompt_logprobs": b"null",
    "return_prompt_text": b"false",
    "return_token_offsets": b"false",
    "return_mm_kwargs": b"false",
    "mm_payload": b"null",
    "routed_experts_prompt_start": b"0",
    "use_beam_search": b"false",
    "n": b"1",
    "best_of": b"1",
}
"""Fields that a batch and a chat do not treat alike, with the value at which they do: vLLM's
batches do not stream, render no tools, hide no reasoning, and report nothing about prompts.
"""
_CHECKED_FOR_CHATS = frozenset(
    {
        "messages",
        "tools",
        "tool_choice",
        "top_logprobs",
        "logprob_token_ids",
        "continue_final_message",
        "add_generation_prompt",
        "mm_payload",
        "return_mm_kwargs",
    }
)
"""Fields for which vLLM may refuse an invocation as a chat before it tries to read it as a
completion.
"""


def is_plain_batch(fields: Fields) -> bool:
    """Return whether each conversation of a batch can be served as a chat with the other fields of
    the batch.
    """
    return all(
        name not in fields or has_value(fields, name, b"null") or has_value(fields, name, same)
        for name, same in _CHAT_ALONE.items()
    )


def is_chat(fields: Fields) -> bool:
    """Return whether vLLM reads an invocation first as a chat."""
    return "messages" in fields and _SESSION not in fields


def is_completion(fields: Fields) -> bool:
    """Return whether vLLM surely reads an invocation as a completion, if its fields have the right
    types.
    """
    return (
        not is_absent(fields, "prompt")
        and _SESSION not in fields
        and fields.keys().isdisjoint(_CHECKED_FOR_CHATS)
    )


def with_adapter(fields: Fields, adapter: bytes | None) -> str | None:
    """Set the model of an invocation to the one that its header names, none without such a header.
    Return its name, bounded.
    """
    fields.pop("model", None)
    if adapter is None:
        return None
    fields["model"] = msgspec.Raw(msgspec.json.encode(adapter.decode("latin-1")))
    return model_name(fields["model"])


def load_invocation(body: Body) -> dict[str, object]:
    """Return the object that the body of an invocation holds.

    Raises:
        UnreadableError, UnparsableError, BadRequestError: it holds none, in vLLM's words for this
        route.
    """
    try:
        value = json.loads(body)
    except json.JSONDecodeError as error:
        raise UnreadableError(f"JSON decode error: {error}") from None
    except ValueError as error:
        raise BadRequestError(str(error)) from None
    except RecursionError:
        raise UnparsableError from None
    if isinstance(value, dict):
        return value
    if isinstance(value, list):
        raise BadRequestError("list indices must be integers or slices, not str")
    if isinstance(value, str):
        raise BadRequestError("'str' object does not support item assignment")
    raise BadRequestError(f"argument of type '{type(value).__name__}' is not iterable")
