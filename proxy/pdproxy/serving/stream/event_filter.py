"""What of a stream's events goes on to the client: events that only pdproxy asked for are taken out, errors end the stream.

Owns the usage of a stream, and the last event of a choice until the next event shows whether it needs the fingerprint: an
engine that was asked for a usage event puts the fingerprint there, and the client did not ask for that event.
"""

from __future__ import annotations

from pdproxy.kit.errors import EngineError
from pdproxy.serving.stream.failures import failure_in, tiny_lines
from pdproxy.serving.stream.whole_events import CreationTime
from pdproxy.wire import sse
from pdproxy.wire.engine import Usage, usage_of
from pdproxy.wire.usage import with_cache


class EventFilter:
    """The filter of one stream.

    `wants_usage`: whether the client asked for the usage event, which pdproxy always asks for.
    `keeps_usage`: whether the client gets that event, be it at the end of several merged streams.
    `wants_done`: whether the end mark goes to the client (False for one stream of several).
    `index`, `creation_time`: what the events of one stream of several show in place of their own.
    `every`: each batch must go through `filtered`; otherwise only those that `sse.may_be_special`.
    """

    __slots__ = (
        "_creation_time",
        "_index",
        "_keeps_usage",
        "_wants_done",
        "_wants_usage",
        "cached_tokens",
        "created_cache_tokens",
        "done",
        "every",
        "failure",
        "last_events",
        "usage",
        "usage_event",
    )

    def __init__(
        self,
        *,
        wants_usage: bool,
        keeps_usage: bool,
        wants_done: bool,
        index: int | None,
        creation_time: CreationTime | None,
    ) -> None:
        self._wants_usage = wants_usage
        self._keeps_usage = keeps_usage
        self._wants_done = wants_done
        self._index = index
        self._creation_time = creation_time
        self.every = index is not None
        self.cached_tokens: int | None = None
        self.created_cache_tokens: int | None = None
        """What the usage must say of the prefill engine's cache; None: what the engine says."""
        self.usage: Usage | None = None
        self.usage_event: bytes | None = None
        """The stream's, None before it came."""
        self.done = False
        """Whether the end mark has come."""
        self.failure: EngineError | None = None
        """What an event says has failed."""
        self.last_events: list[bytes] = []
        """Last events of choices that are held back."""

    def __repr__(self) -> str:
        return f"<EventFilter {'done' if self.done else self.failure or 'open'}, {len(self.last_events)} events held>"

    def whole(self, body: bytes) -> bytes:
        """Return a whole answer with the usage that its client gets."""
        body = with_cache(body, cached=self.cached_tokens, created=self.created_cache_tokens)
        self.usage = usage_of(body)
        return body

    def filtered(self, batch: bytes) -> bytes:
        """Return what of a batch of whole events goes on. Nothing behind the end mark or a failure does."""
        if sse.has_tiny_lines(batch):
            self.failure = tiny_lines()
            return b""
        passed: list[bytes] = []
        for bare in batch.split(sse.END):
            if not bare:
                continue
            event = bare.lstrip(b"\n") + sse.END
            if self._index is None and not sse.may_be_special(event):
                passed += [*self._take_last_events(), event]
                continue
            if sse.is_spaced(event):
                event = sse.compact(event)
            lines = sse.data_lines(event)
            if (error := failure_in(event, lines)) is not None:
                self.failure = error
                break
            if not lines:
                passed.append(event)  # a keep-alive comment
                continue
            if sse.is_usage_only(event):
                event = with_cache(event, cached=self.cached_tokens, created=self.created_cache_tokens)
                self.usage = usage_of(sse.payload(event))
                self.usage_event = event
                if not self._wants_usage:
                    passed += [sse.with_fingerprint(last, event) for last in self._take_last_events()]
                    continue
            passed += self._take_last_events()
            if sse.is_done(lines[0]):
                self.done = True
                if self._wants_done:
                    passed.append(event)
                break
            if self._index is not None:
                event = self._with_index(event, self._index)
            if not self._keeps_usage and sse.is_last_of_choice(event):
                self.last_events.append(event)  # the usage event, which comes next, has taken its fingerprint
                continue
            passed.append(event)
        return b"".join(passed)

    def _with_index(self, event: bytes, index: int) -> bytes:
        """Return an event as one of a stream that several streams are merged into."""
        if self._creation_time is not None:
            event = self._creation_time.put_into(event)
        return sse.with_index(event, index)

    def _take_last_events(self) -> list[bytes]:
        events, self.last_events = self.last_events, []
        return events
