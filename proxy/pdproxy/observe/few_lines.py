"""Which lines are written that anybody may cause, also without a key: they must not fill the log,
nor keep others' lines out.

Owns these limits, and the count of the lines that are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

PER_SECOND = 10
"""Lines within a second, of all clients."""
PER_MINUTE = 10
"""Lines of one client within a minute."""


class FewLines:
    """One for all such lines of a process. `now`: monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._second = self._minute = 0
        self._in_second = 0
        self._of_clients: Counter[str] = Counter()
        """Lines of this minute by client: of clients with a line, so at most 60 times as many as in
        a second.
        """
        self._reported = 0
        self.left_out = 0
        """Lines that were not written, so far."""

    def __repr__(self) -> str:
        return f"<FewLines {self.left_out} left out>"

    def takes(self, client: str) -> bool:
        """Return whether a line that a client has caused is to be written."""
        second = int(self._now())
        if second != self._second:
            self._second, self._in_second = second, 0
            if second // 60 != self._minute:
                self._minute = second // 60
                self._of_clients.clear()
        if self._in_second >= PER_SECOND or self._of_clients[client] >= PER_MINUTE:
            self.left_out += 1
            return False
        self._in_second += 1
        self._of_clients[client] += 1
        return True

    def unreported(self) -> int:
        """Return how many were left out since the last call."""
        found, self._reported = self.left_out - self._reported, self.left_out
        return found
