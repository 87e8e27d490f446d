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
"""Every how many times the same is told again, for workers that have begun meanwhile."""


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
        self._told = 0

    def __repr__(self) -> str:
        return f"<PlacesOfAll {self._found}>"

    def resize(self, places: int | None, tokens: int = 0) -> None:
        """See `Bounded`."""
        found = _Told(places, tokens)
        if found != self._found:
            self._found, self._told = found, 0
            self._own.resize(places, tokens)

    def tell(self) -> None:
        """Tell what is new, and now and then what is not. Called several times per second."""
        if self._found is not None and self._told % AGAIN == 0:
            self._send(_encode(self._found))
        self._told += 1

    def received(self, body: bytes) -> None:
        """Take what the scheduler process has found."""
        told = _decode(body)
        self.resize(told.places, told.tokens)
