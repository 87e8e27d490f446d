"""The top level of a JSON body: its fields as the bytes that the client wrote, without KV handles of the client's making.

Owns the reading of that level, and the removal of handles wherever a client could put one. A body that only the engines' own
parser takes (`wire.lenient_json`) is parsed, cleaned and written anew.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pdproxy.wire import lenient_json
from pdproxy.wire.body_bounds import MOST_FIELDS, SMALL, Body, TooManyFieldsError, is_light
from pdproxy.wire.model import model_name

_T = TypeVar("_T")
Fields = dict[str, msgspec.Raw]
"""Top-level fields of a JSON object, each as the bytes that were on the wire."""

NEVER_FROM_CLIENTS = ("kv_transfer_params", "ec_transfer_params")
"""A made-up KV handle kills an engine (vLLM 0.32.0): removed wherever a client could put one."""
_NESTED_CARRIERS = (("vllm_xargs",), ("sampling_params", "extra_args"))


STRING = msgspec.json.Decoder(str | None)
_fields_decoder = msgspec.json.Decoder(Fields)


def read_fields_light(body: Body) -> Fields | None:
    """Return a body's fields without any KV handle of a client's making; None if reading it may take long.

    Raises:
        UnreadableError, UnparsableError, TooManyFieldsError: as `parse`.
    """
    fields = plain_fields(body) if is_light(body) else None
    if fields is None and len(body) <= SMALL:
        return unusual_fields(body)
    return fields


def plain_fields(body: Body) -> Fields | None:
    """Return the fields of a plain JSON object in UTF-8 without KV handles, None if it is something else.

    Raises:
        TooManyFieldsError: it has more than any request has.
    """
    fields = decoded(body)
    try:
        if fields is not None:
            strip_handles(fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return fields


def decoded(body: Body) -> Fields | None:
    """Return the fields of a plain JSON object in UTF-8 as they came, None if it is something else.

    Raises:
        TooManyFieldsError: it has more than any request has.
    """
    try:
        fields = _fields_decoder.decode(body)
        if not body.isascii():
            body.decode()  # what was skipped as `Raw` was not checked
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return _few(fields)


def unusual_fields(body: Body) -> Fields:
    """Read a body that only the engines' own parser may take. Its keys may be spelled in any way: here they are plain.

    Raises:
        UnreadableError, UnparsableError, TooManyFieldsError: as `parse`.
    """
    value = lenient_json.load_object(body)
    _strip_from(value, ())
    for path in _NESTED_CARRIERS:
        _strip_from(value, path)
    return {name: msgspec.Raw(lenient_json.dump(item)) for name, item in _few(value).items() if _is_text_key(name)}


def _few(fields: dict[str, _T]) -> dict[str, _T]:
    if len(fields) > MOST_FIELDS:
        raise TooManyFieldsError
    return fields


def _is_text_key(name: str) -> bool:
    # No field that an engine knows has half a surrogate pair in its name, and a name must be UTF-8 to be written.
    return name.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in name)


def body_request_id(fields: Fields) -> str | None:
    """Return the `request_id` of the body, which vLLM uses where no header names one."""
    try:
        return STRING.decode(fields["request_id"]) if "request_id" in fields else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def read(fields: Fields, name: str, decoder: msgspec.json.Decoder[_T]) -> _T | None:
    """Return a field's value, None if it is not there. Raises what its decoder does."""
    raw = fields.get(name)
    return None if raw is None else decoder.decode(raw)


def says(fields: Fields, name: str, literal: bytes) -> bool:
    """Tell whether a field is there and is written so. A long value is not copied for it."""
    raw = fields.get(name)
    return raw is not None and memoryview(raw).nbytes == len(literal) and bytes(raw) == literal


def absent(fields: Fields, name: str) -> bool:
    """Tell whether a field is not there, or null."""
    return name not in fields or says(fields, name, b"null")


def model_of(fields: Fields) -> str | None:
    """Return the model that a body names, None if it names none that could be one."""
    try:
        return model_name(fields.get("model"))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


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
        inner = _fields_decoder.decode(raw)
    except msgspec.ValidationError:  # no object: the raw bytes are known to be JSON
        return raw
    if path:
        if path[0] in inner:
            inner[path[0]] = _without_handles(inner[path[0]], path[1:])
    else:
        for name in NEVER_FROM_CLIENTS:
            inner.pop(name, None)
    return msgspec.Raw(msgspec.json.encode(inner))
