"""Windows of engines that several workers share: what one has learned of an engine holds for all.
Pure.

Owns this worker's column of the table of windows. Of the windows that workers show of an engine,
the one with the highest stamp counts. Before a change what others have written is read, so the
change is one of the newest window. A worker shows what it has taken over, too: a window is lost
only if all workers end.
"""

from __future__ import annotations

from pdproxy.kit.shared_table import Column, Others, bits_of, float_of, key_of
from pdproxy.scheduling.capacity import Load, Windows

MEASURES = 3
"""Numbers of the table for each engine: the stamp of its window; the window's bits, 0: none; the
stamp again.
"""
_STAMP, _WINDOW, _STAMP_AGAIN = range(MEASURES)
_NUMBERS = 10
"""Bits of a stamp that are the worker's number: stamps of two workers are never equal."""


class WorkerWindows(Windows):
    """The `Windows` of one of several workers. `column`: its own part of the table, `others`: those
    of others.
    """

    def __init__(self, column: Column, others: Others, number: int) -> None:
        super().__init__()
        self._column = column
        self._others = others
        self._number = number
        self._of_key: dict[int, str] = {}
        self._stamps: dict[str, int] = {}
        """Of the windows that are known here. 0: nobody has changed it."""

    def add(self, url: str) -> None:
        """Share an engine's window, which begins as the other workers have it."""
        self._of_key[key_of(url)] = url
        self._stamps.setdefault(url, 0)
        self._read(url)

    def remove(self, url: str) -> None:
        """Share it no more: the other workers remove the engine by themselves."""
        super().remove(url)
        key = key_of(url)
        self._of_key.pop(key, None)
        self._stamps.pop(url, None)
        self._column.drop(key)

    def look(self) -> bool:
        """Take over what other workers have changed. Return whether there was anything."""
        changed = self._others.changed(len(self._of_key))
        keys = (
            [*self._of_key] if changed is None else [key for key in changed if key in self._of_key]
        )
        return bool([key for key in keys if self._read(self._of_key[key])])

    def forget(self, url: str) -> None:
        """See `Windows`. It is forgotten for all workers."""
        self._read(url)
        before = self._windows.get(url)
        super().forget(url)
        self._show(url, before)

    def seen(self, load: Load, waiting: float | None, kv_usage: float) -> None:
        """See `Windows`. Call it in one worker only: a report that others note again would count as
        another one.
        """
        self._read(load.url)
        before = self._windows.get(load.url)
        super().seen(load, waiting, kv_usage)
        self._show(load.url, before)

    def refused(self, load: Load) -> None:
        """See `Windows`."""
        self._read(load.url)
        before = self._windows.get(load.url)
        super().refused(load)
        self._show(load.url, before)

    def _show(self, url: str, before: float | None) -> None:
        """Show the others an engine's window if it was changed here."""
        stamp = self._stamps.get(url)
        if stamp is not None and self._windows.get(url) != before:
            self._write(url, ((stamp >> _NUMBERS) + 1) << _NUMBERS | self._number)

    def _write(self, url: str, stamp: int) -> None:
        self._stamps[url] = stamp
        self._column.write(key_of(url), (stamp, bits_of(self._windows.get(url, 0.0)), stamp))

    def _read(self, url: str) -> bool:
        """Take over the window that others have of an engine. Return whether it is another one."""
        if (stamp := self._stamps.get(url)) is None:
            return False  # it was removed
        # A row that is being written has two stamps: it is read at the next look.
        rows = [row for row in self._others.each(key_of(url)) if row[_STAMP] == row[_STAMP_AGAIN]]
        newest = max(rows, default=None)
        if newest is None or newest[_STAMP] <= stamp:
            return False
        if newest[_WINDOW]:
            self._windows[url] = float_of(newest[_WINDOW])
        else:
            super().forget(url)
        self._write(url, newest[_STAMP])
        return True
