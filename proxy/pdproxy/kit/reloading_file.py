"""Values that are read from files, and read again when the files change: keys, certificates.

Owns two rules for files that change while the process runs. A file is read once it was the same at
two looks: somebody may be writing it, and a part of a file may allow more than all of it. If a file
can't be used, the last good value stays, and the failure is logged once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from pdproxy.kit.regular_file import UnusableFileError, read_regular

logger = logging.getLogger("pdproxy.files")

T = TypeVar("T")
Stamp = tuple[int, ...] | None


class ReloadingFile(Generic[T]):
    """A value that `read` makes of the files at `paths`. `name` is its setting, for the log.

    `of_lines`: a line without its end may be a part of one, so a file that was written in place
    needs a newline at its end. A file that was put in the place of another one does not, nor does
    the first one.
    """

    def __init__(
        self, name: str, paths: Iterable[str], read: Callable[[], T], *, of_lines: bool = False
    ) -> None:
        """Read it for the first time; raise what `read` raises."""
        self.name = name
        self.failure: str | None = None
        """Why the files can't be used as they are now; None while the value is that of the
        files.
        """
        self.is_changing = False
        """Whether the files were not the same at the last two looks."""
        self._paths = tuple(paths)
        self._read = read
        self._of_lines = of_lines
        # Before reading: a change in between is read twice, but not missed.
        self._stamps_read = self._stamps_seen = self._stamps()
        self._in_place = [False] * len(self._paths)
        """Whether each file was written in place since it was put there."""
        self._value = read()

    def __repr__(self) -> str:
        return f"<ReloadingFile {self.name}: {self.failure or 'good'}>"

    def __call__(self) -> T:
        """Return the newest good value."""
        return self._value

    def reload_if_changed(self) -> bool:
        """Read the files again if they have changed, or could not be used, and are as at the last
        look.

        Return whether they were read.
        """
        stamps, before = self._stamps(), self._stamps_seen
        self._stamps_seen = stamps
        self.is_changing = stamps != before
        if self.is_changing or (stamps == self._stamps_read and self.failure is None):
            return False
        value, failure = self._value, None
        in_place = [*map(_is_written_in_place, self._stamps_read, stamps, self._in_place)]
        try:
            value = self._read()
            if self._of_lines:
                self._check_last_lines(stamps, in_place)
        except (OSError, ValueError) as error:
            failure = str(error)
        self.is_changing = self._stamps() != stamps
        if self.is_changing:
            return False
        self._stamps_read, self._in_place = stamps, in_place
        if failure is None:
            self._value = value
            logger.info("%s was read again", self.name)
        elif failure != self.failure:
            # The same failure is not logged each second: `/ready` shows it for as long as it lasts.
            logger.error(
                "%s can't be read again, the value from before stays in use: %s", self.name, failure
            )
        self.failure = failure
        return True

    def _check_last_lines(self, stamps: list[Stamp], in_place: list[bool]) -> None:
        """Raise ValueError if a file was written in place, and its last line has no end."""
        for path, found, is_in_place in zip(self._paths, stamps, in_place, strict=True):
            if found is None or not is_in_place:
                continue
            try:
                content = read_regular(path, found[2])
            except UnusableFileError as error:
                raise ValueError(f"{self.name}: {path}: {error}") from None
            if content and not content.endswith((b"\n", b"\r")):
                raise ValueError(
                    f"{self.name}: {path}: has no newline behind its last line, which may be a "
                    f"part of a line: "
                    "add one, or replace the file by renaming another one"
                )

    def _stamps(self) -> list[Stamp]:
        return [stamp(path) for path in self._paths]


def _is_written_in_place(before: Stamp, now: Stamp, was: bool) -> bool:
    """Return whether a file is the one from before, and has another content. `was`: whether that
    was so before.
    """
    if before is None or now is None or before[:2] != now[:2]:
        return False
    return was or before[2:4] != now[2:4]  # another mode changes no more than the last of its times


def stamp(path: str) -> Stamp:
    """Return what differs once a file has changed, None if it can't be found."""
    try:
        found = os.stat(path)  # noqa: PTH116 - follows links: Kubernetes replaces a link to renew a secret
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
