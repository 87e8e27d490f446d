"""What of an engine's answer no client may see: KV handles, and other fields that name engines,
their addresses or their memory.

Owns the list of the fields that clients know. A field in that list always passes. Any other field
at the top of an answer or of an event passes only if neither its name nor its value names the
inside. A handle is removed wherever it is. The removed value becomes `null`, as engines write the
field of a handle where there is none; all other bytes stay.

In a text of the model a quote is escaped, so the byte patterns below match structure only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from pdproxy.wire import sse
from pdproxy.wire.engine import UNREADABLE
from pdproxy.wire.fields import Fields

HANDLE = "kv_transfer_params"
"""The field of a handle: at the top of whole answers, and since vLLM 0.33.0 of the last event of a
choice.
"""
_SUFFIX = "_transfer_params"
_KNOWN = (
    *(
        "id",
        "object",
        "created",
        "model",
        "choices",
        "usage",
        "service_tier",
        "system_fingerprint",
        "metrics",
    ),
    *("prompt_logprobs", "prompt_token_ids", "prompt_text"),
)
"""Top-level fields of completions, chats and their events: OpenAI's, and those of vLLM 0.26.0 to
0.33.0.
"""
_KNOWN_ELSEWHERE = (
    *(
        "type",
        "error",
        "message",
        "code",
        "param",
        "detail",
        "response",
        "sequence_number",
        "item",
        "item_id",
        "delta",
    ),
    *(
        "part",
        "index",
        "output_index",
        "content_index",
        "content_block",
        "content",
        "role",
        "stop_reason",
        "text",
    ),
    *(
        "stop_sequence",
        "output",
        "status",
        "data",
        "results",
        "tools",
        "tool_choice",
        "metadata",
        "instructions",
        "input",
    ),
    *(
        "annotation",
        "logprobs",
        "arguments",
        "name",
        "reasoning",
        "incomplete_details",
        "input_messages",
    ),
    *(
        "output_messages",
        "summary",
        "previous_response_id",
        "prompt",
        "user",
        "truncation",
        "tokens",
        "token_strs",
        "request_id",
        "output_mode",
        "mm_placeholders",
        "prompt_token_id_logprobs",
    ),
)
"""Further ones of errors, of the Responses and Messages APIs, and of the routes that one engine
serves whole.
"""
_PASSES = frozenset((*_KNOWN, *_KNOWN_ELSEWHERE))
_HANDLE_KEYS = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_bootstrap_addr")
"""Of these keys every handle has one."""
_REMOTE = b'"remote_'
"""The beginning of each of these keys."""
_NAME = b'_transfer_params":'
_NULL_NAME, _SPACED_NULL_NAME = b'_transfer_params":null', b'_transfer_params": null'
_WORDS = rb"(?:remote_|engine|block_id|transfer|host|port|addr|peer|worker|rank|handle)"
_INSIDE_NAME = re.compile(_WORDS, re.IGNORECASE)
_INSIDE_VALUE = re.compile(
    rb'"[^"\\]{0,64}%b[^"\\]{0,64}": '
    rb'?(?!null)|"[a-z][a-z0-9+]{1,9}://[^"\s]*"|"\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?"' % _WORDS,
    re.IGNORECASE,
)
"""A key with such a word, or a string that is an address. Words in a text show nothing."""
_ADDRESS = re.compile(
    rb"\b[a-z][a-z0-9+]{1,9}://[^\s\"'<>(){}\\,;]+|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?\b"
)
_ERROR = re.compile(rb'"error": ?\{')
_MAX_KEYS = 1 << 16
"""Keys of an answer, about, up to which its fields become objects. An answer with more has many
logprobs: there only fields of handles are looked for.
"""

_DATA = len(b"data: ")
_MAX_FIELDS = 256
"""Fields at the top up to which each is looked at. No engine has so many."""
_MOST_NAMES = 8
"""Fields to be hidden up to which the other bytes of an answer stay as they are: each takes a
search.
"""

_NULL = msgspec.Raw(b"null")
_Plain = msgspec.defstruct(
    "_Plain",
    [
        *[(name, msgspec.Raw, _NULL) for name in _KNOWN],
        *[(name, type(None), None) for name in (HANDLE, "ec_transfer_params")],
    ],
    forbid_unknown_fields=True,
)
_plain = msgspec.json.Decoder(_Plain)
"""Reads what has nothing to hide, at the top."""
_plain_list = msgspec.json.Decoder(list[_Plain])  # type: ignore[valid-type]
_handle = msgspec.json.Decoder(msgspec.defstruct("_Handle", [(HANDLE, msgspec.Raw, _NULL)]))
_fields = msgspec.json.Decoder(Fields)


def may_hide(data: bytes) -> bool:
    """Return whether an answer, or a batch of events, may have a handle in it: a few searches, no
    parsing.
    """
    if data.find(_NAME) >= 0 and data.count(_NAME) != data.count(_NULL_NAME) + data.count(
        _SPACED_NULL_NAME
    ):
        return True
    return data.find(_REMOTE) >= 0


def is_plain(event: bytes) -> bool:
    """Return whether an event is one line of data with nothing at its top but fields that clients
    know, and without handles.
    """
    try:
        _plain.decode(event[_DATA:])
    except UNREADABLE:
        return False
    return True


def without_inside(body: bytes) -> tuple[bytes, bytes | None]:
    """Return a completion, a chat or the JSON of one of their events as clients see it, and the
    handle that it has.

    None: it has no handle. What can't be read is returned as it is.
    """
    try:
        _plain.decode(body)
    except UNREADABLE:
        pass
    else:
        return (_deeply(body) if may_hide(body) else body), None
    if body.count(b'":') > _MAX_KEYS:
        return _without_named(body)
    try:
        fields = _fields.decode(body)
    except UNREADABLE:
        return body, None
    if len(fields) > _MAX_FIELDS:
        return _without_named(body)
    handle = bytes(fields.get(HANDLE, _NULL))
    body = _without(body, fields)
    return (_deeply(body) if may_hide(body) else body), None if handle == b"null" else handle


def event_without_inside(event: bytes) -> tuple[bytes, bytes | None]:
    """Return a whole event of such a stream as clients see it, and the handle that it has."""
    lines = sse.data_lines(event)
    json = b"\n".join([sse.payload(line) for line in lines])
    shown, handle = without_inside(json)
    if shown is json:
        return event, handle
    others = [line + b"\n" for line in event.split(b"\n") if line and not line.startswith(b"data:")]
    return b"".join([*others, sse.data(shown)]), handle


def batch_without_inside(batch: bytes) -> tuple[bytes, bytes | None]:
    """Return whole events of such a stream as clients see them, and the last handle that they
    have.
    """
    parts = batch.split(sse.END)
    if not may_hide(batch) and _are_plain(parts):
        return batch, None
    events: list[bytes] = []
    handle = None
    changed = False
    for bare in parts:
        if bare:
            own = bare + sse.END
            event, found = event_without_inside(own)
            events.append(event)
            handle, changed = found or handle, changed or event is not own
    return (b"".join(events) if changed else batch), handle


def _are_plain(events: Sequence[bytes]) -> bool:
    """Return whether `is_plain` says so of all these events but for end marks, by one call of the
    parser. Empty ones are none.
    """
    listed = b",".join([one[_DATA:] for one in events if one and not sse.is_done(one)])
    try:
        _plain_list.decode(b"[%b]" % listed)
    except UNREADABLE:
        return False
    return True


def passed_without_inside(body: bytes) -> bytes:
    """Return the answer of a route that one engine serves whole, or the JSON of one of its events,
    as clients see it.

    Its objects may be the model's or the client's own (inputs of tools, schemas): only the fields
    at the top are looked at, and those of the `response` of an event.
    """
    if not may_hide(body):
        return body
    if body.count(b'":') > _MAX_KEYS:
        return _without_named(body)[0]
    try:
        fields = _fields.decode(body)
        inner = (
            _fields.decode(fields["response"])
            if bytes(memoryview(fields.get("response", _NULL))[:1]) == b"{"
            else None
        )
    except UNREADABLE:
        return body
    body = _without(body, fields)
    if inner is not None and _inside_of(inner):
        own = bytes(fields["response"])
        body = body.replace(own, _without(own, inner), 1)
    return body


def passed_events_without_inside(batch: bytes) -> bytes:
    """Return whole events of such a route as clients see them."""
    if not may_hide(batch):
        return batch
    lines = batch.split(b"\n")
    for at, line in enumerate(lines):
        if line.startswith(b"data: {"):
            json = line[len(b"data: ") :]
            shown = passed_without_inside(json)
            lines[at] = line if shown is json else b"data: " + shown
    return b"\n".join(lines)


def error_without_inside(body: bytes, status: int, engines: Sequence[str] = ()) -> bytes:
    """Return an engine's error as clients see it.

    A failure (5xx) shows no addresses: it may be about other engines, while a refusal is about the
    client's own words. `engines`: the URLs of engines, which neither of them shows.
    """
    body = passed_without_inside(body)
    if may_hide(body):
        body = _deeply(body)
    for url in engines:
        place = url.partition("://")[2].encode()
        if not place.isalnum() and place in body:
            body = body.replace(url.encode(), b"an engine").replace(place, b"an engine")
    return _ADDRESS.sub(b"an address", body) if status >= 500 else body


def error_events_without_inside(batch: bytes, engines: Sequence[str]) -> bytes:
    """Return the last events of such a route's stream with the errors among them as clients see
    these: as failures.
    """
    if (
        batch.find(b"\nevent: error\n") < 0
        and not batch.startswith(b"event: error\n")
        and _ERROR.search(batch) is None
    ):
        return batch
    events = batch.split(sse.END)
    for at, event in enumerate(events):
        if event.startswith(b"event: error\n") or _ERROR.search(event):
            events[at] = error_without_inside(event, 500, engines)
    return sse.END.join(events)


def _without(body: bytes, fields: Fields) -> bytes:
    """Return an object with `null` in place of the values that no client may see. `fields`: its
    fields.
    """
    names = _inside_of(fields)
    if len(names) > _MOST_NAMES:
        return msgspec.json.encode(fields | dict.fromkeys(names, _NULL))
    for name in names:
        key, value = b'"%b":' % name.encode(), bytes(fields[name])
        start = body.find(key) + len(key)
        start += body.startswith(b" ", start)
        if body.count(key) != 1 or not body.startswith(value, start):
            return msgspec.json.encode(fields | dict.fromkeys(names, _NULL))
        body = b"%bnull%b" % (body[:start], body[start + len(value) :])
    if may_hide(body) and any(
        body.count(b'"%b":' % name.encode()) > 1 for name in fields if name.endswith(_SUFFIX)
    ):
        # A field is there twice, and only the last one counts above.
        return msgspec.json.encode(fields | dict.fromkeys(names, _NULL))
    return body


def _inside_of(fields: Fields) -> list[str]:
    return [
        name
        for name, value in fields.items()
        if name not in _PASSES and _is_inside(name, bytes(value))
    ]


def _is_inside(name: str, value: bytes) -> bool:
    if value == b"null":
        return False
    return _INSIDE_NAME.search(name.encode()) is not None or _INSIDE_VALUE.search(value) is not None


def _without_named(body: bytes) -> tuple[bytes, bytes | None]:
    """Return an answer with many keys, with `null` in place of its handle, and this."""
    try:
        handle = bytes(getattr(_handle.decode(body), HANDLE))
    except UNREADABLE:
        return body, None
    at = body.find(handle, body.rfind(b'"%b":' % HANDLE.encode()))
    if handle == b"null" or at < 0:
        return body, None
    return b"%bnull%b" % (body[:at], body[at + len(handle) :]), handle


def _deeply(body: bytes) -> bytes:
    """Return an answer that may have a handle below its top. Its bytes change only if there is
    one.
    """
    if body.count(b'":') > _MAX_KEYS:
        return body
    try:
        value = msgspec.json.decode(body)
        return msgspec.json.encode(value) if _strip(value) else body
    except UNREADABLE:
        return body


def _strip(value: object) -> bool:
    """Replace handles in a value by None, wherever they are. Return whether there was one."""
    if isinstance(value, list):
        found = [_strip(one) for one in value]  # all of them
        return any(found)
    if not isinstance(value, dict):
        return False
    changed = False
    for name, one in value.items():
        if one is not None and (
            name.endswith(_SUFFIX)
            or (isinstance(one, dict) and any(key in one for key in _HANDLE_KEYS))
        ):
            value[name] = None
            changed = True
        else:
            changed = _strip(one) or changed
    return changed
