"""The formats of a log line, text and JSON, and their limits: no text from outside makes a line too
long, or makes two of it.

Each value is truncated to `MAX_VALUE` characters and shows its length. If a whole line is still
over `MAX_LINE`, its values are truncated further before it is made, so that every line can be read.
Exceptions are shown by their types and places only: their messages may quote a prompt.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from types import NoneType
from typing import Any

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
"""Characters of a value whose quoted form is cached, since it may be logged again: an engine's
address, a model, a path.
"""
_MAX_SHAPES = 256
"""Combinations of types of values, of lines that each request writes, that are remembered."""
_NUMBERS = frozenset((int, float, bool))
_EXCEPTION = "exception"

Fields = Mapping[str, object]
_Pick = Callable[[Sequence[object]], Any]
_Shape = tuple[str, _Pick, tuple[int, ...], _Pick]
"""A template of a line, the values that it takes, the places of those that are texts, and these
texts.
"""


class Formatter(logging.Formatter):
    """The base of both formats: the parts of a record, and the limits of a line."""

    def __init__(self, clock: str) -> None:
        """`clock` is the format of `time.strftime` for a second, whose text is kept for the next
        lines.
        """
        super().__init__()
        self._clock = clock
        self._second = 0
        self._shown = self._zone = ""
        self.always: Fields = {}
        """Fields at the end of each line. Read only."""
        self.of_task: Callable[[], Fields] | None = None
        """Returns further fields of a record, by the task that logs it; None: there are none."""

    def show_always(self, fields: Fields) -> None:
        """Have these fields at the end of each line from now on."""
        self.always = fields

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        fields: Fields = getattr(record, "fields", {})
        if self.of_task is not None:
            fields = {**fields, **self.of_task()}
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            fields = {**fields, _EXCEPTION: frames(error)}
        return self.line(
            record.created, record.levelname, record.name, record.getMessage().rstrip(), fields
        )

    def own_line(
        self,
        created: float,
        level: str,
        logger: str,
        message: str,
        names: Sequence[str],
        values: Sequence[object],
    ) -> str:
        """Return the same as `line`, at less cost, for texts that are short already: every request
        writes such a line.

        Fields without a value (None) are left out. `names`: always the same ones.
        """
        try:
            line = self._own_line(created, level, logger, message, names, values)
            # A line that is shorter than a value may be has no value that is too long.
            if len(line) <= MAX_VALUE or (len(line) <= MAX_LINE and _are_short(values)):
                return line
        except (ValueError, TypeError):
            pass
        return self.line(created, level, logger, message, _with_value(names, values))

    def _own_line(
        self,
        created: float,
        level: str,
        logger: str,
        message: str,
        names: Sequence[str],
        values: Sequence[object],
    ) -> str:
        return self._line(created, level, logger, message, _with_value(names, values))

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
            values = {
                name: _bounded(value, limits[name == _EXCEPTION]) for name, value in fields.items()
            }
            line = self._line(
                created, level, logger, _encodable(truncate(message, limits[1])), values
            )
            if len(line) <= MAX_LINE:
                return line
        return self._line(created, level, logger, "a line that is too long was left out", {})

    def _line(self, created: float, level: str, logger: str, message: str, fields: Fields) -> str:
        raise NotImplementedError

    def _time(self, created: float) -> str:
        """Return the local time with milliseconds and the zone's offset, as RFC 3339 has it:
        `2026-01-31T12:00:00.123+01:00`.
        """
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
        self._shapes: dict[tuple[type, ...], _Shape] = {}
        """By the types of an own line's values. The fields of each line are in them."""

    def show_always(self, fields: Fields) -> None:
        """See `Formatter`."""
        super().show_always(fields)
        self._shapes.clear()

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

    def _own_line(
        self,
        created: float,
        level: str,
        logger: str,
        message: str,
        names: Sequence[str],
        values: Sequence[object],
    ) -> str:
        # Nearly all these lines have values of the same types at the same places: what that decides
        # is decided once.
        types = tuple(map(type, values))
        shape = self._shapes.get(types)
        if shape is None:
            shape = self._shape_of(types, names)
        template, present, places, texts = shape
        found = texts(values)
        together = "".join(found)
        if not together.isprintable() or _SEPARATORS.search(together) or "" in found:
            values = list(values)
            for at in places:
                text: str = values[at]  # type: ignore[assignment]
                if not text.isalnum():
                    values[at] = self._cached(text) if len(text) <= _MAX_CACHED else _quoted(text)
        return template % (self._time(created), level, logger, message, *present(values))

    def _shape_of(self, types: tuple[type, ...], names: Sequence[str]) -> _Shape:
        present = [at for at, one in enumerate(types) if one is not NoneType]
        if any(types[at] is not str and types[at] not in _NUMBERS for at in present):
            raise TypeError("a value that is neither a text nor a number")
        if len(self._shapes) >= _MAX_SHAPES:
            self._shapes.clear()
        always = [f"{name}={value}".replace("%", "%%") for name, value in self.always.items()]
        template = " ".join(["%s %s %s %s", *[f"{names[at]}=%s" for at in present], *always])
        places = tuple(at for at in present if types[at] is str)
        shape = template, itemgetter(*present), places, itemgetter(*places)
        self._shapes[types] = shape
        return shape


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
    """Return whether nothing must be truncated."""
    return len(message) <= MAX_MESSAGE and _are_short(fields.values())


def _are_short(values: Iterable[object]) -> bool:
    for value in values:
        kind = type(value)
        if (kind is str and len(value) > MAX_VALUE) or (  # type: ignore[arg-type]
            kind is not str and kind not in _NUMBERS and value is not None
        ):
            return False
    return True


def _with_value(names: Sequence[str], values: Sequence[object]) -> Fields:
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}


def _bounded(value: object, limit: int) -> object:
    """Return a value in the form for a line: numbers as they are, texts truncated, the first items
    of lists.
    """
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
