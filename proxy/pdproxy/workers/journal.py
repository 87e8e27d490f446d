"""The changes of the admin API that are in force, for workers that start: the parent keeps them,
and a forked worker has a copy.

Pure. Owns what is kept: of each engine that was added, and of each one that is drained, one change,
and the log level.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from pdproxy.web.admin.changes import Change

MAX_DRAINS = 65_536
"""Drains that are kept: far more than there are engines. The oldest ones make place."""


class Past(NamedTuple):
    """The changes that a worker takes at its start: engines, what was done to them and to the log,
    and what is not decided yet.

    `undecided`: with their numbers, in their order. `last`: the number of the last change of all.
    """

    engines: list[Change]
    others: list[Change]
    undecided: list[tuple[int, Change]]
    last: int


class ChangeJournal:
    """The changes so far. Numbers are those in the order of all changes."""

    def __init__(self) -> None:
        self._engines: dict[str, Change] = {}
        self._drains: dict[str, tuple[int, Change]] = {}
        self._level: Change | None = None
        self._undecided: dict[int, Change] = {}
        self._last = 0

    def __repr__(self) -> str:
        return (
            f"<Journal: {len(self._engines)} engines, {len(self._drains)} drained, "
            f"{len(self._undecided)} undecided>"
        )

    def begin(self, number: int, change: Change) -> None:
        """Note a change that workers are told of."""
        self._undecided[number] = change
        self._last = number

    def refuse(self, number: int) -> None:
        """Forget a change that is not in force."""
        del self._undecided[number]

    def accept(self, number: int, url: str, results: Collection[str]) -> None:
        """Keep a change that is in force. `url`: of its engine; `results`: what the workers have
        done.
        """
        change = self._undecided.pop(number)
        drains = change.kind == "drain" and change.fields.get("keep", True)
        if change.kind == "add":
            self._engines[url] = change
            # it is another engine than the one that was drained, or is used again
            if "wanted" not in results:
                self._drains.pop(url, None)
        elif drains:
            self._drains[url] = number, change
            if len(self._drains) > MAX_DRAINS:
                del self._drains[next(iter(self._drains))]
        elif change.kind == "undrain":
            self._drains.pop(url, None)
        elif change.kind == "log_level":
            self._level = change
        else:
            self._engines.pop(url, None)
            if "not_wanted" not in results:
                self._drains.pop(url, None)

    def gone(self, number: int, url: str) -> None:
        """An engine has left a worker that had made all changes up to this one, or serves there
        again: its drain is over.
        """
        drained = self._drains.get(url)
        if drained is not None and drained[0] <= number:
            del self._drains[url]

    def past(self) -> Past:
        """Return what a worker that starts has to do."""
        others = [change for _, change in self._drains.values()]
        if self._level is not None:
            others.append(self._level)
        return Past(list(self._engines.values()), others, list(self._undecided.items()), self._last)
