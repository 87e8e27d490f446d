"""A dictionary of bounded size whose entries have an end each: what is remembered for some time of
what others may send.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol, TypeVar


class Expires(Protocol):
    """What has an end."""

    until: float
    """Until when it is kept, by the clock of whoever keeps it."""


K = TypeVar("K")
V = TypeVar("V", bound=Expires)


class Expiring(OrderedDict[K, V]):
    """At most `most` entries: one more, and the oldest is forgotten. Each `keep` makes an entry the
    newest.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: K, value: V) -> None:
        """Add an entry, or make it the newest. Its end is behind those of the others."""
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)

    def forget_old(self, now: float) -> None:
        """Forget the entries whose end has come."""
        while self and next(iter(self.values())).until <= now:
            self.popitem(last=False)
