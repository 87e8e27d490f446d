"""What completions and chats have in common: which fields decide that one engine serves a request,
and what their prefill legs send.

Source: vLLM 0.32.0 `entrypoints/openai/*/protocol.py`. A prefill leg must not carry some fields:
the engine refuses them (`stream_options` without a stream, `min_tokens` over `max_tokens`), or they
cost work on a token that is not used.
"""

from __future__ import annotations

import msgspec

from pdproxy.wire.fields import Fields, is_absent, read_field
from pdproxy.wire.route_form import Alone, Prompt
from pdproxy.wire.unusual import UnusualError

UNSEEN = (
    "stream_options",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "prompt_logprobs",
    "echo",
    "structured_outputs",
    "response_format",
)
"""Fields that a prefill leg does not need. None of them changes the prompt, but for a chat's
`response_format`.
"""
DROPPED_ON_PREFILL = tuple(name for name in UNSEEN if name != "response_format")
"""Fields that the prefill legs of both routes do not carry."""
_DROPPED = frozenset(DROPPED_ON_PREFILL)
_ONE, _TRUE, _FALSE = msgspec.Raw(b"1"), msgspec.Raw(b"true"), msgspec.Raw(b"false")
_LIMITS = frozenset({"max_tokens", "max_completion_tokens"})
_DECIDING = _LIMITS | {
    "n",
    "echo",
    "prompt_logprobs",
    "use_beam_search",
    "min_tokens",
    "return_token_ids",
    "logprobs",
    "top_logprobs",
    "return_prompt_text",
    "logprob_token_ids",
}
"""Fields that decide whether a request needs one engine alone, or is unusual."""
_GREEDY = 1e-5
"""Below this temperature, engines draw nothing: several answers would be equal."""
_bool_decoder = msgspec.json.Decoder(bool | None)
_int_decoder = msgspec.json.Decoder(int | None)
_number_decoder = msgspec.json.Decoder(float | None)


def why_alone(fields: Fields, *, is_chat: bool) -> Alone | None:
    """Return why one engine must serve a request, None if it may be split.

    Raises:
        UnusualError: engines refuse it, or only an engine can judge it.
    """
    present = fields.keys() & _DECIDING
    if present <= _LIMITS:  # as in most requests
        for name in present:
            limit = read_field(fields, name, _int_decoder)
            if limit is not None and limit < 1:
                raise UnusualError
        return None
    if read_field(fields, "echo", _bool_decoder):
        return Alone.ECHO
    if read_field(fields, "prompt_logprobs", _int_decoder) is not None:
        return Alone.PROMPT_LOGPROBS
    if read_field(fields, "use_beam_search", _bool_decoder):
        return Alone.BEAM_SEARCH
    limits = [
        read_field(fields, name, _int_decoder) for name in ("max_tokens", "max_completion_tokens")
    ]
    min_tokens = read_field(fields, "min_tokens", _int_decoder) or 0
    for limit in limits:
        if limit is not None and (limit < 1 or limit < min_tokens):
            raise UnusualError  # every engine refuses it: a prefill would be wasted
    if min_tokens < 0:
        raise UnusualError
    read_field(fields, "return_token_ids", _bool_decoder)
    if is_chat:
        logprobs = read_field(fields, "logprobs", _bool_decoder)
        top = read_field(fields, "top_logprobs", _int_decoder)
        if top and not logprobs:
            raise UnusualError
        if read_field(fields, "return_prompt_text", _bool_decoder):
            # a decode engine that gets a chat's ids does not have its text (vLLM 0.32.0)
            return Alone.ECHO
    else:
        logprobs = read_field(fields, "logprobs", _int_decoder) is not None
    if not logprobs and not is_absent(fields, "logprob_token_ids"):
        raise UnusualError
    return Alone.N if wants_several(fields) else None


def wants_several(fields: Fields) -> bool:
    """Return whether a request wants several answers to its prompt. `fields`: those with `n`.

    Raises:
        UnusualError: every engine refuses it.
    """
    n = read_field(fields, "n", _int_decoder)
    if n is None or n == 1:
        return False
    temperature = read_field(fields, "temperature", _number_decoder)
    if n < 1 or (temperature is not None and temperature < _GREEDY):
        raise UnusualError  # a prefill would be wasted
    return True


def ids(raw: msgspec.Raw) -> Prompt:
    """Return an array of token ids as a prompt.

    Raises:
        UnusualError: it is none, or is empty.
    """
    view = bytes(raw)
    inside = view[1:-1].lstrip()
    if view[:1] != b"[" or not inside or inside[0] not in b"0123456789":
        raise UnusualError
    return Prompt(raw, inside.count(b",") + 1, 0)


def least_tokens(fields: Fields) -> None:
    """Have a prefill leg make a token wherever the client asks for some: 1 masks EOS and the stop
    ids for that token, as the client's larger number does.
    """
    if "min_tokens" in fields and bytes(fields["min_tokens"]) not in (b"0", b"null"):
        fields["min_tokens"] = _ONE


def prefill(fields: Fields) -> None:
    """Make the fields those of a prefill leg: one token, not streamed, with the prompt's ids.

    `response_format` stays on chats, since some chat templates print it. `tools` and `tool_choice`
    stay, since they change the prompt.
    """
    for name in _DROPPED.intersection(fields):
        del fields[name]
    fields["max_tokens"] = _ONE
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = _ONE
    least_tokens(fields)
    if "n" in fields:
        fields["n"] = _ONE
    fields["stream"] = _FALSE
    fields["return_token_ids"] = _TRUE
