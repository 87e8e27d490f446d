"""A client's request as far as routing needs it: the body stays bytes, field by field.

Owns the reading of an OpenAI body. Every top-level field is kept as the raw JSON that the client wrote
(`msgspec.Raw`), so that unknown fields survive untouched and a 64 KiB prompt is never turned into objects. Fields
that the prefill leg rewrites must have their canonical JSON type; anything else marks the request `unusual`, which
sends it whole to one engine, so that the engine's own validation answers and no KV is ever at stake. So does a body that
only the engines' own parser takes (`wire.reading`): it is parsed, cleaned and written anew.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import TypeVar

import msgspec

from pdproxy.wire import reading
from pdproxy.wire.model import model_name

_T = TypeVar("_T")
_NULL = msgspec.Raw(b"null")
Fields = dict[str, msgspec.Raw]
"""Top-level fields of a JSON object, each as the bytes that were on the wire."""

NEVER_FROM_CLIENTS = ("kv_transfer_params", "ec_transfer_params")
"""A made-up KV handle kills an engine (vLLM 0.32.0): removed wherever a client could put one."""
UNSEEN_BY_PREFILL = (
    "stream_options",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "prompt_logprobs",
    "echo",
    "structured_outputs",
    "response_format",
)
"""Fields that a prefill leg may do without. None of them changes the prompt, save a chat's `response_format`."""
_NESTED_CARRIERS = (("vllm_xargs",), ("sampling_params", "extra_args"))

_HUGE_INT = re.compile(rb"(?<![0-9])[0-9]{4301}")
"""Python's parser takes no integer of more than 4300 digits. Only a run's beginning is tried: each digit would be quadratic."""

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
    PREFILL_REFUSED = "prefill_refused"
    PREFILL_FAILED = "prefill_failed"
    NO_HANDLE = "no_handle"
    NO_TOKENS = "no_tokens"
    KV_BUFFER = "kv_buffer"
    KV_LATE = "kv_late"
    FIRST_TOKEN = "first_token"  # noqa: S105 - a token of text


class Incoming(msgspec.Struct):
    """A request as it came off the socket. Who reads the body takes it out.

    `forward` holds the header lines (name, value) that go on to engines, without the credentials.
    """

    route: Route
    request_id: str | None
    authorization: bytes | None
    content_type: str
    forward: tuple[tuple[bytes, bytes], ...]
    body: bytes


class Prompt(msgspec.Struct, frozen=True):
    """One prompt of a request. `raw` is its JSON; None where the prompt is the chat's messages.

    `tokens` is the exact length where the client sent token ids, else None; `text_bytes` an upper bound of its UTF-8
    size; `messages` how many chat messages it has (0 for a completion).
    """

    raw: msgspec.Raw | None
    tokens: int | None
    text_bytes: int
    messages: int = 0


class Parsed(msgspec.Struct, frozen=True):
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

    @property
    def starts_in_silence(self) -> bool:
        """Whether nothing shows that an engine is at work before it is done: an answer in one piece, or thoughts kept back."""
        return not self.stream or bytes(self.fields.get("include_reasoning", msgspec.Raw(b""))) == b"false"

    @property
    def adds_usage(self) -> bool:
        """Whether an engine is asked for a usage event that the client didn't ask for.

        Not with several choices in one stream: the usage event takes the fingerprint of each one's last chunk, and comes
        after all of them.
        """
        several = self.alone is Alone.N or (self.alone is not None and len(self.prompts) > 1)
        return self.stream and not self.wants_usage and not several

    @property
    def adds_ids(self) -> bool:
        """Whether an engine is asked for the token ids of a stream that the client didn't ask for.

        Not with tools, whose parser says the same with other events then, nor where thoughts are hidden, and their ids with them.
        """
        return (
            self.stream
            and self.alone is None
            and not self.starts_in_silence
            and "tools" not in self.fields
            and bytes(self.fields.get("return_token_ids", _NULL)) != b"true"
        )


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
        UnreadableError, UnparsableError: no engine would take it as a JSON object.
    """
    fields = _plain_fields(body)
    if fields is None:
        return _unusual(route, _unusual_fields(body), body)
    try:
        model = model_name(fields.get("model"))
        stream = bool(_read(fields, "stream", _bool_decoder))
        wants_usage = _wants_usage(fields, stream)
        is_list, prompts, non_text = _messages(fields) if route is Route.CHAT else _prompts(fields)
        alone = Alone.NON_TEXT if non_text else _alone(fields, route)
        _check_unseen(fields)
    except (_UnusualError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _unusual(route, fields, body)
    return Parsed(route, fields, model, stream, wants_usage, is_list, prompts, alone, len(body))


def _unusual(route: Route, fields: Fields, body: bytes) -> Parsed:
    # wants_usage: an engine may yet read the request as a stream with usage, and then that event is the client's.
    return Parsed(route, fields, model_of(fields), False, True, False, (), Alone.UNUSUAL, len(body))


def read_fields(body: bytes) -> Fields:
    """Return a body's fields without any KV handle of a client's making.

    Raises:
        UnreadableError, UnparsableError: no engine would take it as a JSON object.
    """
    fields = _plain_fields(body)
    return _unusual_fields(body) if fields is None else fields


def _plain_fields(body: bytes) -> Fields | None:
    """Return the fields of a plain JSON object in UTF-8, None if it is something else."""
    try:
        fields = _fields_decoder.decode(body)
        if not body.isascii():
            body.decode()  # what was skipped as `Raw` was not checked
        strip_handles(fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return fields


def _unusual_fields(body: bytes) -> Fields:
    """Read a body that only the engines' own parser may take. Its keys may be spelled in any way: here they are plain."""
    value = reading.load_object(body)
    _strip_from(value, ())
    for path in _NESTED_CARRIERS:
        _strip_from(value, path)
    return {name: msgspec.Raw(reading.dump(item)) for name, item in value.items() if _is_text_key(name)}


def _is_text_key(name: str) -> bool:
    # No field that an engine knows has half a surrogate pair in its name, and a name must be UTF-8 to be written.
    return name.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in name)


def _check_unseen(fields: Fields) -> None:
    """Make sure that decode engines can parse what prefill engines never see, or a prefill would have been for nothing."""
    for name in UNSEEN_BY_PREFILL:
        if name in fields and not reading.readable(bytes(fields[name])):
            raise _UnusualError


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
        return model_name(fields.get("model"))
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
    for limit in limits:
        if limit is not None and (limit < 1 or limit < least):
            raise _UnusualError  # every engine refuses it: so no prefill is spent on it
    if least < 0:
        raise _UnusualError
    _read(fields, "return_token_ids", _bool_decoder)
    if route is Route.CHAT:
        logprobs = _read(fields, "logprobs", _bool_decoder)
        top = _read(fields, "top_logprobs", _int_decoder)
        if top and not logprobs:
            raise _UnusualError
        if _read(fields, "return_prompt_text", _bool_decoder):
            return Alone.ECHO  # a decode engine that is handed a chat's ids has no text of it (vLLM 0.32.0)
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
    if _HUGE_INT.search(raw):
        raise _UnusualError  # the prompts before it would be at work when it is refused
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


def strip_handles(fields: Fields) -> None:
    """Remove KV handles from a body's fields, wherever a client could have put one."""
    for name in NEVER_FROM_CLIENTS:
        fields.pop(name, None)
    for path in _NESTED_CARRIERS:
        if path[0] in fields:
            fields[path[0]] = _without_handles(fields[path[0]], path[1:])


def _strip_from(value: object, path: tuple[str, ...]) -> None:
    """Remove handles from the object at `path` below an object; what is no object cannot hold one."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, dict):
        for name in NEVER_FROM_CLIENTS:
            value.pop(name, None)


def _without_handles(raw: msgspec.Raw, path: tuple[str, ...]) -> msgspec.Raw:
    """Return an object without handles at `path` below it; what is no object cannot hold one."""
    try:
        inner = _object_decoder.decode(raw)
    except msgspec.ValidationError:  # no object: the raw bytes are known to be JSON
        return raw
    if path:
        if path[0] in inner:
            inner[path[0]] = _without_handles(inner[path[0]], path[1:])
    else:
        for name in NEVER_FROM_CLIENTS:
            inner.pop(name, None)
    return msgspec.Raw(msgspec.json.encode(inner))
