"""Bodies that are not plain JSON objects in UTF-8, read as the engines' own framework reads them.

Owns what vLLM's server says of a body before any model looks at it: FastAPI takes whatever `json.loads` takes from bytes (UTF-16,
a byte order mark, NaN, lone surrogates), and words its refusals its own way. What it takes is handed on in canonical JSON, so
that an engine sees the same objects; what it refuses is refused here, in the same words, without an engine.
Source: FastAPI 0.136 `routing.get_request_handler`, vLLM 0.32.0 `entrypoints/serve/exception_handling`.
"""

from __future__ import annotations

import json
import re
from email.message import Message

from pdproxy.kit.errors import UnparsableError, UnreadableError
from pdproxy.wire.body_bounds import SMALL, Body, depth

JSON_MEDIA_TYPE = "application/json"
MOST_DEPTH = 100
"""Levels of nesting that any engine's parser takes. Its own bound is Python's recursion limit less the depth of its stack."""

_MOST_INPUT = 200
_MOST_ERROR = 1000
_HIDDEN = (
    (re.compile(r" at 0x[0-9a-fA-F]+>"), ">"),
    (re.compile(r'\n?\s*File "[^"]+", line \d+, in \S+(\n\s+.*)?'), ""),
    (re.compile(r"/(?:home|usr|opt|var|tmp|root|lib|mnt|srv)(?:/[\w.\-]+)+"), "<path>"),
    (re.compile(r"(?:/[\w\-]+)+/[\w\-]+\.\w+"), "<path>"),
)


def check_content_type(content_type: str, body: Body) -> None:
    """Refuse what is not declared as JSON.

    Raises:
        UnreadableError, UnparsableError: a body that calls itself some other JSON (`application/x+json`) is read first, unless
            that may take long: it is refused whatever it holds.
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
    raise UnreadableError(f"1 validation error:\n  Unsupported Media Type: Only '{JSON_MEDIA_TYPE}' is allowed")


def load(body: Body) -> object:
    """Return what a body holds, whatever it is.

    Raises:
        UnreadableError: it is not JSON; UnparsableError: its bytes are no text, its nesting or a number is beyond the parser.
    """
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        found = {"type": "json_invalid", "loc": f"body.{error.pos}", "msg": "JSON decode error"}
        raise _refused({**found, "input": "<dict of 0 items>", "ctx": {"error": error.msg}}) from None
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
    raise _refused({"type": "model_attributes_type", "loc": "body", "msg": message, "input": _shown(value)})


def dump(value: object) -> bytes:
    """Return canonical JSON of what `load` returned; NaN and infinities as an engine's parser takes them.

    Raises:
        UnparsableError: it is nested too deeply.
    """
    try:
        return json.dumps(value, separators=(",", ":")).encode("ascii")
    except (RecursionError, ValueError):
        raise UnparsableError from None


def readable(raw: bytes) -> bool:
    """Tell whether every engine's parser will surely take a piece of JSON that is known to be well-formed."""
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return raw.count(b"[") + raw.count(b"{") <= MOST_DEPTH or depth(raw) <= MOST_DEPTH


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"<list of {len(value)} items>"
    text = str(value)
    return text if len(text) <= _MOST_INPUT else text[:_MOST_INPUT] + "...[truncated]"


def _refused(found: dict[str, object]) -> UnreadableError:
    text = str(found)
    if len(text) > _MOST_ERROR:
        text = text[:_MOST_ERROR] + "...[truncated]"
    message = f"1 validation error:\n  {text}"
    for pattern, instead in _HIDDEN:
        message = pattern.sub(instead, message)
    return UnreadableError(message.strip(), param=str(found["loc"]))
