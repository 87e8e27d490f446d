"""A client's request as far as routing needs it: the body stays bytes, field by field.

Owns the reading of an OpenAI body. Every top-level field is kept as the raw JSON that the client wrote
(`msgspec.Raw`), so that unknown fields survive untouched and a 64 KiB prompt is never turned into objects. Fields
that the prefill leg rewrites must have their canonical JSON type; anything else marks the request `unusual`, which
sends it whole to one engine, so that the engine's own validation answers and no KV is ever at stake.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import msgspec

from pdproxy.kit.errors import UnreadableError

_T = TypeVar("_T")
Fields = dict[str, msgspec.Raw]
"""Top-level fields of a JSON object, each as the bytes that were on the wire."""

NEVER_FROM_CLIENTS = ("kv_transfer_params", "ec_transfer_params")
"""A made-up KV handle kills an engine (vLLM 0.32.0): removed wherever a client could put one."""
_NESTED_CARRIERS = (("vllm_xargs",), ("sampling_params", "extra_args"))

_fields_decoder = msgspec.json.Decoder(Fields)
_items_decoder = msgspec.json.Decoder(list[msgspec.Raw])


class Route(Enum):
    """The two generating routes."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


class Alone(Enum):
    """Why a request is served by one engine alone. The value is the label of `pdproxy_alone_total{reason}`."""

    N = "n"
    ECHO = "echo"
    PROMPT_LOGPROBS = "prompt_logprobs"
    BEAM_SEARCH = "beam_search"
    NON_TEXT = "non_text"
    SHORT_PROMPT = "short_prompt"
    UNUSUAL = "unusual"
    NO_PAIR = "no_pair"
    PREFILL_FAILED = "prefill_failed"
    NO_HANDLE = "no_handle"


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request as it came off the socket.

    `forward` holds the header lines (name, value) that go on to engines, without the credentials.
    """

    route: Route
    request_id: str | None
    authorization: bytes | None
    content_type: str
    forward: tuple[tuple[bytes, bytes], ...]
    body: bytes


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request. `raw` is its JSON; None where the prompt is the chat's messages.

    `tokens` is the exact length where the client sent token ids, else None; `text_bytes` an upper bound of its UTF-8
    size; `messages` how many chat messages it has (0 for a completion).
    """

    raw: msgspec.Raw | None
    tokens: int | None
    text_bytes: int
    messages: int = 0


@dataclass(frozen=True, slots=True)
class Parsed:
    """A readable request. `alone` is a reason in the request itself to use one engine, None where it may be split."""

    route: Route
    fields: Fields
    model: str | None
    stream: bool
    wants_usage: bool
    is_list: bool
    prompts: tuple[Prompt, ...]
    alone: Alone | None
    body_bytes: int


class _UnusualError(Exception):
    """A field that the prefill leg rewrites is not of its canonical type."""


class _Message(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"null")


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


_messages_decoder = msgspec.json.Decoder(list[_Message])
_parts_decoder = msgspec.json.Decoder(list[Fields])
_bool_decoder = msgspec.json.Decoder(bool | None)
_int_decoder = msgspec.json.Decoder(int | None)
_str_decoder = msgspec.json.Decoder(str | None)
_stream_options_decoder = msgspec.json.Decoder(_StreamOptions | None)
_object_decoder = msgspec.json.Decoder(Fields)


def parse(route: Route, body: bytes) -> Parsed:
    """Read a body.

    Raises:
        UnreadableError: it is not a JSON object in UTF-8.
    """
    fields = read_fields(body)
    try:
        model = _read(fields, "model", _str_decoder)
        stream = bool(_read(fields, "stream", _bool_decoder))
        wants_usage = _wants_usage(fields, stream)
        is_list, prompts, non_text = _messages(fields) if route is Route.CHAT else _prompts(fields)
        alone = Alone.NON_TEXT if non_text else _alone(fields, route)
    except (_UnusualError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # wants_usage: an engine may yet read the request as a stream with usage, and then that event is the client's.
        return Parsed(route, fields, model_of(fields), False, True, False, (), Alone.UNUSUAL, len(body))
    return Parsed(route, fields, model, stream, wants_usage, is_list, prompts, alone, len(body))


def read_fields(body: bytes) -> Fields:
    """Return a body's fields without any KV handle of a client's making.

    Raises:
        UnreadableError: it is not a JSON object in UTF-8.
    """
    try:
        fields = _fields_decoder.decode(body)
        _strip_handles(fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableError(f"The request body is not a JSON object: {error}", param="body") from None
    return fields


def body_request_id(fields: Fields) -> str | None:
    """Return the `request_id` of the body, which vLLM uses where no header names one."""
    try:
        return _str_decoder.decode(fields["request_id"]) if "request_id" in fields else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _read(fields: Fields, name: str, decoder: msgspec.json.Decoder[_T]) -> _T | None:
    raw = fields.get(name)
    return None if raw is None else decoder.decode(raw)


def _absent(fields: Fields, name: str) -> bool:
    return name not in fields or bytes(fields[name]) == b"null"


def model_of(fields: Fields) -> str | None:
    """Return the model that a body names, None if it names none that could be one."""
    try:
        return _read(fields, "model", _str_decoder)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _wants_usage(fields: Fields, stream: bool) -> bool:
    options = _read(fields, "stream_options", _stream_options_decoder)
    if options is not None and not stream:
        raise _UnusualError  # the engine refuses it, the prefill leg would not
    return options is not None and bool(options.include_usage)


def _alone(fields: Fields, route: Route) -> Alone | None:
    n = _read(fields, "n", _int_decoder)
    if n is not None and n != 1:
        return Alone.N
    if _read(fields, "echo", _bool_decoder):
        return Alone.ECHO
    if _read(fields, "prompt_logprobs", _int_decoder) is not None:
        return Alone.PROMPT_LOGPROBS
    if _read(fields, "use_beam_search", _bool_decoder):
        return Alone.BEAM_SEARCH
    limits = [_read(fields, name, _int_decoder) for name in ("max_tokens", "max_completion_tokens")]
    least = _read(fields, "min_tokens", _int_decoder) or 0
    if least < 0 or any(limit is not None and (limit < 1 or limit < least) for limit in limits):
        raise _UnusualError  # every engine refuses it: so no prefill is spent on it
    _read(fields, "return_token_ids", _bool_decoder)
    if route is Route.CHAT:
        logprobs = _read(fields, "logprobs", _bool_decoder)
        top = _read(fields, "top_logprobs", _int_decoder)
        if top and not logprobs:
            raise _UnusualError
    else:
        logprobs = _read(fields, "logprobs", _int_decoder) is not None
    if not logprobs and not _absent(fields, "logprob_token_ids"):
        raise _UnusualError
    return None


def _messages(fields: Fields) -> tuple[bool, tuple[Prompt, ...], bool]:
    """Return (is a list, the one prompt, whether any content is not text)."""
    messages = _read(fields, "messages", _messages_decoder)
    if not messages:
        raise _UnusualError
    size, non_text = 0, False
    for message in messages:
        raw = bytes(message.content)
        size += len(raw)
        if raw[:1] == b"[":
            non_text = non_text or not all(_is_text(part) for part in _parts_decoder.decode(raw))
    return False, (Prompt(None, None, size, len(messages)),), non_text


def _is_text(part: Fields) -> bool:
    """Tell whether a content part is text and nothing else: vLLM takes media parts without a type, too."""
    return part.keys() <= {"type", "text"} and bytes(part.get("type", msgspec.Raw(b""))) == b'"text"'


def _prompts(fields: Fields) -> tuple[bool, tuple[Prompt, ...], bool]:
    """Return (is a list, the prompts in order, whether any is not text)."""
    if not _absent(fields, "prompt_embeds"):
        return False, (), True
    raw = fields.get("prompt")
    if raw is None:
        raise _UnusualError
    one = _one_prompt(raw)
    if one is not None:
        return False, (one,), False
    prompts = tuple(_one_prompt(item) for item in _items_decoder.decode(raw))
    if not prompts or None in prompts:
        raise _UnusualError
    kinds = {prompt.tokens is None for prompt in prompts if prompt is not None}
    if len(kinds) != 1:
        raise _UnusualError  # texts and token ids mixed
    return True, tuple(prompt for prompt in prompts if prompt is not None), False


def _one_prompt(raw: msgspec.Raw) -> Prompt | None:
    """Return a text or an array of token ids as a prompt; None for an array of prompts."""
    view = bytes(raw)
    if view[:1] == b'"':
        if len(view) == 2:
            raise _UnusualError  # empty
        return Prompt(raw, None, len(view) - 2)
    if view[:1] == b"[":
        inside = view[1:-1].lstrip()
        if inside and inside[0] in b"0123456789":
            return Prompt(raw, inside.count(b",") + 1, 0)
        if inside and inside[0] in b'"[':
            return None
    raise _UnusualError


def _strip_handles(fields: Fields) -> None:
    for name in NEVER_FROM_CLIENTS:
        fields.pop(name, None)
    for path in _NESTED_CARRIERS:
        if path[0] in fields:
            fields[path[0]] = _without_handles(fields[path[0]], path[1:])


def _without_handles(raw: msgspec.Raw, path: tuple[str, ...]) -> msgspec.Raw:
    """Return an object without handles at `path` below it; what is no object cannot hold one."""
    try:
        inner = _object_decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return raw
    if path:
        if path[0] in inner:
            inner[path[0]] = _without_handles(inner[path[0]], path[1:])
    else:
        for name in NEVER_FROM_CLIENTS:
            inner.pop(name, None)
    return msgspec.Raw(msgspec.json.encode(inner))
