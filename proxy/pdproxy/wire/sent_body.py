"""The body of a request to an engine, made of its fields: long ones are written to the socket from
where they are. To copy a chat of 256 KB, or its ids, takes as long as to send it. Pure.
"""

from __future__ import annotations

import msgspec

from pdproxy.wire.fields import Fields

SentBody = bytes | tuple[memoryview, ...]
"""A body, or its parts, if some of them are large."""
LONG = 32 << 10
"""Bytes of a field that is not copied, and of a body that may have one."""
_MARK = b"\xff"
"""A byte that UTF-8 never has, in the place of a long field."""
_MARKED = msgspec.Raw(_MARK)
_PARAMS = "kv_transfer_params"


def sent_body(fields: Fields, size: int, ids: bytes | None = None) -> SentBody:
    """Return the JSON of a body. `size`: of the client's body, from which most of it comes. `ids`:
    its prompt's, which `kv_transfer_params` get (`params_with_ids`); None adds none.
    """
    if size < LONG:
        return msgspec.json.encode(fields if ids is None else _with_ids(fields, ids))
    short = fields if ids is None else _with_ids(fields, _MARK)
    long: list[memoryview] = []
    for name, value in fields.items():
        if ids is not None and name == _PARAMS:
            long.append(memoryview(ids))
        elif (view := memoryview(value)).nbytes >= LONG:
            short = short | {name: _MARKED}
            long.append(view)
    between = msgspec.json.encode(short).split(_MARK)
    if len(between) != len(long) + 1:  # what an engine has sent need not be UTF-8
        return msgspec.json.encode(fields if ids is None else _with_ids(fields, ids))
    parts = [memoryview(between[0])]
    for one, text in zip(long, between[1:], strict=True):
        parts += one, memoryview(text)
    return tuple(parts)


def _with_ids(fields: Fields, ids: bytes) -> Fields:
    return fields | {_PARAMS: msgspec.Raw(params_with_ids(bytes(fields[_PARAMS]), ids))}


def params_with_ids(params: bytes, ids: bytes) -> bytes:
    """Return `kv_transfer_params`, a JSON object that is not empty, with a prompt's ids (a JSON
    array) as their last field.
    """
    return params[: params.rindex(b"}")] + b',"prompt_token_ids":' + ids + b"}"


def joined(body: SentBody) -> bytes:
    """Return a body's bytes."""
    return body if isinstance(body, bytes) else b"".join(body)
