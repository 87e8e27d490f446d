"""What an engine, or the proxy, said: a whole answer or a stream, a completion or a chat, read into one form. Pure."""

from __future__ import annotations

import msgspec

from pdproxy.wire.engine import Usage


class Said(msgspec.Struct, kw_only=True):
    """One answer. `ids` and `prompt_ids` are empty where it carries none; `events` counts a stream's events with output."""

    text: str = ""
    ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    finish: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    events: int = 0
    seconds: float = 0.0

    def differences(self, other: Said, whose: str) -> list[str]:
        """Return in words how another answer to the same question differs."""
        found = []
        if self.ids != other.ids:
            at = next((i for i, (a, b) in enumerate(zip(self.ids, other.ids, strict=False)) if a != b), None)
            where = f"from token {at} on" if at is not None else f"{len(self.ids)} and {len(other.ids)} ids"
            found.append(f"other token ids than {whose} ({where})")
        for name, mine, others in (
            ("text", self.text, other.text),
            ("finish_reason", self.finish, other.finish),
            ("usage.prompt_tokens", self.prompt_tokens, other.prompt_tokens),
            ("usage.completion_tokens", self.completion_tokens, other.completion_tokens),
            ("prompt_token_ids", self.prompt_ids, other.prompt_ids),
        ):
            if mine != others and not (name == "text" and found):
                found.append(f"{name} is {_short(mine)}, {whose} says {_short(others)}")
        return found


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


class _Error(msgspec.Struct):
    error: msgspec.Raw


_decoder = msgspec.json.Decoder(_Body)
_error_decoder = msgspec.json.Decoder(_Error)


class BrokenError(Exception):
    """An answer is none, or ended before its end."""


def whole(body: bytes) -> Said:
    """Read a whole answer.

    Raises:
        BrokenError: it is none.
    """
    said = Said()
    _take(said, _read(body))
    if said.finish is None:
        raise BrokenError("its answer has no finish_reason")
    return said


class Stream:
    """Reads a stream, an SSE line at a time."""

    def __init__(self) -> None:
        self.said = Said()
        self.done = False

    def line(self, line: bytes) -> bool:
        """Take a line; return whether it brought output.

        Raises:
            BrokenError: it is an error event, or no event at all.
        """
        if not line.startswith(b"data:"):
            return False
        data = line[5:].strip()
        if data == b"[DONE]":
            self.done = True
            return False
        event = _read(data)
        output = any(
            choice.text or (choice.delta and choice.delta.text) or choice.token_ids for choice in event.choices
        )
        self.said.events += bool(output)
        _take(self.said, event)
        return bool(output)

    def end(self) -> Said:
        """Return what was said, the stream being over.

        Raises:
            BrokenError: it is not whole.
        """
        if not self.done or self.said.finish is None:
            raise BrokenError("its stream broke off")
        return self.said


def _read(data: bytes) -> _Body:
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    try:
        error = bytes(_error_decoder.decode(data).error).decode("utf-8", "replace")
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise BrokenError("its answer is no completion") from None
    raise BrokenError(f"its answer is an error: {error[:200]}")


def _take(said: Said, body: _Body) -> None:
    if body.prompt_token_ids is not None:
        said.prompt_ids = tuple(body.prompt_token_ids)
    if body.usage is not None:
        said.prompt_tokens = body.usage.prompt_tokens
        said.completion_tokens = body.usage.completion_tokens or 0
    for choice in body.choices:
        shown = choice.message or choice.delta
        said.text += choice.text + (shown.text if shown is not None else "")
        said.ids += tuple(choice.token_ids or ())
        said.finish = choice.finish_reason or said.finish
        if choice.prompt_token_ids is not None:
            said.prompt_ids = tuple(choice.prompt_token_ids)
