"""The APIs of routes that one engine serves whole: how each reports a failure, how its streams
begin and end, and what these report of tokens.

Owns the splitting of their streams into whole events, so that a failure never follows half an
event.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from typing import assert_never

import msgspec

from pdproxy.kit.errors import (
    AnswerTooLargeError,
    EngineRefusedError,
    PdproxyError,
    UnauthorizedError,
    UnparsableError,
    UnreadableError,
)
from pdproxy.wire.engine import Usage, error_of
from pdproxy.wire.errors import error_body
from pdproxy.wire.passed_usage import usage_in_event

MAX_EVENT = 64 * 2**20
"""Bytes of one event. The last event of a Responses stream repeats the whole answer."""

_NUMBER = b'"sequence_number":'
_SEQUENCE = re.compile(rb"\s*(\d{1,18})")
_NOTED = re.compile(
    rb"(?:event: (?:message_(?:start|delta)|(response\.(?:completed|incomplete|failed)|"
    rb"message_stop|error))"
    rb"|data: (\[DONE\]))\r?\n"
)
"""The first line of an event that may report what was used, or that ends a stream: then it has a
group. That it begins a line is checked separately: a pattern for line starts costs time at each
line.
"""
_FIRST = b"event: message_start"
_DATA = b"data: "
_USAGE_ONLY = b'"choices":[],"usage":{'


class Dialect(Enum):
    """The API of a route."""

    OPENAI = "openai"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COHERE = "cohere"

    @property
    def preamble(self) -> int:
        """How many events of a stream vLLM sends before its model has begun to work."""
        return 2 if self is Dialect.RESPONSES else 0

    @property
    def opening(self) -> int:
        """How many events of a stream come before the first one with a token: those of its answer's
        first item included.
        """
        return _OPENING.get(self, 0)


_OPENING = {Dialect.RESPONSES: 4, Dialect.MESSAGES: 2, Dialect.COHERE: 2}
_MESSAGES_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Types of the Messages API's errors by status. All other failures are an `api_error`."""
STATUS_OF_ERRORS = {kind: status for status, kind in _MESSAGES_ERRORS.items()}
"""Their statuses by type."""


class _ErrorFields(msgspec.Struct, frozen=True):
    type: str = ""
    message: str = ""


class _MessagesError(msgspec.Struct, frozen=True):
    error: _ErrorFields
    type: str = "error"


class _ResponsesError(msgspec.Struct, frozen=True):
    code: str
    message: str
    sequence_number: int
    param: None = None
    type: str = "error"


class _CohereError(msgspec.Struct, frozen=True):
    message: str


class _CohereFailure(msgspec.Struct, frozen=True):
    error: str
    finish_reason: str = "ERROR"


class _CohereEnd(msgspec.Struct, frozen=True):
    delta: _CohereFailure
    type: str = "message-end"


def failure_body(dialect: Dialect, error: PdproxyError, engines: Sequence[str] = ()) -> bytes:
    """Return the body of an answer that is an error; an engine's own body in its own shape.
    `engines`: as of `error_body`.

    A body that can't be read is refused by vLLM's server before the route's own code runs: with the
    same text on every route. Cohere's has its own shape for that, too.
    """
    body = error_body(error, engines)
    engines_own = isinstance(error, EngineRefusedError) and error_of(error.body) is not None
    if engines_own or isinstance(error, UnparsableError):
        return body
    if dialect is Dialect.COHERE:
        return msgspec.json.encode(_CohereError(_fields(body).message))
    if dialect is not Dialect.MESSAGES or isinstance(error, UnreadableError):
        return body
    fields = _fields(body)
    return msgspec.json.encode(_MessagesError(_ErrorFields(_messages_type(error), fields.message)))


def _fields(body: bytes) -> _ErrorFields:
    found = error_of(body)
    return _ErrorFields() if found is None else _ErrorFields(found.type, found.message)


def _messages_type(error: PdproxyError) -> str:
    return _MESSAGES_ERRORS.get(
        error.status, "invalid_request_error" if error.status < 500 else "api_error"
    )


def failure_event(
    dialect: Dialect, error: PdproxyError, sequence: int, engines: Sequence[str] = ()
) -> bytes:
    """Return the event that ends a stream that failed. `sequence` is the number of that event."""
    body = error_body(error, engines)
    fields = _fields(body)
    match dialect:
        case Dialect.OPENAI:
            return b"data: " + body + b"\n\n"
        case Dialect.RESPONSES:
            code = (
                error.code
                if isinstance(error, UnauthorizedError) and error.code is not None
                else fields.type
            )
            body = msgspec.json.encode(_ResponsesError(code, fields.message, sequence))
        case Dialect.MESSAGES:
            kind = _messages_type(error)
            body = msgspec.json.encode(_MessagesError(_ErrorFields(kind, fields.message)))
        case Dialect.COHERE:
            ended = msgspec.json.encode(_CohereEnd(_CohereFailure(fields.message)))
            return b"data: " + ended + b"\n\ndata: [DONE]\n\n"
        case _:
            assert_never(dialect)
    return b"event: error\ndata: " + body + b"\n\n"


def _begins_line(text: bytes, at: int) -> bool:
    return at == 0 or text[at - 1 : at] == b"\n"


class WholeEvents:
    """Cuts a stream into whole events, counts them, and reads what they report. Owns the bytes of
    an event that is not whole yet.
    """

    def __init__(self, dialect: Dialect) -> None:
        self.count = 0
        self.sequence = 0
        self.ended = False
        """Whether the stream's end mark has come."""
        self.usage: Usage | None = None
        """What the stream has reported so far."""
        self.reported = False
        """Whether that is all of it: a message reports its prompt first."""
        self._rest = bytearray()
        self._preamble, self._opening = dialect.preamble, dialect.opening
        self._is_openai = dialect is Dialect.OPENAI

    @property
    def generating(self) -> bool:
        """Whether the model has begun to work: vLLM begins some streams before it has read the
        request.
        """
        return self.count > self._preamble

    @property
    def tokens(self) -> int:
        """How many tokens the answer has so far: before the engine reports them, one in each event,
        but for the first events.
        """
        if self.reported and self.usage is not None:
            return self.usage.completion_tokens or 0
        return max(self.count - self._opening, 0)

    def feed(self, data: bytes) -> bytes:
        """Add bytes; return the events that are whole now, and keep the rest.

        Raises:
            AnswerTooLargeError: an event is larger than `MAX_EVENT`.
        """
        searched = max(len(self._rest) - 1, 0)
        self._rest += data
        cut = self._rest.rfind(b"\n\n", searched)
        if cut < 0:
            if len(self._rest) > MAX_EVENT:
                raise AnswerTooLargeError("an engine sent an event without an end")
            return b""
        whole = bytes(self._rest[: cut + 2])
        del self._rest[: cut + 2]
        self.note(whole)
        return whole

    def note(self, whole: bytes) -> None:
        """Note whole events: their number, and what they report."""
        self.count += whole.count(b"\n\n")
        at = whole.rfind(_NUMBER)
        if at >= 0 and (found := _SEQUENCE.match(whole, at + len(_NUMBER))):
            self.sequence = int(found[1]) + 1
        if self._is_openai and _USAGE_ONLY in whole:  # if the client has asked for it
            self._note_usage(whole, whole.rfind(_DATA, 0, whole.rfind(_USAGE_ONLY)))
        for noted in _NOTED.finditer(whole):
            if _begins_line(whole, noted.start()):
                self.ended = self.ended or noted.lastindex is not None
                self._note_usage(whole, noted.end(), is_first=noted[0].startswith(_FIRST))

    def _note_usage(self, whole: bytes, start: int, *, is_first: bool = False) -> None:
        """Note the usage of the event whose line of data begins at `start`. `is_first`: only the
        prompt is known yet.
        """
        line = whole[start : whole.find(b"\n", start)]
        if not line.startswith(_DATA) or (found := usage_in_event(line[len(_DATA) :])) is None:
            return
        before = self.usage
        if before is not None and before.prompt_tokens:
            # The event at the end of a message may leave cached tokens out.
            found = Usage(before.prompt_tokens, 0, found.completion_tokens)
        self.usage = found
        self.reported = not is_first

    @property
    def waiting(self) -> int:
        """Bytes behind the last whole event."""
        return len(self._rest)

    @property
    def rest(self) -> bytes:
        """The bytes behind the last whole event."""
        return bytes(self._rest)
