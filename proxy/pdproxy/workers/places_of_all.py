"""How many requests all processes may serve at once, by what engines can take: the scheduler
process finds it, and tells the workers.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdproxy.app.capacity import Bounded

PLACES = "places"
"""The topic of these messages."""
AGAIN = 4
"""Every how many looks the same is told again, for workers that have begun meanwhile."""


class _Told(msgspec.Struct, array_like=True, frozen=True):
    places: int | None
    tokens: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Told).decode


class PlacesOfAll:
    """Bounds the requests of this process, `own`, and has others bound theirs. `send`: tells all
    others.
    """

    def __init__(self, own: Bounded, send: Callable[[bytes], None]) -> None:
        self._own = own
        self._send = send
        self._found: _Told | None = None
        self._looks = 0

    def __repr__(self) -> str:
        return f"<PlacesOfAll {self._found}>"

    def resize(self, places: int | None, tokens: int = 0) -> None:
        """See `Bounded`. All others are told."""
        found = _Told(places, tokens)
        if found != self._found:
            self._found, self._looks = found, 0
            self._own.resize(places, tokens)
            self._send(_encode(found))

    def look(self) -> None:
        """Tell the same now and then. Called several times per second."""
        self._looks += 1
        if self._found is not None and self._looks % AGAIN == 0:
            self._send(_encode(self._found))

    def received(self, body: bytes) -> None:
        """Take what the scheduler process has found."""
        told = _decode(body)
        if told != self._found:
            self._found = told
            self._own.resize(told.places, told.tokens)
