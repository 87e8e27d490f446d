"""Reads answers of engines and of the proxy, whole or streamed, into one form for all routes.
Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from pdproxy.wire.engine import Usage


class SeenAnswer(msgspec.Struct, kw_only=True):
    """One answer. `ids` and `prompt_ids` are empty if it has none; `events` counts a stream's
    events with output.

    `fields`: the paths of all fields that have a value, in any event, such as
    `choices.delta.content`.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    finish: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    events: int = 0
    seconds: float = 0.0
    fields: frozenset[str] = frozenset()

    def differences(self, other: SeenAnswer, whose: str) -> list[str]:
        """Return descriptions of the differences from another answer to the same request."""
        found = []
        if self.ids != other.ids:
            at = next(
                (i for i, (a, b) in enumerate(zip(self.ids, other.ids, strict=False)) if a != b),
                None,
            )
            where = (
                f"from token {at} on"
                if at is not None
                else f"{len(self.ids)} and {len(other.ids)} ids"
            )
            found.append(f"token ids differ from {whose} ({where})")
        for name, mine, others in (
            ("text", self.text, other.text),
            ("finish_reason", self.finish, other.finish),
            ("usage.prompt_tokens", self.prompt_tokens, other.prompt_tokens),
            ("usage.completion_tokens", self.completion_tokens, other.completion_tokens),
            ("prompt_token_ids", self.prompt_ids, other.prompt_ids),
        ):
            if mine != others and not (name == "text" and found):
                found.append(f"{name} is {_short(mine)}, {whose} has {_short(others)}")
        if own := self.fields - other.fields:
            found.append(f"it has the fields {_named(own)}, {whose} has not")
        # An engine alone may show a handle. No client of the proxy gets one.
        missing = {name for name in other.fields - self.fields if not name.endswith(_HANDLE)}
        if missing and not found:
            found.append(f"it has no fields {_named(missing)}, {whose} has")
        return found


_HANDLE = "_transfer_params"
_MOST = 5
_FREE = ("logprobs", "prompt_logprobs")
"""Fields whose keys are tokens."""
_VARYING = (
    *("prompt_tokens_details", "completion_tokens_details"),
    *("cache_read_input_tokens", "cache_creation_input_tokens"),
)
"""Fields that depend on what is cached: an engine leaves them out if that is nothing."""


def _named(names: Collection[str]) -> str:
    shown = sorted(names)[:_MOST]
    return ", ".join(shown) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")


def _paths(value: Any, prefix: str = "") -> frozenset[str]:
    """Return the paths of the fields with a value."""
    if isinstance(value, list):
        return frozenset().union(
            *(_paths(one, prefix) for one in value if isinstance(one, dict | list))
        )
    if not isinstance(value, dict):
        return frozenset()
    found = {
        prefix + name for name, one in value.items() if one is not None and name not in _VARYING
    }
    inner = (
        _paths(one, f"{prefix}{name}.")
        for name, one in value.items()
        if name not in (*_FREE, *_VARYING)
    )
    return frozenset(found).union(*inner)


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        return (self.reasoning or "") + (self.content or "")


class _Choice(msgspec.Struct):
    text: str = ""
    message: _Message | None = None
    delta: _Message | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class _Part(msgspec.Struct):
    """A part of a response or a message, or what one of their events adds to it."""

    text: str = ""
    thinking: str = ""
    content: list[_Part] | None = None
    stop_reason: str | None = None

    @property
    def all(self) -> str:
        return self.thinking + self.text + "".join(part.all for part in self.content or ())


class _Used(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Response(msgspec.Struct):
    status: str
    usage: _Used | None = None


class _Named(msgspec.Struct):
    """A whole response or message, or one of their events: by `type`, or by `object`."""

    type: str = ""
    object: str = ""
    delta: str | _Part | None = None
    response: _Response | None = None
    output: list[_Part] | None = None
    content: list[_Part] | None = None
    status: str | None = None
    stop_reason: str | None = None
    usage: _Used | None = None
    error: msgspec.Raw | None = None


class _Error(msgspec.Struct):
    error: msgspec.Raw


_LAST = ("response.completed", "response.incomplete", "message_stop")
_TEXTS = ("response.output_text.delta", "response.reasoning_text.delta", "content_block_delta")
_decoder = msgspec.json.Decoder(_Body)
_named_decoder = msgspec.json.Decoder(_Named)
_error_decoder = msgspec.json.Decoder(_Error)


class InvalidAnswerError(Exception):
    """An answer can't be read, or is not complete."""


def read_whole(body: bytes) -> SeenAnswer:
    """Read a whole answer.

    Raises:
        InvalidAnswerError: it can't be read, or is not complete.
    """
    answer = SeenAnswer()
    if _kind(body) in ("response", "message"):
        _take_named(answer, body)
    else:
        _take(answer, body)
    if answer.finish is None:
        raise InvalidAnswerError("its answer has no finish_reason")
    return answer


class Stream:
    """Reads a stream, one SSE line at a time."""

    def __init__(self) -> None:
        self.answer = SeenAnswer()
        self.done = False

    def line(self, line: bytes) -> bool:
        """Take a line; return whether it has output.

        Raises:
            InvalidAnswerError: it is an error event, or not an event.
        """
        if not line.startswith(b"data:"):
            return False
        data = line[5:].strip()
        if data == b"[DONE]":
            self.done = True
            return False
        if (kind := _kind(data)) != "":
            self.done = self.done or kind in _LAST
            output = _take_named(self.answer, data)
            self.answer.events += output
            return output
        event = _take(self.answer, data)
        output = any(
            choice.text or (choice.delta and choice.delta.text) or choice.token_ids
            for choice in event.choices
        )
        self.answer.events += bool(output)
        return bool(output)

    def end(self) -> SeenAnswer:
        """Return the answer after the end of the stream.

        Raises:
            InvalidAnswerError: it is not complete.
        """
        if not self.done or self.answer.finish is None:
            raise InvalidAnswerError("its stream ended early")
        return self.answer


def _kind(data: bytes) -> str:
    """Return which answer or event of a route with named events it is, "" if it is of another
    route.
    """
    try:
        named = _named_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    return named.type or ("response" if named.object == "response" else "")


def _take_named(answer: SeenAnswer, data: bytes) -> bool:
    """Add a whole response or message, or one of their events. Return whether it has output.

    Raises:
        InvalidAnswerError: it is an error.
    """
    named = _named_decoder.decode(data)
    if named.type in ("error", "response.failed"):
        raise InvalidAnswerError(f"its answer is an error: {data[:200].decode('utf-8', 'replace')}")
    answer.fields |= _paths(msgspec.json.decode(data))
    before = answer.text
    if named.type in _TEXTS and named.delta is not None:
        answer.text += named.delta if isinstance(named.delta, str) else named.delta.all
    for part in (*(named.output or ()), *(named.content or ())):
        answer.text += part.all
    status, usage = named.status or named.stop_reason, named.usage
    if named.response is not None and named.type in _LAST:
        status, usage = named.response.status, named.response.usage
    elif isinstance(named.delta, _Part):
        status = named.delta.stop_reason
    answer.finish = status or answer.finish
    if usage is not None:
        cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        answer.prompt_tokens = usage.input_tokens + cached
        answer.completion_tokens = usage.output_tokens
    return answer.text != before


def _read(data: bytes) -> _Body:
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    try:
        error = bytes(_error_decoder.decode(data).error).decode("utf-8", "replace")
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise InvalidAnswerError("its answer is not a completion") from None
    raise InvalidAnswerError(f"its answer is an error: {error[:200]}")


def _take(answer: SeenAnswer, data: bytes) -> _Body:
    """Add a whole answer, or an event, to an answer. Return it.

    Raises:
        InvalidAnswerError: it can't be read, or is an error.
    """
    body = _read(data)
    answer.fields |= _paths(msgspec.json.decode(data))
    if body.prompt_token_ids is not None:
        answer.prompt_ids = tuple(body.prompt_token_ids)
    if body.usage is not None:
        answer.prompt_tokens = body.usage.prompt_tokens
        answer.completion_tokens = body.usage.completion_tokens or 0
    for choice in body.choices:
        shown = choice.message or choice.delta
        answer.text += choice.text + (shown.text if shown is not None else "")
        answer.ids += tuple(choice.token_ids or ())
        answer.finish = choice.finish_reason or answer.finish
        if choice.prompt_token_ids is not None:
            answer.prompt_ids = tuple(choice.prompt_token_ids)
    return body
