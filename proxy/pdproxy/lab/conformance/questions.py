"""What engines are asked to say: bodies of completions and chats. Pure; what must be fresh is passed in.

All are greedy and of fixed length, so that two engines with the same weights say the same. A prompt begins with a `mark` that no
engine has seen, so that its KV is cached nowhere. In a chat the template's own beginning may be.
"""

from __future__ import annotations

import msgspec

from pdproxy.lab.check import prompts
from pdproxy.wire.request import Parsed, Route, parse

LENGTH = 16
"""Tokens of an answer."""
_LONG = 64
"""Three times as many tokens are a long prompt, by the scarcest tokenizer; a byte-level one makes some hundred of it."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One form of request. `ids`: whether the answer is to carry token ids."""

    route: Route = Route.COMPLETIONS
    stream: bool = False
    max_tokens: int = LENGTH
    ids: bool = True

    @property
    def words(self) -> str:
        """Its name in a report."""
        kind = "chat" if self.route is Route.CHAT else "completion"
        return f"{'streamed ' if self.stream else ''}{kind}{' of one token' if self.max_tokens == 1 else ''}"


COMPLETION = Shape()
COMPLETION_STREAM = Shape(stream=True)
CHAT = Shape(route=Route.CHAT)
CHAT_STREAM = Shape(route=Route.CHAT, stream=True)


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A request, ready to be sent. `request_id` is fresh, and what engines' logs will show."""

    shape: Shape
    body: bytes
    request_id: str


def question(shape: Shape, model: str, text: str, request_id: str, **more: object) -> Question:
    """Return a request for `text`. `more` are further fields."""
    fields: dict[str, object] = {"model": model}
    if shape.route is Route.CHAT:
        fields["messages"] = [{"role": "user", "content": text}]
    else:
        fields["prompt"] = text
    fields |= {
        "max_tokens": shape.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": shape.stream,
    }
    if shape.stream:
        fields["stream_options"] = {"include_usage": True}
    if shape.ids:
        fields["return_token_ids"] = True
    return Question(shape=shape, body=msgspec.json.encode(fields | more), request_id=request_id)


def salted(asked: Question, salt: str, request_id: str) -> Question:
    """Return the same request, to be computed without any cached KV."""
    fields = msgspec.json.decode(asked.body) | {"cache_salt": salt}
    return Question(shape=asked.shape, body=msgspec.json.encode(fields), request_id=request_id)


def adding(asked: Question, name: str, value: object) -> Question:
    """Return the same request with a further field."""
    fields = msgspec.json.decode(asked.body) | {name: value}
    return Question(shape=asked.shape, body=msgspec.json.encode(fields), request_id=asked.request_id)


def as_parsed(asked: Question) -> Parsed:
    """Return a request as the proxy reads it."""
    return parse(asked.shape.route, asked.body)


def moving(mark: str, granule: int, max_model_len: int | None) -> str:
    """Return a text of several granules (tokens that move as one), or as long as surely fits."""
    return prompts.counting(mark, granule, max_model_len)


def long(mark: str, granule: int, max_model_len: int | None) -> str:
    """Return a text that takes a moment to prefill.

    It still fits into one step of an engine: ExampleConnector stores no more than the first one's, and dies of the rest.
    """
    return moving(mark, max(granule, _LONG), max_model_len)


def short(mark: str, granule: int) -> str:
    """Return a text that is under a granule for certain, in bytes even; "" where there is none."""
    return mark[: max(granule - 3, 0)]
