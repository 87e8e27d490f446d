"""Bodies that are not plain JSON objects in UTF-8, read as the engines' own framework reads them.

Owns the answers of vLLM's server to a body before any model gets it: FastAPI accepts whatever
`json.loads` accepts from bytes (UTF-16, a byte order mark, NaN, lone surrogates), and refuses the
rest with its own texts. What it accepts is forwarded as plain JSON, so that an engine reads the
same objects. What it refuses is refused here, with the same texts, without an engine. Source:
FastAPI 0.136 `routing.get_request_handler`, vLLM 0.32.0 `entrypoints/serve/exception_handling`.
"""

from __future__ import annotations

import json
import re
from email.message import Message

from pdproxy.kit.errors import UnparsableError, UnreadableError
from pdproxy.wire.body_bounds import SMALL, Body, depth

JSON_MEDIA_TYPE = "application/json"
MAX_DEPTH = 100
"""Levels of nesting that any engine's parser accepts. Its limit is Python's recursion limit less
the depth of its stack.
"""

_MAX_INPUT = 200
_MAX_ERROR = 1000
_HIDDEN = (
    (re.compile(r" at 0x[0-9a-fA-F]+>"), ">"),
    (re.compile(r'\n?\s*File "[^"]+", line \d+, in \S+(\n\s+.*)?'), ""),
    (re.compile(r"/(?:home|usr|opt|var|tmp|root|lib|mnt|srv)(?:/[\w.\-]+)+"), "<path>"),
    (re.compile(r"(?:/[\w\-]+)+/[\w\-]+\.\w+"), "<path>"),
)


def check_content_type(content_type: str, body: Body) -> None:
    """Refuse a body that is not declared as JSON. Other JSON (`application/x+json`) is read first,
    if that is quick.

    Raises:
        UnreadableError: another content type; UnparsableError: such a body that can't be parsed.
    """
    if content_type.lower().split(";", maxsplit=1)[0] == JSON_MEDIA_TYPE:
        return
    message = Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype()
    if (
        0 < len(body) <= SMALL
        and message.get_content_maintype() == "application"
        and (subtype == "json" or subtype.endswith("+json"))
    ):
        load(body)
    raise UnreadableError(
        f"1 validation error:\n  Unsupported Media Type: Only '{JSON_MEDIA_TYPE}' is allowed"
    )


def load(body: Body) -> object:
    """Return the value that a body holds.

    Raises:
        UnreadableError: it is not JSON; UnparsableError: it is not text, or has nesting or a number
            beyond the parser's limits.
    """
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        found = {"type": "json_invalid", "loc": f"body.{error.pos}", "msg": "JSON decode error"}
        raise _refused(
            {**found, "input": "<dict of 0 items>", "ctx": {"error": error.msg}}
        ) from None
    except (ValueError, RecursionError):
        raise UnparsableError from None


def load_object(body: Body) -> dict[str, object]:
    """Return the object that a body holds.

    Raises:
        UnreadableError, UnparsableError: as `load`, and if it is not an object.
    """
    value = load(body) if body else None
    if isinstance(value, dict):
        return value
    if value is None:
        raise _refused({"type": "missing", "loc": "body", "msg": "Field required", "input": "None"})
    message = "Input should be a valid dictionary or object to extract fields from"
    raise _refused(
        {"type": "model_attributes_type", "loc": "body", "msg": message, "input": _shown(value)}
    )


def dump(value: object) -> bytes:
    """Return what `load` returned as plain JSON in ASCII, but for NaN and infinities, which an
    engine's parser accepts.

    Raises:
        UnparsableError: it is nested too deeply.
    """
    try:
        return json.dumps(value, separators=(",", ":")).encode("ascii")
    except (RecursionError, ValueError):
        raise UnparsableError from None


def readable(raw: bytes) -> bool:
    """Return whether every engine's parser surely accepts a piece of JSON that is known to be
    well-formed.
    """
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH or depth(raw) <= MAX_DEPTH


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"<list of {len(value)} items>"
    text = str(value)
    return text if len(text) <= _MAX_INPUT else text[:_MAX_INPUT] + "...[truncated]"


def _refused(found: dict[str, object]) -> UnreadableError:
    text = str(found)
    if len(text) > _MAX_ERROR:
        text = text[:_MAX_ERROR] + "...[truncated]"
    message = f"1 validation error:\n  {text}"
    for pattern, replacement in _HIDDEN:
        message = pattern.sub(replacement, message)
    return UnreadableError(message.strip(), param=str(found["loc"]))
