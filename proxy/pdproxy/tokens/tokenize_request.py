"""What an engine's `/tokenize` is asked, so that it makes the prompt that it would make of a request.

Source: vLLM 0.32.0 `entrypoints/serve/tokenize/protocol.py`. Its chats know `tools`,
`chat_template_kwargs` and three flags; what a chat's own body says by other fields goes among the arguments, where the engine
itself would put it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdproxy.tokens.chat import refuse_unknown, template_arguments
from pdproxy.tokens.errors import UnsureError
from pdproxy.wire.fields import Fields
from pdproxy.wire.request import Parsed, Prompt, Route

_object_decoder = msgspec.json.Decoder(dict[str, Any] | None)
_CHAT = ("add_generation_prompt", "continue_final_message", "add_special_tokens", "tools")


def tokenize_body(parsed: Parsed, prompt: Prompt) -> bytes:
    """Return the body for `/tokenize`.

    Raises:
        UnsureError: it has no field for something that changes this prompt, or a value of it can't be written anew.
    """
    try:
        return _tokenize_body(parsed, prompt)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        # Numbers beyond all bounds, for one: the engines' own parser may take them.
        raise UnsureError("a value") from None


def _tokenize_body(parsed: Parsed, prompt: Prompt) -> bytes:
    fields = parsed.fields
    refuse_unknown(fields)
    asked: Fields = {"model": fields["model"]} if "model" in fields else {}
    if parsed.route is Route.COMPLETIONS:
        if bytes(fields.get("suffix", b"null")) != b"null" or prompt.raw is None or prompt.tokens is not None:
            raise UnsureError("suffix" if "suffix" in fields else "prompt")
        asked["prompt"] = prompt.raw
        if "add_special_tokens" in fields:
            asked["add_special_tokens"] = fields["add_special_tokens"]
        return msgspec.json.encode(asked)
    # A few renderers print them, and this route doesn't take them.
    for name in ("response_format", "tool_choice"):
        if bytes(fields.get(name, b"null")) not in (b"null", b'"auto"'):
            raise UnsureError(name)
    asked |= {name: fields[name] for name in _CHAT if name in fields}
    asked["messages"] = _messages(fields["messages"])
    arguments = template_arguments(fields)
    if arguments or "chat_template_kwargs" in fields:
        given = _object_decoder.decode(fields.get("chat_template_kwargs", b"null")) or {}
        asked["chat_template_kwargs"] = msgspec.Raw(msgspec.json.encode({**given, **arguments}))
    return msgspec.json.encode(asked)


def _messages(raw: msgspec.Raw) -> msgspec.Raw:
    """Return the messages, thoughts by their newer name: a chat's own schema knows both, this route's does not."""
    if bytes(raw).find(b"reasoning_content") < 0:
        return raw
    messages: list[dict[str, Any]] = msgspec.json.decode(raw)
    for message in messages:
        thoughts = message.pop("reasoning_content", None)
        if thoughts is not None and message.get("reasoning") is None:
            message["reasoning"] = thoughts
    return msgspec.Raw(msgspec.json.encode(messages))
