"""A set that keeps the order in which its members came. A set's own order follows addresses, so no
two runs have the same.
"""

from __future__ import annotations

from typing import Any, TypeVar

_T = TypeVar("_T")


class OrderedSet(dict[_T, Any]):
    """Members in the order in which they were added; a dict's iteration, length and `in`. The
    values are None.

    A subclass may keep something of each member there.
    """

    __slots__ = ()

    def add(self, member: _T) -> None:
        """Add a member, unless it is there."""
        self[member] = None

    def discard(self, member: _T) -> None:
        """Remove a member, if it is there."""
        self.pop(member, None)

    def remove(self, member: _T) -> None:
        """Remove a member that is there. Raises KeyError if it is not."""
        del self[member]
