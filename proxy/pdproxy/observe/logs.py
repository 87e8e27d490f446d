"""Log lines: one at INFO for each request, its steps at DEBUG, failures at WARNING and ERROR.

Owns the line of each event, and where lines go. No prompt and no key is ever logged: events hold
none.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence

from pdproxy.kit.errors import RefusalReason
from pdproxy.kit.frames import frames
from pdproxy.observe.events import (
    BootstrapAsked,
    DeadlinePassed,
    Decided,
    EngineLost,
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
    MemberChanged,
    NodeChanged,
    PairEjected,
    Refused,
    RequestEnded,
    ServedAlone,
    SilenceAllowed,
    StreamContinued,
    Tokenized,
    TokenizerJudged,
    TransferFaultSeen,
    TurnDropped,
    TurnKept,
    TurnReleased,
    TurnReused,
)
from pdproxy.observe.few_lines import FewLines
from pdproxy.observe.formats import Fields, Formatter, make_formatter
from pdproxy.observe.lines import LineWriter
from pdproxy.observe.traces import trace_ids
from pdproxy.observe.weighed import Weighed, tpot_of

access = logging.getLogger("pdproxy.access")
legs = logging.getLogger("pdproxy.legs")
fleet = logging.getLogger("pdproxy.fleet")
kv = logging.getLogger("pdproxy.kv")


class Log:
    """Where lines go, and in which format. Made by `configure`. Close it before the process ends,
    or its last lines are lost.
    """

    def __init__(self, writer: LineWriter, formatter: Formatter, *, shows_requests: bool) -> None:
        """Make one. `shows_requests`: whether the level is low enough for access lines."""
        self.shows_requests = shows_requests
        self.level = "info"
        self.level_set_by = "settings"
        """By whom the level was set last."""
        self._writer = writer
        self._formatter = formatter

    def name_worker(self, number: int) -> None:
        """Name a worker in all lines from now on."""
        self._formatter.show_always({"worker": number})

    def name_process(self, name: str) -> None:
        """Name a process that is no worker in all lines from now on."""
        self._formatter.show_always({"process": name})

    @property
    def dropped(self) -> int:
        """How many lines were dropped."""
        return self._writer.dropped

    def request(self, event: RequestEnded) -> None:
        """Write an access line. The logging package would make a record for it, which costs more
        than the line.
        """
        values = access_values(event)
        self._writer.write(
            self._formatter.own_line(
                time.time(), "INFO", access.name, "request", ACCESS_FIELDS, values
            )
        )

    def close(self) -> bool:
        """Write what waits, as long as it is read in time. Return whether all was written."""
        return self._writer.close()


class TracedLog(Log):
    """A log whose lines about requests show the ids of their traces."""

    def __init__(self, writer: LineWriter, formatter: Formatter, *, shows_requests: bool) -> None:
        super().__init__(writer, formatter, shows_requests=shows_requests)
        formatter.of_task = _of_task

    def request(self, event: RequestEnded) -> None:
        """See `Log`."""
        values = (*access_values(event), *trace_ids())
        self._writer.write(
            self._formatter.own_line(
                time.time(), "INFO", access.name, "request", _TRACED_FIELDS, values
            )
        )


def _of_task() -> Fields:
    """Return the ids of the trace of the request that the running task serves, if it serves one."""
    named = zip(TRACE_FIELDS, trace_ids(), strict=True)
    return {name: one for name, one in named if one is not None}


HELD_UP = 1.0
"""Seconds of delay of the event loop from which on it is logged."""


class LogObserver:
    """Writes events to the log. Access lines go straight to `log`, if there is one, all others
    through the logging package. `engines`: whether changes of engines' states are logged here.
    """

    def __init__(self, log: Log | None = None, *, engines: bool = True) -> None:
        """Make one. Without a log, as in tests and tools, all lines are records."""
        self._log = log
        self._logs_engines = engines
        self.refusals = FewLines(time.monotonic)
        """The lines about refusals, and the access lines of requests without a valid key."""

    def notify(self, event: Event) -> None:
        """Log an event at its level."""
        if type(event) is HandleEnded and not legs.isEnabledFor(logging.DEBUG):
            return  # as often as requests
        match event:
            case RequestEnded():
                if (
                    event.error is not None
                    and _has_no_key(event)
                    and not self.refusals.takes(str(event.client))
                ):
                    return
                if self._log is not None:
                    if self._log.shows_requests:
                        self._log.request(event)
                elif access.isEnabledFor(logging.INFO):
                    _log(access, logging.INFO, "request", access_fields(event))
            case Refused():
                self._refused(event)
            case LegFailed():
                _log(legs, logging.WARNING, "leg failed", _fields(event))
            case EngineLost():
                _log(
                    fleet,
                    logging.WARNING,
                    "an engine has disappeared under a request",
                    _fields(event),
                )
            case NodeChanged() if not self._logs_engines:
                pass
            case NodeChanged(up=up, state=state):
                words = "engine is up" if up else _STATE_LINES[state]
                fields = {"node": event.node, "role": event.role, "reason": event.reason}
                _log(
                    fleet,
                    logging.INFO if up or state == "asleep" else logging.WARNING,
                    words,
                    fields,
                )
            case TransferFaultSeen(over=over):
                named = {"prefill": event.prefill, "decode": event.decode, "reason": event.reason}
                fields = {name: value for name, value in named.items() if value is not None}
                words = "KV moves again" if over else "KV does not move: no prompt is split there"
                _log(fleet, logging.INFO if over else logging.WARNING, words, fields)
            case MemberChanged():
                _log(fleet, logging.INFO, "engine of the pool", _known(event))
            case PairEjected():
                _log(
                    fleet,
                    logging.ERROR,
                    "pair ejected: prefill and decode counted different prompt lengths",
                    _fields(event),
                )
            case KvShortfall():
                _log(
                    fleet,
                    logging.WARNING,
                    "KV did not arrive: the decode engine computed it again",
                    _fields(event),
                )
            case LoopBeat(late_s, swallowed):
                if late_s >= HELD_UP and not swallowed:
                    _log(fleet, logging.WARNING, "the event loop was held up", _fields(event))
            case KvWaited(result="timeout"):
                _log(
                    kv,
                    logging.WARNING,
                    "ranks sent no notice that their KV is ready",
                    _fields(event),
                )
            case TokenizerJudged(agrees=agrees):
                _log(
                    fleet,
                    logging.ERROR if agrees is False else logging.INFO,
                    _TOKENIZER_LINES[agrees],
                    _fields(event),
                )
            case (
                HandleEnded()
                | ServedAlone()
                | Decided()
                | DeadlinePassed()
                | SilenceAllowed()
                | KvCounted()
                | Tokenized()
                | Evicted()
            ):
                _debug(event)
            case StreamContinued():
                _debug(event)
            case KvNoticed() | KvTransferred() | KvWaited() | BootstrapAsked():
                _debug(event)
            case TurnKept() | TurnReused() | TurnDropped() | TurnReleased():
                _debug(event)

    def _refused(self, event: Refused) -> None:
        """Log a refusal, unless too many came. The next line states how many lines were left
        out.
        """
        if self.refusals.takes(event.client):
            fields: dict[str, object] = {"reason": event.reason, "client": event.client}
            if left_out := self.refusals.unreported():
                fields["not_logged_before"] = left_out
            _log(access, logging.WARNING, "refused", fields)


def _has_no_key(event: RequestEnded) -> bool:
    """Return whether a request was refused since it had no valid key."""
    return event.reason == RefusalReason.WRONG_KEYS.value or (
        event.status == 401 and event.key is None and not event.legs
    )


_STATE_LINES: Mapping[str, str] = {
    "down": "engine is down",
    "excluded": "engine is excluded",
    "stalled": "engine stands still",
    "asleep": "engine is asleep",
}
"""By `NodeChanged.state`, where an engine is not up."""
_TOKENIZER_LINES: Mapping[bool | None, str] = {
    True: "prompts may be tokenized here",
    False: "prompts are NOT tokenized here",
    None: "prompts are left to the engine's own tokenizer",
}


def _debug(event: Event) -> None:
    if legs.isEnabledFor(logging.DEBUG):
        _log(legs, logging.DEBUG, type(event).__name__, _fields(event))


ACCESS_FIELDS = (
    "id",
    "client",
    "key",
    "method",
    "path",
    "model",
    "stream",
    "status",
    "outcome",
    "reason",
    "encode",
    "prefill",
    "decode",
    "why_alone",
    "attempts",
    "queue_ms",
    "encode_ms",
    "prefill_ms",
    "kv_ms",
    "alone_ms",
    "decode_ms",
    "first_ms",
    "total_ms",
    "prompt_tokens",
    "completion_tokens",
    "error",
    "continued",
    "continued_by",
    "pause_ms",
    "decision",
    "predicted_ttft_ms",
    "predicted_tpot_ms",
    "cost",
    "term",
    "other_cost",
    "tpot_ms",
    "good",
)
"""The fields of the access line. docs/guide/monitoring.md describes each."""
TRACE_FIELDS = ("trace_id", "span_id")
"""Further ones where traces are exported, of each line that is about a request."""
_TRACED_FIELDS = (*ACCESS_FIELDS, *TRACE_FIELDS)


def access_values(event: RequestEnded) -> tuple[object, ...]:
    """Return the values of `ACCESS_FIELDS`; None for each that has none, which is left out of the
    line.

    Times are in milliseconds. Of a list of prompts: all engines, the longest time of each phase,
    and what was weighed for the prompt whose choice costs most.
    """
    legs = event.legs
    leg = legs[0] if len(legs) == 1 else _together(legs)
    split = leg.prefill is not None
    of_answer = leg.whole_s if leg.first_s is None else leg.first_s
    first, weighed = event.first_s, leg.weighed
    tpot = tpot_of(first, event.total_s, event.completion_tokens)
    return (  # of more than 30 Python would make a list first, one by one
        event.request_id,
        event.client,
        event.key,
        event.method,
        event.endpoint,
        event.model,
        event.stream,
        event.status,
        event.outcome,
        event.reason,
        _distinct([url for url, _ in leg.encoders]) if leg.encoders else None,
        leg.prefill,
        leg.decode,
        leg.why_alone,
        leg.attempts,
        _ms(event.queue_s),
        None if leg.encode_s is None else _ms(leg.encode_s),
        _ms(leg.prefill_s),
        _ms(leg.first_s) if split else None,
        None if split else _ms(of_answer),
        _ms(leg.whole_s if split and leg.decode_s is None else leg.decode_s),
        None if first is None else _ms(first),
        _ms(event.total_s),
        event.prompt_tokens,
        event.completion_tokens,
        event.error,
        leg.continued or None,
        leg.continued_by,
        _ms(leg.pause_s) if leg.continued else None,
        leg.decision,
        *(_NOT_WEIGHED if weighed is None else _weighed(weighed)),
        _ms(tpot),
        None if weighed is None else weighed.good(event.outcome, first, tpot),
    )


_NOT_WEIGHED = (None,) * 5


def _weighed(weighed: Weighed) -> tuple[object, ...]:
    chosen, other = weighed.chosen, weighed.other
    numbers = chosen.ttft_s, chosen.tpot_s, chosen.cost, None if other is None else other.cost
    ttft, tpot, cost, instead = (
        None if number is None or not math.isfinite(number) else number for number in numbers
    )
    return _ms(ttft), _ms(tpot), _cost(cost), weighed.term(), _cost(instead)


def _cost(cost: float | None) -> float | None:
    return None if cost is None else int(10_000 * cost + 0.5) / 10_000


def access_fields(event: RequestEnded) -> Fields:
    """Return the fields of the access line that have a value."""
    found = zip(ACCESS_FIELDS, access_values(event), strict=True)
    return {name: value for name, value in found if value is not None}


def _together(legs: Sequence[LegTimes]) -> LegTimes:
    """Return the engines of several prompts, and the longest time of each phase."""
    return LegTimes(
        prefill=_distinct([leg.prefill for leg in legs]),
        decode=_distinct([leg.decode for leg in legs]),
        why_alone=_distinct([leg.why_alone for leg in legs]),
        encode_s=_longest([leg.encode_s for leg in legs]),
        encoders=tuple(one for leg in legs for one in leg.encoders),
        prefill_s=_longest([leg.prefill_s for leg in legs]),
        first_s=_longest([leg.first_s for leg in legs]),
        decode_s=_longest([leg.decode_s for leg in legs]),
        whole_s=_longest([leg.whole_s for leg in legs]),
        overlap_s=_longest([leg.overlap_s for leg in legs]),
        attempts=max((leg.attempts for leg in legs), default=0),
        decision=_distinct([leg.decision for leg in legs]),
        weighed=max(
            (leg.weighed for leg in legs if leg.weighed is not None),
            key=lambda weighed: weighed.chosen.cost,
            default=None,
        ),
        continued=sum(leg.continued for leg in legs),
        continued_by=_distinct([leg.continued_by for leg in legs]),
        pause_s=_longest([leg.pause_s for leg in legs]),
    )


def _distinct(values: Sequence[str | None]) -> str | None:
    return ",".join(dict.fromkeys(value for value in values if value is not None)) or None


def _longest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _ms(seconds: float | None) -> float | None:
    # `round` to a digit makes a decimal text and reads it again: three times as slow.
    return None if seconds is None else int(10_000 * seconds + 0.5) / 10


def _fields(event: Event) -> Fields:
    return {name: getattr(event, name) for name in event.__struct_fields__}


def _known(event: Event) -> Fields:
    return {name: value for name, value in _fields(event).items() if value is not None}


def _log(logger: logging.Logger, level: int, message: str, fields: Fields) -> None:
    logger.log(level, "%s", message, extra={"fields": fields})


class _Handler(logging.Handler):
    """Passes the lines of records to a writer."""

    def __init__(self, writer: LineWriter, formatter: Formatter) -> None:
        super().__init__()
        self._writer = writer
        self._formatter = formatter

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._formatter.format(record)
        except Exception as error:  # its arguments don't fit its text: the caller must not fail
            fields = {"exception": frames(error)}
            line = self._formatter.line(
                record.created, record.levelname, record.name, "a line could not be made", fields
            )
        self._writer.write(line)


def configure(level: str, log_format: str, *, traces: bool = False) -> Log:
    """Send the log lines of pdproxy, of uvicorn and of all libraries to standard error. Return the
    log of access lines. `traces`: whether lines about requests show the ids of their traces.
    """
    made = make_formatter(log_format)

    def report(count: int) -> str:
        message = "log lines were dropped: standard error was not read, or could not be written"
        return made.line(time.time(), "WARNING", "pdproxy.log", message, {"lines": count})

    writer = LineWriter(sys.stderr, report)
    handler = _Handler(writer, made)
    # Libraries log warnings, and asyncio tasks that failed. Without this they would write to
    # standard error themselves.
    for name in ("pdproxy", "uvicorn", None):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").disabled = True  # pdproxy writes access lines itself
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    log = (TracedLog if traces else Log)(writer, made, shows_requests=True)
    set_level(log, level)
    return log


def set_level(log: Log, level: str, by: str = "settings") -> None:
    """Set the least severe record that is written, also of access lines. `by`: who wants it."""
    log.level, log.level_set_by = level, by
    own = logging.getLevelName(level.upper())
    logging.getLogger("pdproxy").setLevel(own)
    logging.getLogger("uvicorn").setLevel(max(logging.INFO, own))
    log.shows_requests = access.isEnabledFor(logging.INFO)
