"""Makes one stream of two engines': the second one goes on with an answer as a completion behind
the ids so far. Pure.

The client sees the first stream go on: the same id, `created` and model, chat chunks if it was a
chat, no second role, and a usage that counts all of the answer as answer.
"""

from __future__ import annotations

import msgspec

from pdproxy.transfer.chat_chunks import (
    NULL,
    NotACompletionError,
    body_decoder,
    chat_choice,
    choices_decoder,
    moved_usage,
)
from pdproxy.transfer.contract import raw
from pdproxy.wire import sse
from pdproxy.wire.engine import UNREADABLE, Usage
from pdproxy.wire.fields import Fields
from pdproxy.wire.usage import with_cache

_SHOWN = ("id", "object", "created", "model")
"""Fields that are the same in all events of a stream."""
_TEXTS = ("reasoning", "reasoning_content", "content", "text")
_IDS = ("prompt_token_ids", "token_ids")
_DATA = b"data:"
_ids_decoder = msgspec.json.Decoder(list[int] | None)
_counts_decoder = msgspec.json.Decoder(Usage)
_text_decoder = msgspec.json.Decoder(str | None)


class LastEvent:
    """The last event of data that the client was sent: what all its events show, and the text at
    its end.

    `shown`: the fields that all events of the stream have. `ids`: how many token ids it has, as the
    engine sent it. `kind`: the name of the text's field, None if it has none.
    """

    __slots__ = ("_choice", "_event", "ids", "is_chat", "kind", "shown", "text")

    def __init__(self, sent: bytes) -> None:
        """Read an event, possibly framed as an HTTP chunk.

        Raises:
            NotACompletionError: it is no event of a completion or a chat.
        """
        try:
            event = body_decoder.decode(sent[sent.index(_DATA) + len(_DATA) :].strip())
            self.shown: Fields = {name: event[name] for name in _SHOWN}
            (self._choice,) = choices_decoder.decode(event["choices"])
            self.is_chat = "delta" in self._choice
            found = body_decoder.decode(self._choice["delta"]) if self.is_chat else self._choice
            self.kind = next((name for name in _TEXTS if name in found), None)
            self.text = "" if self.kind is None else _text_decoder.decode(found[self.kind]) or ""
            self.ids = len(_ids_decoder.decode(self._choice.get("token_ids", NULL)) or ())
        except (*UNREADABLE, KeyError, ValueError) as error:
            raise NotACompletionError(str(error)) from None
        self._event = event

    def with_text(self, text: str) -> bytes:
        """Return an event like it (JSON) with another text."""
        choice = {name: NULL if name in _IDS else value for name, value in self._choice.items()}
        field = raw(msgspec.json.encode(text))
        if self.is_chat:
            choice["delta"] = raw(msgspec.json.encode({"content": field}))
        else:
            choice["text"] = field
        return msgspec.json.encode(self._event | {"choices": raw(msgspec.json.encode([choice]))})

    def usage_event(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """Return the usage event (JSON) of the stream, for one that ends without its own."""
        counts = (prompt_tokens, prompt_tokens + completion_tokens, completion_tokens)
        usage = raw(b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % counts)
        return msgspec.json.encode(self.shown | {"choices": raw(b"[]"), "usage": usage})


class ContinuedEvents:
    """Rewrites the events of a completion that goes on with a stream.

    `shown`: what all events of that stream show (`LastEvent`); `done`: tokens of the answer before;
    `cached`: prompt tokens that the first prefill found in its cache, None: as the second one says,
    at most all of the prompt.
    """

    __slots__ = ("_cached", "_done", "_is_chat", "_shown")

    def __init__(
        self, shown: Fields, *, is_chat: bool, done: int, cached: int | None = None
    ) -> None:
        self._shown = shown
        self._is_chat = is_chat
        self._done = done
        self._cached = cached

    def batch(self, batch: bytes) -> bytes:
        """Return whole events as the client gets them. Comments and the end mark do not change.

        Raises:
            NotACompletionError: one of them is no event of a completion.
        """
        return b"".join([self.event(event + sse.END) for event in batch.split(sse.END) if event])

    def event(self, event: bytes) -> bytes:
        """Return one event as the client gets it. Raises as `batch`."""
        lines = sse.data_lines(event)
        if not lines or sse.is_done(lines[0]):
            return event
        try:
            return sse.data(self._rewritten(body_decoder.decode(sse.payload(event))))
        except (*UNREADABLE, KeyError) as error:
            raise NotACompletionError(str(error)) from None

    def _rewritten(self, event: Fields) -> bytes:
        choices = choices_decoder.decode(event["choices"])
        event |= self._shown
        if bytes(event.get("usage", NULL)) != b"null":
            usage = moved_usage(
                event["usage"], self._done, of_chat_event=self._is_chat and bool(choices)
            )
            event["usage"] = raw(
                with_cache(bytes(usage), cached=self._cached_of(usage), created=None)
            )
        for choice in choices:
            if "prompt_token_ids" in choice:
                choice["prompt_token_ids"] = NULL  # the first event has them
        if choices and self._is_chat:
            choices = [chat_choice(choice) for choice in choices]
        event["choices"] = raw(msgspec.json.encode(choices))
        return msgspec.json.encode(event)

    def _cached_of(self, usage: msgspec.Raw) -> int | None:
        """Return how many tokens of the prompt were cached: the second engine's prompt is longer,
        and all of it may be.
        """
        counts = _counts_decoder.decode(usage)
        details = counts.prompt_tokens_details
        if self._cached is not None or details is None or details.cached_tokens is None:
            return self._cached
        return min(details.cached_tokens, counts.prompt_tokens)
