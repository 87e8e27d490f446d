"""The settings that a running proxy uses: sections of its own, whose values change while it runs.

All parts that keep one of these sections read its values when they need them. Where a part has made something of a value, its
owner (`app.live`) has it do so again.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pdproxy.settings.section import Section, fields_of

Kind = TypeVar("Kind", bound=Section)


def own(section: Kind) -> Kind:
    """Return settings whose sections nobody else has. Defaults are shared by all settings. Pools stay as they are."""
    sections = {name: one for name, one in _items(section) if isinstance(one, Section)}
    return msgspec.structs.replace(section, **{name: own(one) for name, one in sections.items()})


def put(section: Section, values: Section) -> None:
    """Have settings that `own` has returned hold other values in the fields that are marked (`Live`)."""
    for field in fields_of(type(section)):
        value = getattr(values, field.name)
        if isinstance(value, Section):
            put(getattr(section, field.name), value)
        elif field.live is not None:
            msgspec.structs.force_setattr(section, field.name, value)


def _items(section: Section) -> list[tuple[str, object]]:
    return [(field.name, getattr(section, field.name)) for field in fields_of(type(section))]
