"""The settings that a running proxy uses: sections of its own, whose values change while it runs.

All parts that keep one of these sections read its values when they need them. Where a part has made something of a value, its
owner (`app.live`) has it do so again.
"""

from __future__ import annotations

import msgspec

from pdproxy.settings.schema import Settings
from pdproxy.settings.section import Section

SECTIONS = ("deadlines", "limits", "overload", "tenants", "media", "health", "outliers", "probes")


def own(settings: Settings) -> Settings:
    """Return settings whose sections nobody else has. Defaults are shared by all settings."""
    return msgspec.structs.replace(
        settings, **{name: msgspec.structs.replace(getattr(settings, name)) for name in SECTIONS}
    )


def put(settings: Settings, values: Settings) -> None:
    """Have settings that `own` has returned hold other values in these sections."""
    for name in SECTIONS:
        section: Section = getattr(settings, name)
        for field in msgspec.structs.fields(section):
            msgspec.structs.force_setattr(section, field.name, getattr(getattr(values, name), field.name))
