"""The findings of rules: level, place, what was seen, and what to do about it. Owns levels and
their order.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["error", "warning", "note"]
"""Error: the engines will not work split. Warning: they work, with a problem later. Note: an
explanation; never fails a check.
"""

LEVELS: tuple[Level, ...] = ("error", "warning", "note")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. `code` is stable, for scripts; `where` are engines' URLs, empty: this
    machine.
    """

    level: Level
    code: str
    where: tuple[str, ...] = ()
    says: str
    remedy: str = ""
