"""The body for an engine's `/tokenize` with which it makes the same prompt as from the request
itself.

Source: vLLM 0.32.0 `entrypoints/serve/tokenize/protocol.py`. Its chats have `tools`,
`chat_template_kwargs` and three flags. Other fields of a chat's body are moved to the arguments,
where the engine itself would put them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdproxy.tokens.chat import refuse_unknown, template_arguments
from pdproxy.tokens.errors import UnsureError
from pdproxy.wire.fields import Fields
from pdproxy.wire.request import Parsed
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Prompt

_object_decoder = msgspec.json.Decoder(dict[str, Any] | None)
_CHAT = ("add_generation_prompt", "continue_final_message", "add_special_tokens", "tools")


def tokenize_body(parsed: Parsed, prompt: Prompt) -> bytes:
    """Return the body for `/tokenize`.

    Raises:
        UnsureError: it has no field for something that changes this prompt, or a value of it can't
            be encoded again.
    """
    try:
        return _tokenize_body(parsed, prompt)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        # For example numbers beyond all limits, which the engines' own parser may accept.
        raise UnsureError("a value") from None


def _tokenize_body(parsed: Parsed, prompt: Prompt) -> bytes:
    fields = parsed.fields
    refuse_unknown(fields)
    body: Fields = {"model": fields["model"]} if "model" in fields else {}
    if parsed.route is Route.COMPLETIONS:
        if (
            bytes(fields.get("suffix", b"null")) != b"null"
            or prompt.raw is None
            or prompt.tokens is not None
        ):
            raise UnsureError("suffix" if "suffix" in fields else "prompt")
        body["prompt"] = prompt.raw
        if "add_special_tokens" in fields:
            body["add_special_tokens"] = fields["add_special_tokens"]
        return msgspec.json.encode(body)
    # A few templates print them, and this route doesn't accept them.
    for name in ("response_format", "tool_choice"):
        if bytes(fields.get(name, b"null")) not in (b"null", b'"auto"'):
            raise UnsureError(name)
    body |= {name: fields[name] for name in _CHAT if name in fields}
    body["messages"] = _messages(fields["messages"])
    arguments = template_arguments(fields)
    if arguments or "chat_template_kwargs" in fields:
        given = _object_decoder.decode(fields.get("chat_template_kwargs", b"null")) or {}
        body["chat_template_kwargs"] = msgspec.Raw(msgspec.json.encode({**given, **arguments}))
    return msgspec.json.encode(body)


def _messages(raw: msgspec.Raw) -> msgspec.Raw:
    """Return the messages, reasoning by its newer name: a chat's own schema has both names, this
    route's does not.
    """
    if bytes(raw).find(b"reasoning_content") < 0:
        return raw
    messages: list[dict[str, Any]] = msgspec.json.decode(raw)
    for message in messages:
        reasoning = message.pop("reasoning_content", None)
        if reasoning is not None and message.get("reasoning") is None:
            message["reasoning"] = reasoning
    return msgspec.Raw(msgspec.json.encode(messages))
