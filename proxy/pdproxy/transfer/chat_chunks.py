"""Parts of a stream's events that are rewritten where the client's answer comes from several
engines. Pure.

Source of the shapes: vLLM 0.32.0 `entrypoints/openai/*`.
"""

from __future__ import annotations

import msgspec

from pdproxy.transfer.contract import raw
from pdproxy.wire.fields import Fields

NULL = raw(b"null")
EMPTY_TEXT = raw(b'""')
body_decoder = msgspec.json.Decoder(Fields)
choices_decoder = msgspec.json.Decoder(list[Fields])
_int_decoder = msgspec.json.Decoder(int | None)


class NotACompletionError(Exception):
    """An engine sent something that can't be made part of such an answer."""


def chat_choice(choice: Fields) -> Fields:
    """Return a choice of a completion's event as one of a chat's."""
    text = choice.get("text", EMPTY_TEXT)
    finish = choice.get("finish_reason", NULL)
    found: Fields = {
        "index": choice.get("index", raw(b"0")),
        "delta": raw(b'{"content":' + bytes(text) + b"}"),
        "logprobs": NULL,
        "finish_reason": finish,
    }
    if bytes(finish) != b"null":
        found["stop_reason"] = choice.get("stop_reason", NULL)
    found["token_ids"] = choice.get("token_ids", NULL)
    return found


def moved_usage(usage_json: msgspec.Raw, tokens: int, *, of_chat_event: bool) -> msgspec.Raw:
    """Return the usage of a completion whose prompt ends with `tokens` of the answer, as one engine
    would count it.

    `of_chat_event`: it is that of a chat's event with a choice, which has one field more than a
    completion's.
    """
    usage = body_decoder.decode(usage_json)
    if of_chat_event:
        usage.setdefault("completion_tokens_details", NULL)
    for name, by in (("prompt_tokens", -tokens), ("completion_tokens", tokens)):
        if (count := _int_decoder.decode(usage.get(name, NULL))) is not None:
            usage[name] = raw(b"%d" % (count + by))
    return raw(msgspec.json.encode(usage))
