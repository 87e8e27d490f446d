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
    """A request, ready to be sent. `mark` is fresh, and stands in the prompt; engines' logs will show it."""

    shape: Shape
    body: bytes
    mark: str

    @property
    def request_id(self) -> str:
        """The request's id."""
        return f"conformance-{self.mark}"


def question(shape: Shape, model: str, text: str, mark: str) -> Question:
    """Return a request for a `text` with a `mark` in it."""
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
    return Question(shape=shape, body=msgspec.json.encode(fields), mark=mark)


def renewed(asked: Question, mark: str) -> Question:
    """Return the same request with another mark in its prompt."""
    return Question(shape=asked.shape, body=asked.body.replace(asked.mark.encode(), mark.encode()), mark=mark)


def salted(asked: Question, salt: str) -> Question:
    """Return the same request, to be computed without any cached KV, under an id of its own."""
    return Question(shape=asked.shape, body=adding(asked, "cache_salt", salt).body, mark=f"alone-{salt}")


def adding(asked: Question, name: str, value: object) -> Question:
    """Return the same request with a further field."""
    fields = msgspec.json.decode(asked.body) | {name: value}
    return Question(shape=asked.shape, body=msgspec.json.encode(fields), mark=asked.mark)


def without(asked: Question, name: str) -> Question:
    """Return the same request without a field."""
    fields = msgspec.json.decode(asked.body)
    del fields[name]
    return Question(shape=asked.shape, body=msgspec.json.encode(fields), mark=asked.mark)


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


def under(mark: str, block: int, size: int) -> str:
    """Return a text that is under `size` tokens for certain, in bytes even; "" where there is none."""
    return moving(mark, block, None)[: max(size - 3, 0)]
