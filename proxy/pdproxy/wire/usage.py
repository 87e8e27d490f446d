"""Token counts of several answers as those of one, whatever fields an engine's version has in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


def add_up(usages: Sequence[bytes]) -> bytes:
    """Return one `usage` object from several: numbers are added, objects field by field, what is null everywhere stays so.

    Raises:
        msgspec.MsgspecError: one of them is not JSON.
    """
    return msgspec.json.encode(_sum([msgspec.json.decode(usage) for usage in usages]))


def _sum(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    if known and all(isinstance(value, dict) for value in known):
        names = dict.fromkeys(name for value in known for name in value)
        return {name: _sum([value.get(name) for value in known]) for name in names}
    if known and all(isinstance(value, int | float) and not isinstance(value, bool) for value in known):
        return sum(known)
    return known[0] if known else None
