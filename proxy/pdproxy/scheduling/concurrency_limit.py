"""How many requests may be served at once so that they are done in the time that their clients give
them. Pure.

Owns this number, which is learned from requests that have ended. Where most clients name a time and
their requests need more than `FITS` of it, the number is lowered in proportion (Little's law), but
only if requests have needed longer the more were served at once, or if hardly any is in time: a
time that is too short for other reasons takes no places from anybody. Nor does one tenant take
places from others by times that can't be met: nothing is lowered while requests of tenants with
half of the weights fit. It grows again by a tenth for as long as requests fit and all places are
used, and by half while most requests have no time.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

FITS = 0.85
"""The part of its time that a request may be served for: the rest is for its wait, and for those
that take longer than others.
"""
GIVEN_UP = 1.5
"""A request that was given up counts as if it had needed so many times as long: nobody knows how
long it would have.
"""
_ROOM, _MUCH_ROOM = 0.95, 0.65
"""The parts of `FITS` below which there may be more requests, and many more."""
_MOST = 0.5
"""The part of all requests that must have a time: a few clients in a hurry take no places from
others.
"""
_MATTERS = 0.25
"""From what exponent on more requests at once are taken to be why they need so long."""
_HARDLY_ANY = 0.1
"""The part of the requests that are in time below which there is nothing to lose. Nothing else
shows then that there are too many: how long requests need that were given up is not known.
"""
_USED = 0.8
"""The part of the places that must be taken before there are more of them."""
_SLOWER, _FASTER, _MUCH_FASTER = 0.5, 1.1, 1.5
"""What the number is multiplied by in one step: at least, usually, and where there is much room."""
_NEARLY = -0.15
"""The largest `needed` of a tenant that clearly has enough places."""
_ENOUGH = 8
"""Requests that are looked at between two steps; fewer where there are fewer places."""
_GAIN = 0.1
_UNSURE = 0.1
"""The variance of the exponent, beside that of the times: with it one is weighed against the other,
as a Kalman filter does.
"""
_LEAST_NOISE = 0.01


class _Tenant:
    """What is known of a tenant while it has places."""

    __slots__ = ("ended", "needed", "places", "timed", "weight")

    def __init__(self) -> None:
        self.weight = 1.0
        self.places = self.timed = 0
        """Its places, and how many of them have a request with a time."""
        self.ended = 0
        """Its requests that have ended and had a time."""
        self.needed = 0.0
        """The mean over its requests of log(seconds that a request needed / seconds that a request
        may need).
        """


class ConcurrencyLimit:
    """The number, and what it is learned from. Times are monotonic seconds."""

    __slots__ = (
        "_changed",
        "_count",
        "_count_weight",
        "_exponent",
        "_late",
        "_load",
        "_needed",
        "_noise",
        "_seen",
        "_seen_weight",
        "_served",
        "_share",
        "_tenants",
        "places",
    )

    def __init__(self) -> None:
        self.places = math.inf
        """How many requests may be served at once; infinite: any number."""
        self._exponent = 1.0
        """Requests take as long as the number of those that are served at once to the power of
        this: 0 to 1.
        """
        self._noise = _UNSURE
        """The variance of what this does not explain."""
        self._load = 0.0
        """The logarithm of the number that is served at once, as a mean."""
        self._share = 0.0
        """The part of the requests that have a time."""
        # Means of the requests that began since the last step, and have ended.
        self._count = self._seen = 0
        """Those that were looked at, with a time, and all."""
        self._count_weight = self._seen_weight = 0
        """How many requests these stand for."""
        self._changed = -math.inf
        self._needed = 0.0
        """The mean over these requests of log(seconds that a request needed / seconds that a
        request may need).
        """
        self._late = 0.0
        """The part that was given up."""
        self._served = 0.0
        """How many were served at once."""
        self._tenants: dict[Hashable, _Tenant] = {}
        """Those with places: so there are no more of them than places."""

    def begun(self, name: Hashable, weight: float, *, timed: bool) -> None:
        """A request of a tenant gets a place. `timed`: whether it has a time. Matched by one
        `left`.
        """
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant()
        tenant.weight = weight
        tenant.places += 1
        if timed:
            tenant.timed += 1

    def left(
        self, name: Hashable, seconds: float | None, time: float | None, *, late: bool = False
    ) -> None:
        """A request leaves its place, after so many seconds, None if it was neither answered nor
        late. The others: see `ended`.

        Called for all requests, `ended` only for those that are learned from, and before: of the
        others, in time or without a time, there may be many more.
        """
        tenant = self._tenants[name]
        tenant.places -= 1
        if time is not None:
            tenant.timed -= 1
            if seconds is not None:
                self._share += _GAIN * (1 - self._share)
                tenant.ended += 1
                tenant.needed += max(_GAIN, 1 / tenant.ended) * (
                    _needed(seconds, time, late=late) - tenant.needed
                )
        elif seconds is not None:
            self._share -= _GAIN * self._share
        if not tenant.places:
            del self._tenants[name]

    def ended(
        self,
        now: float,
        begun: float,
        served: float,
        longer: float,
        time: float | None,
        weight: int = 1,
        *,
        late: bool,
    ) -> None:
        """Learn from a request that was served from `begun` on.

        `served`: the mean number of requests that were served at once meanwhile; `longer`: the
        logarithm of the time that it took in parts of what others like it took lately; `time`: the
        seconds that it had from its arrival on, None if it did not say; `weight`: the number of
        requests for which it stands; `late`: whether it was given up.
        """
        load = math.log(max(served, 1.0))
        if self._load:
            self._learn(load - self._load, longer)
            self._load += _GAIN * (load - self._load)
        else:
            self._load = load
        if begun < self._changed:
            return
        self._seen += 1
        self._seen_weight += weight
        self._served += (served - self._served) * weight / self._seen_weight
        if time is not None:
            self._count += 1
            self._count_weight += weight
            part = weight / self._count_weight
            self._needed += (_needed(now - begun, time, late=late) - self._needed) * part
            self._late += (late - self._late) * part
        if self._share > _MOST:
            if self._count >= min(_ENOUGH, self.places + 1):
                self._step(now)
        elif self._seen >= min(2 * _ENOUGH, self.places + 1):
            # Otherwise what was learned would hold for as long as nobody names a time any more.
            self._count = 0
            self._step(now)

    def _learn(self, off: float, longer: float) -> None:
        """Learn the exponent. `off`: the logarithm of how many more than usual were served at
        once.
        """
        wrong = longer - self._exponent * off
        self._noise += _GAIN * (wrong * wrong - self._noise)
        gain = _UNSURE * off / (_UNSURE * off * off + self._noise + _LEAST_NOISE)
        self._exponent = min(max(self._exponent + gain * wrong, 0.0), 1.0)

    def _step(self, now: float) -> None:
        needed = math.exp(self._needed) if self._count else 0.0
        matters = (self._exponent > _MATTERS or self._late > 1 - _HARDLY_ANY) and (
            needed <= 1 or self._agreed()
        )
        if needed > 1 and matters:
            self.places = max(self._served * max(1 / needed, _SLOWER), 1.0)
        elif (
            self.places < math.inf
            and self._served > _USED * int(self.places)
            and (needed < _ROOM or not matters)
        ):
            self.places *= _MUCH_FASTER if needed < _MUCH_ROOM else _FASTER
        self._count = self._seen = self._count_weight = self._seen_weight = 0
        self._changed = now

    def _agreed(self) -> bool:
        """Return whether tenants with more than half of the weights need fewer places. Of whom
        nothing is known is like all.
        """
        weights = needing = 0.0
        for tenant in self._tenants.values():
            weights += tenant.weight
            if 2 * tenant.timed > tenant.places and (not tenant.ended or tenant.needed > _NEARLY):
                needing += tenant.weight
        return needing > _MOST * weights if weights else True


def _needed(seconds: float, time: float, *, late: bool) -> float:
    """Return log(seconds that a request needed / seconds that the request may need)."""
    return math.log(max(seconds, 1e-3) * (GIVEN_UP if late else 1.0) / (FITS * max(time, 1e-3)))
