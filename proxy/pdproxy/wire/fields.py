"""The top level of a JSON body: its fields as the bytes that the client wrote, without KV handles
that a client made up.

Owns the reading of that level, and the removal of handles wherever a client could put one. Of
`kv_transfer_params` only `prompt_token_ids` stay: to vLLM they are the prompt of a chat, in place
of its messages, not a part of a handle. A body that only the engines' own parser takes
(`wire.lenient_json`) is parsed, cleaned and encoded again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import msgspec

from pdproxy.wire import lenient_json
from pdproxy.wire.body_bounds import MAX_FIELDS, SMALL, Body, TooManyFieldsError, is_quick
from pdproxy.wire.model import model_name

_T = TypeVar("_T")
Fields = dict[str, msgspec.Raw]
"""Top-level fields of a JSON object, each as the bytes that were on the wire."""

NEVER_FROM_CLIENTS = ("kv_transfer_params", "ec_transfer_params")
"""The fields of a KV handle. One that a client made up crashes an engine (vLLM 0.32.0), so they are
removed.
"""
PROMPT_IDS = "kv_transfer_params"
"""The field that may still hold a prompt's ids. Only chats, responses and messages are read so:
others must drop it.
"""
_IDS = "prompt_token_ids"
_NESTED_CARRIERS = (("vllm_xargs",), ("sampling_params", "extra_args"))


_LONGEST_INTEGER = 64
"""Bytes of JSON: a longer one could take long to read."""
_LARGE_INTEGER = 2**63 - 1
_NO_DIGITS = re.compile(r"[^0-9]+")

STRING = msgspec.json.Decoder(str | None)
_fields_decoder = msgspec.json.Decoder(Fields)


def read_fields_if_quick(body: Body) -> Fields | None:
    """Return a body's fields without KV handles; None if reading it may take long.

    Raises:
        UnreadableError, UnparsableError, TooManyFieldsError: as `parse`.
    """
    fields = plain_fields(body) if is_quick(body) else None
    if fields is None and len(body) <= SMALL:
        return lenient_fields(body)
    return fields


def plain_fields(body: Body) -> Fields | None:
    """Return the fields of a plain JSON object in UTF-8 without KV handles, None if it is something
    else.

    Raises:
        TooManyFieldsError: it has more than `MAX_FIELDS`.
    """
    fields = decode_fields(body)
    try:
        if fields is not None:
            strip_handles(fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return fields


def decode_fields(body: Body) -> Fields | None:
    """Return the fields of a plain JSON object in UTF-8 as they came, None if it is something else.

    Raises:
        TooManyFieldsError: it has more than `MAX_FIELDS`.
    """
    try:
        fields = _fields_decoder.decode(body)
        if not body.isascii():
            body.decode()  # what was skipped as `Raw` was not checked
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return _checked(fields)


def lenient_fields(
    body: Body, load: Callable[[Body], dict[str, object]] = lenient_json.load_object
) -> Fields:
    """Return the fields of a body that only the engines' own parser may take, keys and values in
    plain JSON.

    `load` reads the object, as the engines' route does.

    Raises:
        UnreadableError, UnparsableError, TooManyFieldsError: as `parse`, or what `load` raises.
    """
    value = load(body)
    params = value.get(PROMPT_IDS)
    ids = params.get(_IDS) if isinstance(params, dict) else None
    _strip_from(value, ())
    if ids is not None:
        value[PROMPT_IDS] = {_IDS: ids}
    for path in _NESTED_CARRIERS:
        _strip_from(value, path)
    return {
        name: msgspec.Raw(lenient_json.dump(item))
        for name, item in _checked(value).items()
        if _is_text_key(name)
    }


def _checked(fields: dict[str, _T]) -> dict[str, _T]:
    if len(fields) > MAX_FIELDS:
        raise TooManyFieldsError
    return fields


def _is_text_key(name: str) -> bool:
    # No field that an engine knows has half a surrogate pair in its name, and a name must be UTF-8
    # to be written.
    return name.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in name)


def body_request_id(fields: Fields) -> str | None:
    """Return the `request_id` of the body, which vLLM uses where no header names one."""
    try:
        return STRING.decode(fields["request_id"]) if "request_id" in fields else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def read_field(fields: Fields, name: str, decoder: msgspec.json.Decoder[_T]) -> _T | None:
    """Return a field's value, None if it is not there. Raises what its decoder raises."""
    raw = fields.get(name)
    return None if raw is None else decoder.decode(raw)


def lenient_integer(raw: msgspec.Raw) -> int | None:
    """Return the integer that an engine reads in a field, None if it reads none. Any is large if it
    is longer than 64 bytes.

    Engines take texts (" 7.0 ", "1_0", "0__7"), fractions of zero (7.0, 7e0) and booleans for
    integers, too: pydantic, not strict. Here each text with a digit is a number, so that no form is
    left out; engines refuse many of these.
    """
    if memoryview(raw).nbytes > _LONGEST_INTEGER:
        return _LARGE_INTEGER
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if isinstance(value, str):
        whole, _, _ = value.partition(".")
        digits = _NO_DIGITS.sub("", whole)
        return int(("-" if "-" in whole else "") + digits) if digits else None
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= _LARGE_INTEGER else None
    return int(value) if isinstance(value, int) else None


def inner_fields(fields: Fields, name: str) -> Fields | None:
    """Return the fields of the object in a field, None if it is not there, or can't be read."""
    try:
        return read_field(fields, name, _fields_decoder)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def has_value(fields: Fields, name: str, literal: bytes) -> bool:
    """Return whether a field is there and its JSON is `literal`. A long value is not copied."""
    raw = fields.get(name)
    return raw is not None and memoryview(raw).nbytes == len(literal) and bytes(raw) == literal


def is_absent(fields: Fields, name: str) -> bool:
    """Return whether a field is not there, or null."""
    return name not in fields or has_value(fields, name, b"null")


def model_of(fields: Fields) -> str | None:
    """Return the model that a body names, None if it names none, or no text."""
    try:
        return model_name(fields.get("model"))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def strip_handles(fields: Fields) -> None:
    """Remove KV handles from a body's fields, wherever a client could have put one. A prompt's ids
    stay (`PROMPT_IDS`).
    """
    ids = _prompt_ids(fields[PROMPT_IDS]) if PROMPT_IDS in fields else None
    for name in NEVER_FROM_CLIENTS:
        fields.pop(name, None)
    for path in _NESTED_CARRIERS:
        if path[0] in fields:
            fields[path[0]] = _without_handles(fields[path[0]], path[1:])
    if ids is not None:
        fields[PROMPT_IDS] = ids


def _prompt_ids(params: msgspec.Raw) -> msgspec.Raw | None:
    """Return the object with nothing but the prompt's ids, whatever their value is; None if there
    are none.
    """
    try:
        inner = _fields_decoder.decode(params)
    except msgspec.ValidationError:  # not an object: the raw bytes are known to be JSON
        return None
    return None if is_absent(inner, _IDS) else msgspec.Raw(msgspec.json.encode({_IDS: inner[_IDS]}))


def _strip_from(value: object, path: tuple[str, ...]) -> None:
    """Remove handles from the object at `path` below an object; other values cannot hold one."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, dict):
        for name in NEVER_FROM_CLIENTS:
            value.pop(name, None)


def _without_handles(raw: msgspec.Raw, path: tuple[str, ...]) -> msgspec.Raw:
    """Return an object without handles at `path` below it; other values cannot hold one."""
    try:
        inner = _fields_decoder.decode(raw)
    except msgspec.ValidationError:  # not an object: the raw bytes are known to be JSON
        return raw
    if path:
        if path[0] in inner:
            inner[path[0]] = _without_handles(inner[path[0]], path[1:])
    else:
        for name in NEVER_FROM_CLIENTS:
            inner.pop(name, None)
    return msgspec.Raw(msgspec.json.encode(inner))
