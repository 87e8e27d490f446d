"""Reads a streamed answer: when each event with tokens came, the usage, the end. Pure: times are
arguments.

No text is kept. Each event is parsed once, into the few fields that are needed.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_EVENT = 1 << 18
"""Bytes of an event. A longer one breaks the stream."""
_DONE = b"[DONE]"
_OTHER_LINES = (b":", b"event:", b"id:", b"retry:")
_Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]


_ABSENT = msgspec.Raw()
_EMPTY = frozenset({b"", b"null", b"[]"})


class BrokenStream(Exception):  # noqa: N818 - of the server measured, not of this program
    """The stream is not what vLLM would send. `str()` says why, in one line."""


class ErrorEvent(Exception):  # noqa: N818 - as above
    """The server has sent an error inside the stream. `str()` is its message."""


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw = _ABSENT


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: msgspec.Raw = _ABSENT


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = _ABSENT
    object: str | None = None


class _Error(msgspec.Struct):
    message: str = ""


_EVENT = msgspec.json.Decoder(_Event)
_ERROR = msgspec.json.Decoder(_Error)
_DETAILS = msgspec.json.Decoder(_Details | None)


class EventReader:
    """Reads one answer. `max_events`: events with tokens; more break the stream."""

    def __init__(self, max_events: int) -> None:
        self.times: list[float] = []
        """When events with tokens came. The event of a chat that only names the role has none."""
        self.prompt_tokens: int | None = None
        """By the usage; None: it had no such count, or there was none."""
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        """Prompt tokens that were found in a cache, by the usage; None: it does not say so."""
        self.done = False
        """Whether the end mark has come."""
        self._max_events = max_events
        self._rest: list[bytes] = []
        self._rest_size = 0

    def feed(self, chunk: bytes, now: float) -> None:
        """Read bytes that came at `now`. What follows the end mark is dropped.

        Raises:
            BrokenStream: they are not events of a completion or a chat, or too many.
            ErrorEvent: the server reported an error.
        """
        if self.done:
            return
        self._rest.append(chunk)
        self._rest_size += len(chunk)
        if b"\n" in chunk:
            joined = b"".join(self._rest) if len(self._rest) > 1 else chunk
            if b"\r" in joined:
                joined = joined.replace(b"\r\n", b"\n")
            *events, rest = joined.split(b"\n\n")
            self._rest, self._rest_size = [rest] if rest else [], len(rest)
            for event in events:
                self._read(event, now)
        if self._rest_size > MAX_EVENT:
            raise BrokenStream(f"an event is longer than {MAX_EVENT} bytes")

    def end(self) -> None:
        """Check that the answer was whole when its last byte has come.

        Raises:
            BrokenStream: the end mark or all tokens are missing.
        """
        if not self.done:
            raise BrokenStream("it ended without [DONE]")
        if not self.times:
            raise BrokenStream("it has no tokens")

    def _read(self, event: bytes, now: float) -> None:
        if self.done:
            return
        if event.startswith(b"data: ") and b"\n" not in event:
            data = event[6:]
        else:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if not lines:  # a comment, or an empty line
                if not all(
                    line.startswith(_OTHER_LINES) or not line for line in event.split(b"\n")
                ):
                    raise BrokenStream("it is no stream of server-sent events")
                return
            data = b"\n".join(lines)
        if data == _DONE:
            self.done = True
            return
        try:
            read = _EVENT.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise BrokenStream(
                f"an event is no chunk of an answer: {' '.join(str(error).split())}"
            ) from None
        self._take(read, now)

    def _take(self, event: _Event, now: float) -> None:
        if bytes(event.error) not in _EMPTY or event.object == "error":
            raise ErrorEvent(_message(event.error))
        if event.usage is not None:
            if event.usage.prompt_tokens is not None:
                self.prompt_tokens = event.usage.prompt_tokens
            if event.usage.completion_tokens is not None:
                self.output_tokens = event.usage.completion_tokens
            if (cached := _cached(event.usage.prompt_tokens_details)) is not None:
                self.cached_tokens = cached
        if event.choices and not _role_only(event.choices[0]):
            if event.choices[0].finish_reason == "abort":
                raise ErrorEvent('finish_reason "abort": the engine was stopped')
            if len(self.times) >= self._max_events:
                raise BrokenStream(f"it has more than {self._max_events} events")
            self.times.append(now)


def _role_only(choice: _Choice) -> bool:
    delta = choice.delta
    return (
        delta is not None
        and delta.role is not None
        and choice.finish_reason is None
        and not (delta.content or delta.reasoning or delta.reasoning_content)
        and bytes(delta.tool_calls) in _EMPTY
    )


def _cached(details: msgspec.Raw) -> int | None:
    """Return the cached tokens of a usage's details. What says nothing that can be read is as if
    it were not there: the times of the answer are right without it.
    """
    try:
        found = _DETAILS.decode(details)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return None if found is None else found.cached_tokens


def _message(error: msgspec.Raw) -> str:
    try:
        return " ".join(_ERROR.decode(error).message.split()) or "an error event"
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return "an error event"
