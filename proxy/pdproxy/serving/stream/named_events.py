"""Decides which events of a stream with named events (Responses, Messages, Cohere's chat) go to the
client: all up to its end, or to an error. And when such a stream is proven good.

A Responses stream that fails just ends, without a terminal event; a message that was given up has
no `stop_reason`, and Cohere's no usage (vLLM 0.32.0). Cohere's events have their names in the data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from pdproxy.kit.errors import EngineError, EngineRefusedError
from pdproxy.serving.stream.failures import (
    GivenUpError,
    has_other_lines,
    other_lines,
    tiny_lines,
)
from pdproxy.wire import sse
from pdproxy.wire.api_errors import STATUS_OF_ERRORS, Dialect, WholeEvents
from pdproxy.wire.engine import UNREADABLE, Usage, error_of
from pdproxy.wire.event_template import EventTemplate
from pdproxy.wire.inside import passed_events_without_inside, passed_without_inside
from pdproxy.wire.passed_usage import usage_in, with_cache_of_message
from pdproxy.wire.usage import with_cache

_DONE = b"[DONE]"
_ENDS = frozenset({b"response.completed", b"response.incomplete", b"message_stop", _DONE})
_FAILURES = frozenset({b"error", b"response.failed"})
_COHERES_END = b"message-end"
_WITH_USAGE = frozenset(
    {b"response.completed", b"response.incomplete", b"message_delta", _COHERES_END}
)
_PROVE_NOTHING = frozenset(
    {
        *(b"response.created", b"response.in_progress", b"ping", b"message_start"),
        *(b"response.output_item.added", b"response.content_part.added", b"content_block_start"),
        *(b"message-start", b"content-start"),
    }
)
"""Events that come before the first one with output: vLLM's API server sends them before its engine
has begun to work, or beside its first output, also if that is a failure.
"""
_NAME = re.compile(rb"event: ([a-z_.]{1,64})\n")
_DATA = b"data: "
_FREQUENT = (
    b"response.output_text.delta",
    b"response.reasoning_text.delta",
    b"response.function_call_arguments.delta",
    b"content_block_delta",
)


class _Delta(msgspec.Struct):
    stop_reason: str | None = None


class _MessageDelta(msgspec.Struct):
    delta: _Delta | None = None


class _CoheresEvent(msgspec.Struct):
    type: str
    delta: msgspec.Raw = msgspec.Raw(b"{}")


class _CoheresEnd(msgspec.Struct):
    finish_reason: str = ""
    error: str = ""


class _WholeMessage(msgspec.Struct):
    type: str = ""
    stop_reason: str | None = None


_message_deltas = msgspec.json.Decoder(_MessageDelta)
_coheres_events = msgspec.json.Decoder(_CoheresEvent)
_coheres_ends = msgspec.json.Decoder(_CoheresEnd)
_whole_messages = msgspec.json.Decoder(_WholeMessage)


class NamedEventFilter:
    """The filter of one stream. What a `Relay` reads of it is as in `EventFilter`.

    `opening`: how many events come yet before the first one with a token.
    """

    wants_done = wants_usage = keeps_usage = False
    usage_event = None
    finished = 0

    __slots__ = (
        "_dialect",
        "_events",
        "_named",
        "cached_tokens",
        "created_cache_tokens",
        "done",
        "every",
        "failure",
        "handle",
        "last_events",
        "opening",
        "usage",
    )

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._events = WholeEvents(dialect)
        self.every = dialect is Dialect.COHERE  # its last events look like others
        self._named = _named_in_data if self.every else _named
        self.opening = dialect.opening
        self.usage: Usage | None = None
        self.done = False
        self.failure: EngineError | None = None
        self.handle: bytes | None = None
        self.last_events: list[bytes] = []
        self.cached_tokens: int | None = None
        self.created_cache_tokens: int | None = None

    def __repr__(self) -> str:
        return f"<NamedEventFilter {'done' if self.done else self.failure or 'open'}>"

    def has_real_data(self, batch: bytes) -> bool:
        """Return whether one of these events shows that the engine has begun to work.

        Raises:
            EngineError: the stream has failed.
        """
        if sse.has_tiny_lines(batch):
            raise tiny_lines()
        real = False
        for name, event in self._named(batch):
            if (failure := _failure(name, event)) is not None:
                raise failure
            if name == _DONE and not real:
                raise EngineError("the engine ended the stream without any data")
            if name in _ENDS:
                return True  # what is behind it goes to nobody
            real = real or (name is not None and name not in _PROVE_NOTHING)
        return real

    def whole(self, body: bytes) -> bytes:
        """Return a whole answer without what no client may see. One that was given up has no
        usage.
        """
        body = passed_without_inside(body)
        body = self.counted(body)
        self.usage = None if _is_given_up(body) else usage_in(body)
        return body

    def shown(self, events: bytes) -> bytes:
        """Return whole events without what no client may see."""
        return passed_events_without_inside(events)

    def filtered(self, batch: bytes) -> bytes:
        """Return the part of a batch of whole events that goes to the client: nothing after the end
        or a failure.
        """
        if sse.has_tiny_lines(batch):
            self.failure = tiny_lines()
            return b""
        passed: list[bytes] = []
        for name, event in self._named(self.shown(batch)):
            self.failure = _failure(name, event)
            if self.failure is not None:
                break
            if name in _WITH_USAGE:
                event = _with_json(event, self.counted(_json_of(event)))
            if name == _COHERES_END:
                self.usage = usage_in(_coheres_events.decode(_json_of(event)).delta)
            if name in (_COHERES_END, _DONE) and self.usage is None:
                self.failure = GivenUpError("the engine ended the stream before the answer's end")
                break
            passed.append(event)
            if name in _ENDS:
                self.done = True
                break
        batch = b"".join(passed)
        self._events.note(batch)
        if self._events.reported:
            self.usage = self._events.usage
        return batch

    def counted(self, json: bytes) -> bytes:
        """Return what has the usage with the counts of the prefill engine's cache."""
        put = with_cache_of_message if self._dialect is Dialect.MESSAGES else with_cache
        return put(json, cached=self.cached_tokens, created=self.created_cache_tokens)

    def take_ended(self) -> list[bytes]:
        """Return the events that were held back: none ever are."""
        return []


class NamedTemplates:
    """The forms of frequent events, as `event_template.EventTemplates` knows those of other
    streams. An event's name is enough to know that it is plain.
    """

    def __init__(self) -> None:
        self._known = {
            name: EventTemplate(b"event: %b\ndata: {" % name, b"}\n\n", b"", takes_ids=False)
            for name in _FREQUENT
        }
        self._latest = self._known[_FREQUENT[0]]

    def latest(self, *, takes_ids: bool) -> EventTemplate:
        """Return the form that was learned last."""
        return self._latest

    def learn(self, event: bytes, *, takes_ids: bool) -> EventTemplate | None:
        """Return the form of an event, None unless it is a frequent one."""
        found = _NAME.match(event)
        known = None if found is None else self._known.get(found[1])
        if known is not None:
            self._latest = known
        return known


def _named(batch: bytes) -> Iterator[tuple[bytes | None, bytes]]:
    """Yield the events of a batch, each with its name, None for a comment or an event without
    one.
    """
    for bare in batch.split(sse.END):
        if bare:
            found = _NAME.match(bare.lstrip(b"\n"))
            yield (None if found is None else found[1]), bare + sse.END


def _named_in_data(batch: bytes) -> Iterator[tuple[bytes | None, bytes]]:
    """Do the same with events that have their names in their data. One that reports a failure is an
    `error`, as those of the other APIs are.
    """
    for bare in batch.split(sse.END):
        event = bare.lstrip(b"\n") + sse.END
        if not event.startswith(_DATA):
            if bare:
                yield None, event
            continue
        if sse.is_done(event):
            yield _DONE, event
            continue
        try:
            found = _coheres_events.decode(_json_of(event))
            if found.type == "message-end":
                ended = _coheres_ends.decode(found.delta)
                if ended.error or ended.finish_reason == "ERROR":
                    error = msgspec.json.encode({"message": ended.error, "type": "error"})
                    yield b"error", sse.data(error)
                    continue
        except UNREADABLE:
            yield b"error", event
            continue
        yield found.type.encode(), event


def _json_of(event: bytes) -> bytes:
    return event[_start(event) :].strip()


def _with_json(event: bytes, json: bytes) -> bytes:
    return event[: _start(event)] + json + sse.END


def _start(event: bytes) -> int:
    """Return where the data of an event begin."""
    line = 0 if event.startswith(_DATA) else event.find(b"\n" + _DATA) + 1
    return line + len(_DATA)


def _failure(name: bytes | None, event: bytes) -> EngineError | None:
    """Return the failure that an event reports, or is, None if it is none."""
    if has_other_lines(event):
        return other_lines()
    if name in _FAILURES:
        return _reported(_json_of(event))
    if name == b"message_delta" and not _has_reason(event):
        return GivenUpError("the engine gave the answer up half-way")
    return None


def _reported(json: bytes) -> EngineError:
    """Return the error that an event reports. vLLM 0.33.0 names a refusal as such; for 0.32.0 each
    is its own failure.
    """
    detail = error_of(json)
    status = 500 if detail is None else STATUS_OF_ERRORS.get(detail.type, 500)
    # The engine's text may quote the prompt. The client gets it; the log, which shows this message,
    # gets some of its words (`wire.engine_words`).
    return EngineRefusedError(
        f"the engine sent an error event with status {status}", status=status, body=json
    )


def _has_reason(event: bytes) -> bool:
    """Return whether the last event but one of a message says why the message has ended."""
    try:
        delta = _message_deltas.decode(_json_of(event)).delta
    except UNREADABLE:
        return True
    return delta is not None and delta.stop_reason is not None


def _is_given_up(body: bytes) -> bool:
    try:
        message = _whole_messages.decode(body)
    except UNREADABLE:
        return False
    return message.type == "message" and message.stop_reason is None
