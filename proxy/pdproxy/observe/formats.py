"""The formats of a log line, text and JSON, and their bounds: no text of a client or an engine makes a line long, or two of one.

Each value is cut to `MAX_VALUE` characters and shows how long it was. Where a whole line is still over `MAX_LINE`, its values are
cut shorter before it is made, so that every line can be read. Exceptions are shown by their types and places alone: their words
may quote a prompt.
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
_CUTS = (1, 8, 64)
"""What both are divided by, one after the other, until the line is short enough."""
_OFTEN = 256
"""Characters of a word that is kept, since it may come again: an engine's address, a model, a path."""
_PLAIN = frozenset((int, float, bool))
_EXCEPTION = "exception"

Fields = Mapping[str, object]


class Formatter(logging.Formatter):
    """What both formats share: the parts of a record, and the bounds of a line."""

    def __init__(self, clock: str) -> None:
        """Make one; `clock` is how `time.strftime` shows a second, which is kept from one line to the next."""
        super().__init__()
        self._clock = clock
        self._second = 0
        self._shown = ""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        fields: Fields = getattr(record, "fields", {})
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            fields = {**fields, _EXCEPTION: frames(error)}
        return self.line(record.created, record.levelname, record.name, record.getMessage().rstrip(), fields)

    def own_line(self, created: float, level: str, logger: str, message: str, fields: Fields) -> str:
        """Return the same as `line`, at less cost, of texts that are bounded already: every request writes such a line."""
        try:
            line = self._line(created, level, logger, message, fields)
            if len(line) <= MAX_VALUE:
                return line  # so no value is longer
        except (ValueError, TypeError):
            pass
        return self.line(created, level, logger, message, fields)

    def line(self, created: float, level: str, logger: str, message: str, fields: Fields) -> str:
        """Return the line of what happened at `created`, in Unix seconds."""
        try:
            if _is_short(message, fields):
                line = self._line(created, level, logger, message, fields)
                if len(line) <= MAX_LINE:
                    return line
        except (ValueError, TypeError, OverflowError, RecursionError):
            pass  # half of a surrogate pair, or a number of thousands of digits
        for by in _CUTS:
            bounds = MAX_VALUE // by, MAX_MESSAGE // by
            values = {name: _bounded(value, bounds[name == _EXCEPTION]) for name, value in fields.items()}
            line = self._line(created, level, logger, _encodable(truncate(message, bounds[1])), values)
            if len(line) <= MAX_LINE:
                return line
        return self._line(created, level, logger, "a line that is too long was left out", {})

    def _line(self, created: float, level: str, logger: str, message: str, fields: Fields) -> str:
        raise NotImplementedError

    def _time(self, second: int) -> str:
        if second != self._second:
            self._second, self._shown = second, time.strftime(self._clock, time.localtime(second))
        return self._shown


class TextFormatter(Formatter):
    """`time LEVEL logger message key=value ...`, values quoted where they hold spaces."""

    def __init__(self) -> None:
        """Make one. It keeps short words that it has shown."""
        super().__init__("%Y-%m-%d %H:%M:%S")
        self._word = lru_cache(256)(_as_word)

    def _line(self, created: float, level: str, logger: str, message: str, fields: Fields) -> str:
        second = int(created)
        if not message.isprintable():
            message = json.dumps(message)[1:-1]
        line = f"{self._time(second)},{int(1000 * (created - second)):03d} {level} {logger} {message}"
        for name, value in fields.items():
            # Most values of most lines are numbers, or words that stood in a line before.
            if type(value) is str:
                if not value.isalnum():
                    value = self._word(value) if len(value) <= _OFTEN else _as_word(value)
            elif type(value) not in _PLAIN:
                value = _as_word(str(value))
            line += f" {name}={value}"
        return line


class JsonFormatter(Formatter):
    """One JSON object a line."""

    def __init__(self) -> None:
        """Make one."""
        super().__init__("%Y-%m-%dT%H:%M:%S%z")

    def _line(self, created: float, level: str, logger: str, message: str, fields: Fields) -> str:
        line: dict[str, object] = {
            "time": self._time(int(created)),
            "level": level.lower(),
            "logger": logger,
            "message": message,
            **fields,
        }
        return msgspec.json.encode(line, enc_hook=str).decode()


def formatter(log_format: str) -> Formatter:
    """Return that of a format: "json" or "text"."""
    return JsonFormatter() if log_format == "json" else TextFormatter()


_SEPARATORS = re.compile(r'[ "=]')


def _as_word(text: str) -> str:
    if text and text.isprintable() and not _SEPARATORS.search(text):
        return text
    return json.dumps(text)  # escapes whatever a terminal would act on


def _is_short(message: str, fields: Fields) -> bool:
    """Tell whether nothing need be cut. Every request asks."""
    for value in fields.values():
        kind = type(value)
        if (kind is str and len(value) > MAX_VALUE) or (kind is not str and kind not in _PLAIN):  # type: ignore[arg-type]
            return False
    return len(message) <= MAX_MESSAGE


def _bounded(value: object, most: int) -> object:
    """Return a value as a line can show it: numbers and short texts as they are, long ones cut, of lists the first items."""
    if isinstance(value, str):
        return _encodable(truncate(value, most))
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= 64 else f"a number of {value.bit_length()} bits"
    if isinstance(value, list | tuple):
        items = [_bounded(item, most) for item in value[:MAX_ITEMS]]
        return items if len(value) <= MAX_ITEMS else [*items, f"{len(value) - MAX_ITEMS} more"]
    return _encodable(truncate(str(value), most))


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
