"""Values that are read from files, and read again when the files change: keys, certificates.

Owns the rule for files that become unusable while the process runs: the last good value stays, and the failure is logged once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

logger = logging.getLogger("pdproxy.files")

T = TypeVar("T")


class ReloadingFile(Generic[T]):
    """A value that `read` makes of the files at `paths`. `name` is its setting, for the log."""

    def __init__(self, name: str, paths: Iterable[str], read: Callable[[], T]) -> None:
        """Read it for the first time; raise what `read` raises."""
        self.name = name
        self.failure: str | None = None
        """Why the files can't be used as they are now; None while the value is that of the files."""
        self._paths = tuple(paths)
        self._read = read
        self._stamps_read = self._stamps()  # before reading: a change in between is read twice, but not missed
        self._value = read()

    def __repr__(self) -> str:
        return f"<ReloadingFile {self.name}: {self.failure or 'good'}>"

    def __call__(self) -> T:
        """Return the newest good value."""
        return self._value

    def reload_if_changed(self) -> bool:
        """Read the files again if they have changed, or could not be used. Return whether that was so."""
        stamps = self._stamps()
        if stamps == self._stamps_read and self.failure is None:
            return False
        self._stamps_read = stamps
        try:
            self._value = self._read()
        except (OSError, ValueError) as error:
            # The same failure is not logged each second: `/ready` shows it for as long as it lasts.
            if self.failure != str(error):
                logger.error("%s can't be read again, the value from before stays in use: %s", self.name, error)  # noqa: TRY400
            self.failure = str(error)
        else:
            self.failure = None
            logger.info("%s was read again", self.name)
        return True

    def _stamps(self) -> list[tuple[int, ...] | None]:
        return [stamp(path) for path in self._paths]


def stamp(path: str) -> tuple[int, ...] | None:
    """Return what differs once a file has changed, None if it can't be found."""
    try:
        found = os.stat(path)  # noqa: PTH116 - follows links: Kubernetes replaces a link to renew a secret
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
