"""The APIs that are passed to one engine whole: how each says that it failed, and how its streams begin and end.

Owns the splitting of their streams into whole events, so that a failure never follows half an event.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import assert_never

import msgspec

from pdproxy.kit.errors import EngineError, EngineRefusedError, PdproxyError, UnparsableError, UnreadableError
from pdproxy.wire.engine import error_of
from pdproxy.wire.errors import error_body

MOST_EVENT = 64 * 2**20
"""Bytes of one event. The last event of a Responses stream repeats the whole answer."""

_NUMBER = b'"sequence_number":'
_SEQUENCE = re.compile(rb"\s*(\d{1,18})")
_LAST = re.compile(rb"(?:event: (?:response\.(?:completed|incomplete|failed)|message_stop|error)|data: \[DONE\])\r?\n")
"""The first line of an event that ends a stream, wherever it stands: that it begins a line is looked at apart, since a search for
line starts costs at each line."""


class Dialect(Enum):
    """Whose API a route speaks."""

    OPENAI = "openai"
    RESPONSES = "responses"
    MESSAGES = "messages"

    @property
    def preamble(self) -> int:
        """How many events of a stream vLLM sends before its model has done anything."""
        return 2 if self is Dialect.RESPONSES else 0


class _Said(msgspec.Struct, frozen=True):
    type: str = ""
    message: str = ""


class _MessagesError(msgspec.Struct, frozen=True):
    error: _Said
    type: str = "error"


class _ResponsesError(msgspec.Struct, frozen=True):
    code: str
    message: str
    sequence_number: int
    param: None = None
    type: str = "error"


class _Body(msgspec.Struct):
    error: _Said


def failure_body(dialect: Dialect, error: PdproxyError) -> bytes:
    """Return the body of an answer that is an error; an engine's own body as it is.

    What can't be read is refused by vLLM's server before the route's own code runs: in the same words on every route.
    """
    body = error_body(error)
    engines_own = isinstance(error, EngineRefusedError) and error_of(error.body) is not None
    if dialect is not Dialect.MESSAGES or engines_own or isinstance(error, UnreadableError | UnparsableError):
        return body
    return msgspec.json.encode(_MessagesError(msgspec.json.decode(body, type=_Body).error))


def failure_event(dialect: Dialect, error: PdproxyError, sequence: int) -> bytes:
    """Return the event that ends a stream which failed. `sequence` is the number that the next event has."""
    said = msgspec.json.decode(error_body(error), type=_Body).error
    match dialect:
        case Dialect.OPENAI:
            return b"data: " + error_body(error) + b"\n\n"
        case Dialect.RESPONSES:
            body = msgspec.json.encode(_ResponsesError(said.type, said.message, sequence))
        case Dialect.MESSAGES:
            body = msgspec.json.encode(_MessagesError(_Said("api_error", said.message)))
        case _:
            assert_never(dialect)
    return b"event: error\ndata: " + body + b"\n\n"


def _begins_line(text: bytes, at: int) -> bool:
    return at == 0 or text[at - 1 : at] == b"\n"


class WholeEvents:
    """Hands a stream on in whole events, and knows where it is. Owns the bytes of an event that is not whole yet."""

    def __init__(self, dialect: Dialect) -> None:
        self.count = 0
        self.sequence = 0
        self.ended = dialect is Dialect.OPENAI
        """Whether the stream has said that it is over. A stream of no known end is over when it ends."""
        self._rest = bytearray()
        self._preamble = dialect.preamble

    @property
    def generating(self) -> bool:
        """Whether the model has shown life: vLLM begins some streams before it has looked at the request."""
        return self.count > self._preamble

    def feed(self, data: bytes) -> bytes:
        """Take bytes; return the events that are whole now, and keep the rest.

        Raises:
            EngineError: an event is larger than any could be.
        """
        searched = max(len(self._rest) - 1, 0)
        self._rest += data
        cut = self._rest.rfind(b"\n\n", searched)
        if cut < 0:
            if len(self._rest) > MOST_EVENT:
                raise EngineError("an engine sent an event without an end")
            return b""
        whole = bytes(self._rest[: cut + 2])
        del self._rest[: cut + 2]
        self.count += whole.count(b"\n\n")
        at = whole.rfind(_NUMBER)
        if at >= 0 and (found := _SEQUENCE.match(whole, at + len(_NUMBER))):
            self.sequence = int(found[1]) + 1
        self.ended = self.ended or any(_begins_line(whole, last.start()) for last in _LAST.finditer(whole))
        return whole

    @property
    def waiting(self) -> int:
        """How many bytes came behind the last whole event."""
        return len(self._rest)

    @property
    def rest(self) -> bytes:
        """What came behind the last whole event."""
        return bytes(self._rest)
