"""A listening Unix socket and its file: one that a dead process has left is replaced, one that is
in use is not.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path


class UnixSocket:
    """A Unix socket that listens. `socket` is it; `close` also removes its file."""

    def __init__(self, path: str, backlog: int, *, only_owner: bool = False) -> None:
        """Bind it. Who may connect follows from the process's umask; `only_owner`: nobody but this
        user.

        Raises:
            OSError: another process listens there, or the file can't be made.
        """
        self._path = path
        self.socket = _bound(path, backlog, only_owner=only_owner)
        self._file = _identity(path)

    def close(self) -> None:
        """Close it, and remove its file, unless another process has replaced that."""
        self.socket.close()
        if self._file is not None and _identity(self._path) == self._file:
            with contextlib.suppress(OSError):
                Path(self._path).unlink()


def _bound(path: str, backlog: int, *, only_owner: bool) -> socket.socket:
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.lstat(path).st_mode) and not _is_served(path):
            Path(path).unlink()  # a process that was killed has left it
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # nobody else may open it, not even for a moment
    before = os.umask(0o177) if only_owner else None
    try:
        listener.bind(path)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    finally:
        if before is not None:
            os.umask(before)
    return listener


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(1.0)
        try:
            trial.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
