"""The name of a model as a body has it, at a bounded length: it is kept with the request, logged and counted.

Owns what is too long for a name. The body goes to an engine as it came, and the engine answers that it has no such model.
"""

from __future__ import annotations

import msgspec

LONGEST_MODEL = 256
"""Characters of a model's name. Longer ones that an engine lists are left out."""
_SURELY_LONGER = 12 * LONGEST_MODEL + 2
"""Bytes of JSON: a character takes 12 at the most, as two escapes."""

_decoder = msgspec.json.Decoder(str | None)


def model_name(raw: msgspec.Raw | None) -> str | None:
    """Return the name that a body's field holds, None for none.

    Of a name that is too long only its beginning is returned, with its length. That is still longer than a name may be, so it
    is the name of no model.

    Raises:
        msgspec.MsgspecError, UnicodeDecodeError: it is no text.
    """
    if raw is None:
        return None
    if len(raw) > _SURELY_LONGER:
        beginning = bytes(memoryview(raw)[: 4 * LONGEST_MODEL + 1])
        if beginning[:1] == b'"':  # not decoded: it may be as long as the body
            return _cut(beginning[1:].decode("utf-8", "replace"), len(raw))
    name = _decoder.decode(raw)
    return name if name is None or len(name) <= LONGEST_MODEL else _cut(name, len(raw))


def _cut(name: str, size: int) -> str:
    return f"{name[:LONGEST_MODEL]}... ({size - 2} bytes)"
