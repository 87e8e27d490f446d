"""The name of a model in a body, at a bounded length: it is kept with the request, logged and
counted.

Owns the longest length of a name. The body is forwarded unchanged, and the engine answers that it
has no such model.
"""

from __future__ import annotations

import msgspec

MAX_MODEL_NAME = 256
"""Characters of a model's name. Models with longer names in an engine's list are ignored."""
_MAX_MODEL_BYTES = 12 * MAX_MODEL_NAME + 2
"""Bytes of a name in JSON: a character takes at most 12, as two escapes."""

_decoder = msgspec.json.Decoder(str | None)


def model_name(raw: msgspec.Raw | None) -> str | None:
    """Return the name in a body's field, None for none.

    Of a name that is too long only its beginning and its length are returned. That is still longer
    than a name may be, so no model has it.

    Raises:
        msgspec.MsgspecError, UnicodeDecodeError: it is not text.
    """
    if raw is None:
        return None
    if len(raw) > _MAX_MODEL_BYTES:
        beginning = bytes(memoryview(raw)[: 4 * MAX_MODEL_NAME + 1])
        if beginning[:1] == b'"':  # not decoded: it may be as long as the body
            return _shortened(beginning[1:].decode("utf-8", "replace"), len(raw))
    name = _decoder.decode(raw)
    return name if name is None or len(name) <= MAX_MODEL_NAME else _shortened(name, len(raw))


def _shortened(name: str, size: int) -> str:
    return f"{name[:MAX_MODEL_NAME]}... ({size - 2} bytes)"
