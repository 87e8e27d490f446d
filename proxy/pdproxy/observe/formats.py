"""The formats of a log line, text and JSON, and their limits: no text from outside makes a line too long, or makes two of it.

Each value is truncated to `MAX_VALUE` characters and shows its length. If a whole line is still over `MAX_LINE`, its values are
truncated further before it is made, so that every line can be read. Exceptions are shown by their types and places only: their
messages may quote a prompt.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from functools import lru_cache

import msgspec

from pdproxy.kit.frames import frames
from pdproxy.kit.text import truncate

MAX_VALUE = 512
"""Characters of a value, before it is quoted."""
MAX_MESSAGE = 8192
"""Characters of a message, and of the places of an exception."""
MAX_LINE = 32_768
"""Characters of a line."""
MAX_ITEMS = 32
"""Items of a list."""
_DIVISORS = (1, 8, 64)
"""Divisors of both limits, tried one after the other until the line is short enough."""
_MAX_CACHED = 256
"""Characters of a value whose quoted form is cached, since it may be logged again: an engine's address, a model, a path."""
_NUMBERS = frozenset((int, float, bool))
_EXCEPTION = "exception"

Fields = Mapping[str, object]


class Formatter(logging.Formatter):
    """The base of both formats: the parts of a record, and the limits of a line."""

    def __init__(self, clock: str) -> None:
        """`clock` is the format of `time.strftime` for a second, whose text is kept for the next lines."""
        super().__init__()
        self._clock = clock
        self._second = 0
        self._shown = self._zone = ""
        self.always: Fields = {}
        """Fields at the end of each line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        fields: Fields = getattr(record, "fields", {})
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            fields = {**fields, _EXCEPTION: frames(error)}
        return self.line(record.created, record.levelname, record.name, record.getMessage().rstrip(), fields)

    def own_line(self, created: float, level: str, logger: str, message: str, fields: Fields) -> str:
        """Return the same as `line`, at less cost, for texts that are short already: every request writes such a line."""
        try:
            line = self._line(created, level, logger, message, fields)
            # A line that is shorter than a value may be has no value that is too long.
            if len(line) <= MAX_VALUE or (len(line) <= MAX_LINE and _is_short(message, fields)):
                return line
        except (ValueError, TypeError):
            pass
        return self.line(created, level, logger, message, fields)

    def line(self, created: float, level: str, logger: str, message: str, fields: Fields) -> str:
        """Return the line of an event at `created`, in Unix seconds."""
        try:
            if _is_short(message, fields):
                line = self._line(created, level, logger, message, fields)
                if len(line) <= MAX_LINE:
                    return line
        except (ValueError, TypeError, OverflowError, RecursionError):
            pass  # half of a surrogate pair, or a number of thousands of digits
        for divisor in _DIVISORS:
            limits = MAX_VALUE // divisor, MAX_MESSAGE // divisor
            values = {name: _bounded(value, limits[name == _EXCEPTION]) for name, value in fields.items()}
            line = self._line(created, level, logger, _encodable(truncate(message, limits[1])), values)
            if len(line) <= MAX_LINE:
                return line
        return self._line(created, level, logger, "a line that is too long was left out", {})

    def _line(self, created: float, level: str, logger: str, message: str, fields: Fields) -> str:
        raise NotImplementedError

    def _time(self, created: float) -> str:
        """Return the local time with milliseconds and the zone's offset, as RFC 3339 has it: `2026-01-31T12:00:00.123+01:00`."""
        second = int(created)
        if second != self._second or not self._shown:
            there = time.localtime(second)
            zone = time.strftime("%z", there)
            self._second, self._shown = second, time.strftime(self._clock, there)
            self._zone = f"{zone[:3]}:{zone[3:]}"
        return f"{self._shown}.{int(1000 * (created - second)):03d}{self._zone}"


class TextFormatter(Formatter):
    """`time LEVEL logger message key=value ...`, values quoted where they hold spaces."""

    def __init__(self) -> None:
        """Make one. It caches the quoted forms of short values."""
        super().__init__("%Y-%m-%d %H:%M:%S")
        self._cached = lru_cache(256)(_quoted)

    def _line(self, created: float, level: str, logger: str, message: str, fields: Fields) -> str:
        if not message.isprintable():
            message = json.dumps(message)[1:-1]
        line = f"{self._time(created)} {level} {logger} {message}"
        for name, value in fields.items():
            # Most values of most lines are numbers, or values that were logged before.
            if type(value) is str:
                if not value.isalnum():
                    value = self._cached(value) if len(value) <= _MAX_CACHED else _quoted(value)
            elif type(value) not in _NUMBERS:
                value = _quoted(str(value))
            line += f" {name}={value}"
        for name, value in self.always.items():
            line += f" {name}={value}"
        return line


class JsonFormatter(Formatter):
    """One JSON object per line."""

    def __init__(self) -> None:
        """Make one."""
        super().__init__("%Y-%m-%dT%H:%M:%S")

    def _line(self, created: float, level: str, logger: str, message: str, fields: Fields) -> str:
        line: dict[str, object] = {
            "time": self._time(created),
            "level": level.lower(),
            "logger": logger,
            "message": message,
            **fields,
            **self.always,
        }
        return msgspec.json.encode(line, enc_hook=str).decode()


def make_formatter(log_format: str) -> Formatter:
    """Return the formatter of a format: "json" or "text"."""
    return JsonFormatter() if log_format == "json" else TextFormatter()


_SEPARATORS = re.compile(r'[ "=]')


def _quoted(text: str) -> str:
    if text and text.isprintable() and not _SEPARATORS.search(text):
        return text
    return json.dumps(text)  # escapes whatever a terminal would act on


def _is_short(message: str, fields: Fields) -> bool:
    """Return whether nothing must be truncated. Called for every request."""
    for value in fields.values():
        kind = type(value)
        if (kind is str and len(value) > MAX_VALUE) or (kind is not str and kind not in _NUMBERS):  # type: ignore[arg-type]
            return False
    return len(message) <= MAX_MESSAGE


def _bounded(value: object, limit: int) -> object:
    """Return a value in the form for a line: numbers as they are, texts truncated, the first items of lists."""
    if isinstance(value, str):
        return _encodable(truncate(value, limit))
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= 64 else f"a number of {value.bit_length()} bits"
    if isinstance(value, list | tuple):
        items = [_bounded(item, limit) for item in value[:MAX_ITEMS]]
        return items if len(value) <= MAX_ITEMS else [*items, f"{len(value) - MAX_ITEMS} more"]
    return _encodable(truncate(str(value), limit))


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
