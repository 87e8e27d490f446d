"""What a rule finds: how bad, where, what was seen, and what to do about it. Owns levels and their order."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["error", "warning", "note"]
"""An error keeps the engines from working split apart; a warning will hurt later; a note explains and never fails a check."""

LEVELS: tuple[Level, ...] = ("error", "warning", "note")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing an operator should know. `code` is stable, for scripts; `where` are engines' URLs, none: the machine."""

    level: Level
    code: str
    where: tuple[str, ...] = ()
    says: str
    remedy: str = ""
