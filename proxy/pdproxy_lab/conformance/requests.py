"""What checks send. Pure; unique marks are passed in.

All are greedy and, but for messages, of fixed length, so that two engines with the same weights
generate the same. Prompts begin with a `mark` that no engine has seen, so its KV is not cached. The
beginning of a chat's template may be.
"""

from __future__ import annotations

import msgspec

from pdproxy.check import prompts
from pdproxy.wire.request import Parsed, parse
from pdproxy.wire.route import Route

LENGTH = 16
"""Tokens of an answer."""
_LONG = 64
"""A long prompt has at least three times as many tokens with any tokenizer, and some hundred with a
byte-level one.
"""


_KINDS = {Route.CHAT: "chat", Route.RESPONSES: "response", Route.MESSAGES: "message"}
_LIMITS = {Route.RESPONSES: "max_output_tokens"}
_NO_IDS = (Route.RESPONSES, Route.MESSAGES)
"""Routes whose answers never have token ids, and whose streams always have usage."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One form of request. `ids`: whether it asks for token ids, where its route has some."""

    route: Route = Route.COMPLETIONS
    stream: bool = False
    max_tokens: int = LENGTH
    ids: bool = True

    @property
    def name(self) -> str:
        """Its name in a report."""
        kind = _KINDS.get(self.route, "completion")
        return (
            f"{'streamed ' if self.stream else ''}{kind}"
            f"{' of one token' if self.max_tokens == 1 else ''}"
        )


COMPLETION = Shape()
COMPLETION_STREAM = Shape(stream=True)
CHAT = Shape(route=Route.CHAT)
CHAT_STREAM = Shape(route=Route.CHAT, stream=True)
RESPONSE = Shape(route=Route.RESPONSES)
RESPONSE_STREAM = Shape(route=Route.RESPONSES, stream=True)
MESSAGE = Shape(route=Route.MESSAGES)
MESSAGE_STREAM = Shape(route=Route.MESSAGES, stream=True)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request to send. `mark` is unique and part of the prompt and of the request's id, so
    engines' logs show it.
    """

    shape: Shape
    body: bytes
    mark: str

    @property
    def request_id(self) -> str:
        """The request's id."""
        return f"conformance-{self.mark}"


def make_request(shape: Shape, model: str, text: str, mark: str) -> Request:
    """Return a request with the prompt `text`, which contains `mark`."""
    fields: dict[str, object] = {"model": model}
    if shape.route is Route.RESPONSES:
        fields["input"] = text
    elif shape.route in (Route.CHAT, Route.MESSAGES):
        fields["messages"] = [{"role": "user", "content": text}]
    else:
        fields["prompt"] = text
    fields |= {
        _LIMITS.get(shape.route, "max_tokens"): shape.max_tokens,
        "temperature": 0,
        "stream": shape.stream,
    }
    if shape.route is not Route.MESSAGES:  # it does not know the field
        fields["ignore_eos"] = True
    if shape.route not in _NO_IDS:
        if shape.stream:
            fields["stream_options"] = {"include_usage": True}
        if shape.ids:
            fields["return_token_ids"] = True
    return Request(shape=shape, body=msgspec.json.encode(fields), mark=mark)


def with_mark(request: Request, mark: str) -> Request:
    """Return the same request with another mark in its prompt."""
    return Request(
        shape=request.shape,
        body=request.body.replace(request.mark.encode(), mark.encode()),
        mark=mark,
    )


def salted(request: Request, salt: str) -> Request:
    """Return the same request with a salt, so that no cached KV is used, and with another id."""
    return Request(
        shape=request.shape, body=with_field(request, "cache_salt", salt).body, mark=f"alone-{salt}"
    )


def with_picture(request: Request) -> Request:
    """Return the same chat with a picture behind its text, which no engine has encoded before."""
    (message,) = msgspec.json.decode(request.body)["messages"]
    text = {"type": "text", "text": message["content"]}
    message["content"] = [text, prompts.picture(request.mark)]
    return with_field(request, "messages", [message])


def with_field(request: Request, name: str, value: object) -> Request:
    """Return the same request with another field."""
    fields = msgspec.json.decode(request.body) | {name: value}
    return Request(shape=request.shape, body=msgspec.json.encode(fields), mark=request.mark)


def without_field(request: Request, name: str) -> Request:
    """Return the same request without a field."""
    fields = msgspec.json.decode(request.body)
    del fields[name]
    return Request(shape=request.shape, body=msgspec.json.encode(fields), mark=request.mark)


def as_parsed(request: Request) -> Parsed:
    """Return a request as the proxy reads it."""
    return parse(request.shape.route, request.body)


def multi_block_text(mark: str, transfer_unit: int, max_model_len: int | None) -> str:
    """Return a text of several transfer units (tokens that move as one), or as long as certainly
    fits.
    """
    return prompts.counting(mark, transfer_unit, max_model_len)


def long_text(mark: str, transfer_unit: int, max_model_len: int | None) -> str:
    """Return a text whose prefill takes a noticeable time.

    It still fits into one step of an engine: ExampleConnector stores only the KV of the first step,
    and dies of the rest.
    """
    return multi_block_text(mark, max(transfer_unit, _LONG), max_model_len)


def short_text(mark: str, block: int, size: int) -> str:
    """Return a text of certainly less than `size` tokens, because it has less bytes; "" if there is
    none.
    """
    return multi_block_text(mark, block, None)[: max(size - 3, 0)]
