"""The section `outliers`: engines that fail more often, or are slower, than their peers.

Owns names, units, bounds and defaults.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pdproxy.settings.section import AtOnce, Count, Seconds, Section, Switch

Share = Annotated[float, Meta(gt=0, le=1)]


class OutlierSettings(Section, frozen=True):
    """Engines that fail more often, or are slower, than the others of their role: they are excluded for a time."""

    interval: Switch[Annotated[float, Meta(ge=0, le=604_800)]] = 10.0
    """Seconds between two comparisons, each of the last half minute. 0: engines are not compared."""

    error_share: AtOnce[Share] = 0.5
    """Of an engine's requests: if so many fail, and at most half as many of its peers', it is excluded."""

    min_requests: AtOnce[Count] = 10
    """Requests by which an engine is judged at least."""

    slower_than: AtOnce[Annotated[float, Meta(gt=1, le=1000)]] = 3.0
    """Times the median of its peers, in seconds per prompt byte, per event in batches of its size, or until KV has come: an
    engine that is slower is excluded."""

    exclude_for: AtOnce[Seconds] = 30.0
    """Seconds for which an engine is excluded, times how often it was: 300 at most. Then one request shows how it is."""

    max_share: AtOnce[Share] = 0.34
    """Of the engines of a role, so many are excluded for this at once, at most. Of two, one may be; never the last."""
