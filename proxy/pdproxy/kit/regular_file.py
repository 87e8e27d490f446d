"""Reads files that settings name: regular files up to a size.

A FIFO at such a path would hold up whoever opens it, and a device may never end. The kind is looked
at before the file is opened, since to open a device may do something, and once more behind it:
somebody may have put another file there in between.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class UnusableFileError(Exception):
    """A file can't be used. Its text says why, without the name: "can't be read: ...", "is a FIFO,
    ...", "is larger than ...".

    `is_missing`: there is no such file.
    """

    def __init__(self, why: str, *, is_missing: bool = False) -> None:
        super().__init__(why)
        self.is_missing = is_missing


def read_regular(path: str | Path, most: int) -> bytes:
    """Return the bytes of a regular file, `most` of them at most. Waits for nothing but the disk.

    Raises:
        UnreadableError: it can't be opened or read, is no regular file, or is larger.
    """
    try:
        _check_kind(os.stat(path).st_mode)  # noqa: PTH116 - as the file is opened: links are followed
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with os.fdopen(opened, "rb") as file:
            _check_kind(os.fstat(opened).st_mode)
            content = file.read(most + 1)
    except OSError as error:
        why = f"can't be read: {error.strerror or type(error).__name__}"
        raise UnusableFileError(why, is_missing=isinstance(error, FileNotFoundError)) from None
    except ValueError as error:  # a null byte in the path
        raise UnusableFileError(f"can't be read: {error}") from None
    if len(content) > most:
        raise UnusableFileError(f"is larger than {most} bytes")
    return content


def check_regular(path: str | Path, most: int | None = None) -> None:
    """Raise UnreadableError for what another library is about to open, if `read_regular` would.
    `most` None: any size.
    """
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError as error:
        raise UnusableFileError(
            f"can't be read: {error.strerror or type(error).__name__}"
        ) from None
    _check_kind(found.st_mode)
    if most is not None and found.st_size > most:
        raise UnusableFileError(f"is larger than {most} bytes")


def _check_kind(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        raise UnusableFileError(f"is {kind}, not a regular file")
