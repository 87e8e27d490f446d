"""The writer of log lines: a thread, so that a standard error that nobody reads holds up only that
thread.

Owns the lines that are not written yet, limited in bytes and in number, and the count of dropped
lines.

A write to a full pipe blocks until somebody reads it, and a pipe can't be made non-blocking here:
that would change it for every process that shares it. So callers only put lines into a queue. The
thread sleeps while the queue is empty. The first line wakes it; it waits `GATHER` seconds for more
lines and writes all of them with one system call: to wake up for each line would cost more than the
line.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TextIO

MAX_BYTES = 4 << 20
"""Bytes of lines that may wait to be written: about 10,000 requests."""
MAX_LINES = 20_000
LINE_COST = 64
"""Bytes of memory that a line takes besides its text."""
GATHER = 0.1
"""Seconds from the first line of a batch until it is written."""
BATCH = 64 << 10
"""Bytes of one write, at most."""
RETRY = 0.05
"""Seconds until a write is tried again, if another process has made standard error non-blocking."""
CLOSE = 2.0
"""Seconds that the end of the process waits for lines to be written."""


class LineWriter:
    """Writes lines in the order in which they came, from any thread, and never makes a caller wait.

    Once the queue is full, lines are dropped until all of it is written. Then the line that
    `report` makes from their number is written. Lines that can't be written (a closed pipe, a full
    disk) count as dropped as well. `stream` None: all lines.
    """

    def __init__(
        self,
        stream: TextIO | None,
        report: Callable[[int], str],
        *,
        max_bytes: int = MAX_BYTES,
        max_lines: int = MAX_LINES,
    ) -> None:
        """Make one. Its thread starts with the first line."""
        self._stream = stream
        self._descriptor = _descriptor(stream)
        self._report = report
        self._max_bytes = max_bytes
        self._max_lines = max_lines
        self.dropped = 0
        """Lines that were dropped so far."""
        self._begin()
        # A child process that was forked has no such thread, and its parent writes the lines that
        # wait.
        begin = weakref.WeakMethod(self._begin)
        os.register_at_fork(after_in_child=lambda: (method := begin()) and method())

    def __repr__(self) -> str:
        return f"<LineWriter {len(self._lines)} lines wait, {self.dropped} were dropped>"

    def _begin(self) -> None:
        # Guards everything below, and is never held while something may block. It is reentrant,
        # since the garbage collector may run at any time, and a destructor may log.
        self._lock = threading.RLock()
        self._wake = threading.Lock()
        self._wake.acquire()
        self._lines: deque[bytes] = deque()
        self._size = 0
        """Bytes that wait or are being written."""
        self._reported = self.dropped
        """Dropped lines that were reported."""
        self._full = False
        self._asleep = True
        self._closed = False
        self._thread: threading.Thread | None = None

    def write(self, line: str) -> None:
        """Put a line into the queue, or drop it if there is no space. Raises nothing."""
        data = f"{line}\n".encode("utf-8", "backslashreplace")
        with self._lock:
            cost = len(data) + LINE_COST
            if self._size + cost > self._max_bytes or len(self._lines) >= self._max_lines:
                self._full = True
            if (
                self._full
                or self._closed
                or self._stream is None
                or (self._asleep and not self._woken())
            ):
                self.dropped += 1
                return
            self._lines.append(data)
            self._size += cost

    def _woken(self) -> bool:
        """Wake the thread, and return whether there is one."""
        self._asleep = False
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="log", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads: the next line tries again
                self._asleep = True
                return False
            self._thread = thread
        self._wake.release()
        return True

    def close(self, timeout: float = CLOSE) -> bool:
        """Write what waits, for `timeout` seconds at most. Return whether that was enough. Later
        lines are dropped.
        """
        with self._lock:
            self._closed = True
            thread = self._thread
            if thread is not None and self._asleep:
                self._woken()
        if thread is not None:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    # -- in the thread

    def _run(self) -> None:
        while not self._closed:
            self._wake.acquire()
            if not self._closed:
                time.sleep(GATHER)
            self._write_all()
        self._write_all()  # lines that came after the last write

    def _write_all(self) -> None:
        """Write until the queue is empty."""
        tried = False
        while True:
            with self._lock:
                batch = self._taken()
                if not batch:
                    self._full = False
                    dropped = self.dropped
                    if dropped == self._reported or tried:
                        self._asleep = not self._lines
                        if self._asleep:
                            return
                        continue
            if batch:
                data = b"".join(batch)
                written = self._written(data)
                with self._lock:
                    self._size -= len(data) + len(batch) * LINE_COST
                    self.dropped += 0 if written else len(batch)
            else:
                tried = True  # once per call: the report itself may be what can't be written
                report = f"{self._report(dropped - self._reported)}\n"
                if self._written(report.encode("utf-8", "backslashreplace")):
                    self._reported = dropped

    def _taken(self) -> list[bytes]:
        """Take the lines of one write from the queue. Called under the lock."""
        batch: list[bytes] = []
        size = 0
        while self._lines and (not batch or size + len(self._lines[0]) <= BATCH):
            size += len(self._lines[0])
            batch.append(self._lines.popleft())
        return batch

    def _written(self, data: bytes) -> bool:
        """Write all of it, however long that takes. Return whether it was possible."""
        try:
            if self._descriptor is None:
                assert self._stream is not None
                self._stream.write(data.decode())
                self._stream.flush()
                return True
            left = memoryview(data)
            while left:
                try:
                    left = left[os.write(self._descriptor, left) :]
                except BlockingIOError:
                    time.sleep(RETRY)
        except (OSError, ValueError):
            return False
        return True


def _descriptor(stream: TextIO | None) -> int | None:
    """Return the descriptor of a stream; None if it has none, as when tests capture it."""
    if stream is None:
        return None
    try:
        stream.flush()  # write what it holds first
        return stream.fileno()
    except (OSError, ValueError):
        return None
