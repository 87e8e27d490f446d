"""The values of labels that all processes show: the same ones, however many processes there are and
however often they are started again.

Owns a file in memory to which each process adds the values that it is the first to see. The system
adds one record behind the other, and the first ones count, in this order. A process that is killed
may leave half a record, which counts as none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref

import msgspec

from pdproxy.observe.label_values import LabelValues

_AT_ONCE = 1 << 16
"""Bytes of one read."""


class _Record(msgspec.Struct, array_like=True):
    name: str
    most: int
    value: str


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Record).decode


class SharedLabelValues:
    """The file. Make it before the processes are forked."""

    def __init__(self) -> None:
        self._file = os.memfd_create("pdproxy label values")
        weakref.finalize(self, os.close, self._file)
        fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)

    def __repr__(self) -> str:
        return f"<SharedLabelValues: {os.fstat(self._file).st_size} bytes>"

    def of_process(self) -> LabelValues:
        """Return the values as a process sees them."""
        return _OfAll(self, self._file)


class _OfAll(LabelValues):
    def __init__(self, shared: SharedLabelValues, file: int) -> None:
        super().__init__()
        self._shared = shared  # the file is open as long as this is
        self._file = file
        self._at = 0
        """Up to where the file was read."""

    def _add(self, name: str, most: int, value: str) -> None:
        """See `LabelValues`. What is not written, for want of memory, is not shown."""
        self._read()
        values = self._shown.setdefault(name, set())
        if value not in values and len(values) < most:
            with contextlib.suppress(OSError):
                os.write(self._file, _encode(_Record(name, most, value)) + b"\n")
            self._read()

    def _read(self) -> None:
        """Read what processes have added."""
        while b"\n" in (data := os.pread(self._file, _AT_ONCE, self._at)):
            whole = data[: data.rindex(b"\n")]
            self._at += len(whole) + 1
            for line in whole.split(b"\n"):
                with contextlib.suppress(msgspec.DecodeError):
                    one = _decode(line)
                    super()._add(one.name, one.most, one.value)
