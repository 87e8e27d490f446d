"""Shim."""

from __future__ import annotations

import msgspec

from pdproxy.tokens.ids import TokenIds
from pdproxy.wire.request import Parsed


class Ask(msgspec.Struct, frozen=True):
    """Shim."""

    model: str | None
    prompt_bytes: int
    now: float
    ids: TokenIds | None = None
    parsed: Parsed | None = None
