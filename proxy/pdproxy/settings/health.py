"""The section `health`: engines that stand still, and how an engine that was out of use is let in again.

Owns names, units, bounds and defaults.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pdproxy.settings.section import Section

OffOrSeconds = Annotated[float, Meta(ge=0, le=604_800)]
"""Seconds; 0 turns it off."""


class Health(Section, frozen=True):
    """Engines that stand still, and engines that come back. In seconds."""

    slow_start: OffOrSeconds = 10.0
    """Behind the first good request of an engine whose breaker was open: it has two places, and twice as many after each good
    one, until this time is over. A thousand requests at once could push it over again. 0: it gets all at once."""
