"""Which engines nothing happened to, and since when. Pure."""

from __future__ import annotations

from collections.abc import Iterable

AFTER = 15.0
"""Seconds behind a fault until its engine must be usable again: cooldowns, canaries, probes, a
transfer that waits.
"""


class Soundness:
    """The times at which engines were disturbed. `names`: of all engines."""

    def __init__(self, names: Iterable[str]) -> None:
        self._disturbed: dict[str, list[tuple[float, float]]] = {name: [] for name in names}

    def disturbed(self, name: str, since: float, until: float) -> None:
        """Something was wrong with an engine, or with its links."""
        self._disturbed[name].append((since, until))

    def sound(self, since: float, until: float) -> list[str]:
        """Return the names of the engines to which nothing happened between two times, nor shortly
        before.
        """
        return [
            name
            for name, times in self._disturbed.items()
            if all(over + AFTER < since or begun > until for begun, over in times)
        ]
