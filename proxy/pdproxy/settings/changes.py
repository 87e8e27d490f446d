"""What has changed between two versions of the settings: which parts are used at once, and which need a restart. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from pdproxy.settings.errors import KeyPath, spell_key
from pdproxy.settings.schema import Node, Settings
from pdproxy.settings.section import Section

NODES = ("pools", 0, "nodes")
LOG_LEVEL = ("observe", "log_level")
AT_ONCE = (NODES, LOG_LEVEL)
"""The settings that are used at once. All others need a restart; files that settings name are read again by themselves."""


@dataclass(frozen=True, slots=True)
class Changes:
    """`restart`: the settings that differ and need a restart, by their names. `log_level`: the new one, None if it is the same.

    `nodes`: the engines, None if they are the same.
    """

    nodes: tuple[Node, ...] | None
    log_level: str | None
    restart: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.nodes is not None or self.log_level is not None or bool(self.restart)


def changes(old: Settings, new: Settings) -> Changes:
    """Return what differs. Both have the same sources but for the content of their files."""
    differ = list(_differ(old, new, ()))
    return Changes(
        new.pool.nodes if NODES in differ else None,
        new.observe.log_level if LOG_LEVEL in differ else None,
        tuple(spell_key(path) for path in differ if path not in AT_ONCE),
    )


def _differ(old: Any, new: Any, path: KeyPath) -> list[KeyPath]:
    if old == new:
        return []
    if path == ("pools",) and len(old) == len(new):
        return [one for at in range(len(old)) for one in _differ(old[at], new[at], (*path, at))]
    if isinstance(old, Section) and type(old) is type(new):
        names = [field.name for field in msgspec.structs.fields(old)]
        return [one for name in names for one in _differ(getattr(old, name), getattr(new, name), (*path, name))]
    return [path]
