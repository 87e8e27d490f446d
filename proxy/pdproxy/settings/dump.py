"""The settings as YAML, for `pdproxy config print`. Keys and other secrets are masked
(`section.HIDDEN`).
"""

from __future__ import annotations

from typing import Any

import msgspec
import yaml

from pdproxy.settings.errors import MASK
from pdproxy.settings.schema import Settings
from pdproxy.settings.section import Section, fields_of, is_hidden


def dump(settings: Settings) -> str:
    """Return all settings, defaults included, as YAML that can be loaded again; keys are masked."""
    tree = msgspec.to_builtins(_masked(settings, Settings), builtin_types=())
    return yaml.safe_dump(_lists(tree), sort_keys=False, allow_unicode=True)


def _masked(value: Any, kind: Any) -> Any:
    if isinstance(value, Section):
        fields = {
            field.name: _masked(getattr(value, field.name), field.type)
            for field in fields_of(type(value))
        }
        return msgspec.structs.replace(value, **fields)
    if isinstance(value, tuple):
        return tuple(_masked(one, kind) for one in value)
    return MASK if value is not None and is_hidden(kind) else value


def _lists(tree: object) -> object:
    # PyYAML writes a tuple with a Python tag, which no safe loader accepts.
    match tree:
        case dict():
            return {name: _lists(value) for name, value in tree.items()}
        case list() | tuple():
            return [_lists(value) for value in tree]
        case _:
            return tree
