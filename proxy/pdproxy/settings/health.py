"""The section `health`: engines that stand still, and how an engine that was out of use is let in again.

Owns names, units, bounds and defaults.
"""

from __future__ import annotations

from pdproxy.settings.section import AtOnce, OffOrSeconds, Seconds, Section, Switch


class Health(Section, frozen=True):
    """Engines that stand still, and engines that come back. In seconds."""

    stalled_after: Switch[OffOrSeconds] = 10.0
    """An engine counts as standing still if its legs, its metrics and a request for one token show no sign for so long, or for as
    long as it was silent before while it worked, four times over. Its legs end then, and others serve what they can; a request
    under which a second engine stands still stays there for up to deadlines.prefill. 0: off."""

    canary_timeout: AtOnce[Seconds] = 5.0
    """The answer to a request for one token, by which an engine is asked whether it works."""

    canary_interval: AtOnce[Seconds] = 2.0
    """Between two such requests to an engine that stands still, doubled up to 30."""

    slow_start: AtOnce[OffOrSeconds] = 10.0
    """Behind the first good request of an engine that was excluded: it has two places, and twice as many after each good request,
    until this time is over. 0: it gets any number of requests at once."""
