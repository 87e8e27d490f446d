"""Log lines: one at INFO for each request, the way through the engines at DEBUG, trouble where it happens.

Owns the formats, text and JSON. No prompt and no key is ever logged: events hold none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TextIO

import msgspec

from pdproxy.observe.events import (
    DeadlinePassed,
    Event,
    Evicted,
    HandleEnded,
    KvCounted,
    KvNoticed,
    KvShortfall,
    KvTransferred,
    KvWaited,
    LegFailed,
    LegTimes,
    LoopBeat,
    NodeChanged,
    PairEjected,
    RequestEnded,
    ServedAlone,
    Tokenized,
    TokenizerJudged,
)

access = logging.getLogger("pdproxy.access")
legs = logging.getLogger("pdproxy.legs")
fleet = logging.getLogger("pdproxy.fleet")
kv = logging.getLogger("pdproxy.kv")

Fields = Mapping[str, object]
HELD_UP = 1.0
"""Seconds of lateness of the event loop that a log line reports."""


class LogObserver:
    """Writes events to the log."""

    def notify(self, event: Event) -> None:
        """Log an event at its level."""
        if type(event) is HandleEnded and not legs.isEnabledFor(logging.DEBUG):
            return  # as often as requests
        match event:
            case RequestEnded():
                if _straight is not None:
                    _straight(access_fields(event))
                elif access.isEnabledFor(logging.INFO):
                    _log(access, logging.INFO, "request", access_fields(event))
            case LegFailed():
                _log(legs, logging.WARNING, "leg failed", _plain(event))
            case NodeChanged(up=up):
                _log(
                    fleet,
                    logging.INFO if up else logging.WARNING,
                    "engine is up" if up else "engine is down",
                    _plain(event),
                )
            case PairEjected():
                _log(fleet, logging.ERROR, "pair ejected: prefill and decode saw different prompts", _plain(event))
            case KvShortfall():
                _log(fleet, logging.WARNING, "KV did not arrive: the decode engine computed it again", _plain(event))
            case LoopBeat(late_s):
                if late_s >= HELD_UP:
                    _log(fleet, logging.WARNING, "the event loop was held up", _plain(event))
            case KvWaited(result="timeout"):
                _log(kv, logging.WARNING, "ranks did not tell that their KV is ready", _plain(event))
            case TokenizerJudged(agrees=agrees):
                _log(
                    fleet,
                    logging.ERROR if agrees is False else logging.INFO,
                    _TOKENIZED[agrees],
                    _plain(event),
                )
            case HandleEnded() | ServedAlone() | DeadlinePassed() | KvCounted() | Tokenized() | Evicted():
                _debug(event)
            case KvNoticed() | KvTransferred() | KvWaited():
                _debug(event)


_TOKENIZED: Mapping[bool | None, str] = {
    True: "prompts may be tokenized here",
    False: "prompts are NOT tokenized here",
    None: "prompts are left to the engine's own tokenizer",
}


def _debug(event: Event) -> None:
    if legs.isEnabledFor(logging.DEBUG):
        _log(legs, logging.DEBUG, type(event).__name__, _plain(event))


def access_fields(event: RequestEnded) -> Fields:
    """Return what the access line says: times in milliseconds, engines as prefill>decode, one for each prompt."""
    legs = event.legs
    slowest = legs[0] if len(legs) == 1 else _slowest(legs)
    found: dict[str, object] = {
        "id": event.request_id,
        "path": event.endpoint,
        "model": event.model,
        "status": event.status,
        "outcome": event.outcome,
        "nodes": _each([f"{leg.prefill or ''}>{leg.decode or ''}" for leg in legs]),
        "why_alone": _each([leg.why_alone for leg in legs if leg.why_alone]),
        "attempts": slowest.attempts,
        "queue_ms": _ms(event.queue_s),
        "prefill_ms": _ms(slowest.prefill_s),
        "kv_ms": _ms(slowest.kv_s),
        "first_ms": _ms(event.first_s),
        "total_ms": _ms(event.total_s),
        "prompt_tokens": event.prompt_tokens,
        "completion_tokens": event.completion_tokens,
        "error": event.error,
    }
    return {name: value for name, value in found.items() if value is not None}


def _each(words: Sequence[str]) -> str | None:
    if len(words) == 1:
        return words[0]
    return ",".join(dict.fromkeys(words)) or None


def _slowest(legs: Sequence[LegTimes]) -> LegTimes:
    """Return the longest of each of several prompts' times."""
    return LegTimes(
        prefill_s=max((leg.prefill_s for leg in legs if leg.prefill_s is not None), default=None),
        kv_s=max((leg.kv_s for leg in legs if leg.kv_s is not None), default=None),
        attempts=max((leg.attempts for leg in legs), default=1),
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)


def _plain(event: Event) -> Fields:
    return {name: getattr(event, name) for name in event.__struct_fields__}


def _log(logger: logging.Logger, level: int, message: str, fields: Fields) -> None:
    logger.log(level, "%s", message, extra={"fields": fields})


class TextFormatter(logging.Formatter):
    """`time LEVEL logger message key=value ...`, values quoted where they hold spaces.

    Every request writes a line, so the time down to the second is kept from one line to the next.
    """

    def __init__(self) -> None:
        super().__init__()
        self._second = 0
        self._shown = ""

    def format(self, record: logging.LogRecord) -> str:
        line = self.line(
            record.created, record.levelname, record.name, record.getMessage(), getattr(record, "fields", {})
        )
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line

    def line(self, created: float, level: str, logger: str, message: str, fields: Fields) -> str:
        """Return the line of a record; `created` in Unix seconds."""
        second = int(created)
        if second != self._second:
            self._second, self._shown = second, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        line = f"{self._shown},{int(1000 * (created - second)):03d} {level} {logger} {message}"
        for name, value in fields.items():
            # Most values of most lines are numbers, or words that stood in a line before.
            line += f" {name}={value if type(value) is not str or value.isalnum() else _as_word(value)}"
        return line


_SEPARATORS = re.compile(r'[ "=]')


@lru_cache(1024)
def _as_word(text: str) -> str:
    if text and text.isprintable() and not _SEPARATORS.search(text):
        return text
    return json.dumps(text)  # escapes whatever a terminal would act on


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        fields: Fields = getattr(record, "fields", {})
        if record.exc_info:
            fields = {**fields, "exception": self.formatException(record.exc_info)}
        return self.line(record.created, record.levelname, record.name, record.getMessage(), fields)

    def line(self, created: float, level: str, logger: str, message: str, fields: Fields) -> str:
        """Return the line of a record; `created` in Unix seconds."""
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(created)),
            "level": level.lower(),
            "logger": logger,
            "message": message,
            **fields,
        }
        return msgspec.json.encode(line, enc_hook=str).decode()


_straight: Callable[[Fields], None] | None = None
"""Writes an access line without the logging package, whose records cost more than the line. None: through it, if at all."""


def _write_access_line(stream: TextIO, formatter: TextFormatter | JsonFormatter, fields: Fields) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more: no reason to fail a request
        stream.write(formatter.line(time.time(), "INFO", access.name, "request", fields) + "\n")
        stream.flush()


def configure(level: str, log_format: str) -> None:
    """Send all of pdproxy's and uvicorn's log lines to standard error."""
    global _straight
    handler = logging.StreamHandler(sys.stderr)
    formatter = JsonFormatter() if log_format == "json" else TextFormatter()
    handler.setFormatter(formatter)
    for name in ("pdproxy", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper() if name == "pdproxy" else max(logging.INFO, logging.getLevelName(level.upper())))
    shown = access.isEnabledFor(logging.INFO)
    _straight = partial(_write_access_line, handler.stream, formatter) if shown else None
    logging.getLogger("uvicorn.access").disabled = True  # the access line is ours
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
