"""Decides which events of a stream go to the client. Events that only pdproxy asked for are
removed, errors end the stream.

Owns the usage of a stream, and the last event of each choice until the usage event has come. An
engine puts the fingerprint into the usage event if it sends one, otherwise into these last events.
If the client did not ask for the usage event, its fingerprint is moved back to them. Of several
choices, the first ones to end so get their last events later than from the engine.

An engine with `--enable-force-include-usage` sends every client the usage, in each event and in one
of its own. pdproxy never asks for the first, so a usage in the last event of a choice shows that
flag: then the client gets the usage event, too.
"""

from __future__ import annotations

from pdproxy.kit.errors import EngineError
from pdproxy.serving.stream.failures import GivenUpError, failure_in, tiny_lines
from pdproxy.serving.stream.proof import has_real_data
from pdproxy.serving.stream.whole_events import CreationTime
from pdproxy.wire import inside, sse
from pdproxy.wire.engine import Usage, usage_of
from pdproxy.wire.usage import with_cache

_MAX_HELD = 1 << 20
"""Bytes of the last events of choices that are held back while other choices go on. More go to the
client as they are.
"""


class EventFilter:
    """The filter of one stream.

    `wants_usage`: whether the client asked for the usage event, which pdproxy always asks for.
    `keeps_usage`: whether the client gets that event, possibly at the end of several merged
    streams. Both become True if the engine forces the usage on every client; for one stream of
    several (`index`), only `keeps_usage`. `wants_done`: whether the end mark goes to the client
    (False for one stream of several). `choices`: how many choices must have ended before the end of
    the stream. `index`, `creation_time`: what the events of one stream of several show in place of
    their own. `every`: each batch must go through `filtered`; otherwise only those that
    `sse.may_be_special`.
    """

    __slots__ = (
        "_choices",
        "_creation_time",
        "_ended",
        "_index",
        "_size",
        "cached_tokens",
        "created_cache_tokens",
        "done",
        "every",
        "failure",
        "finished",
        "handle",
        "keeps_usage",
        "last_events",
        "opening",
        "usage",
        "usage_event",
        "wants_done",
        "wants_usage",
    )

    def __init__(
        self,
        *,
        wants_usage: bool,
        keeps_usage: bool,
        wants_done: bool,
        choices: int,
        index: int | None,
        creation_time: CreationTime | None,
    ) -> None:
        self.wants_usage = wants_usage
        self.keeps_usage = keeps_usage
        self.wants_done = wants_done
        self._choices = choices
        self._index = index
        self._creation_time = creation_time
        self._ended: list[bytes] = []  # last events, while other choices go on
        self._size = 0  # their bytes
        self.every = index is not None
        self.opening = 0
        """How many events come yet that are not counted."""
        self.cached_tokens: int | None = None
        self.created_cache_tokens: int | None = None
        """Cache counts of the prefill engine for the usage; None: the usage stays as it is."""
        self.usage: Usage | None = None
        self.usage_event: bytes | None = None
        """The stream's usage event, None before it has come."""
        self.done = False
        """Whether the end mark has come."""
        self.failure: EngineError | None = None
        """The error that an event reports, None if none did."""
        self.finished = 0
        """Choices that have ended."""
        self.handle: bytes | None = None
        """The KV handle that the engine has put into its answer, None if it has put none. No client
        gets it.
        """
        self.last_events: list[bytes] = []
        """Last events of all choices, which are held back until the next event. That should be the
        usage.
        """

    def __repr__(self) -> str:
        return (
            f"<EventFilter {'done' if self.done else self.failure or 'open'}, "
            f"{len(self.last_events)} events held>"
        )

    def has_real_data(self, batch: bytes) -> bool:
        """Return whether one of these events is real data. Raises as `proof.has_real_data`."""
        return has_real_data(batch)

    def whole(self, body: bytes) -> bytes:
        """Return a whole answer with the usage that its client gets, and without what no client may
        see.
        """
        body, self.handle = inside.without_inside(body)
        body = self.counted(body)
        self.usage = usage_of(body)
        return body

    def counted(self, answer: bytes) -> bytes:
        """Return what has the usage with the counts of the prefill engine's cache."""
        return with_cache(answer, cached=self.cached_tokens, created=self.created_cache_tokens)

    def filtered(self, batch: bytes) -> bytes:
        """Return the part of a batch of whole events that goes to the client: nothing after the end
        mark or a failure.
        """
        if sse.has_tiny_lines(batch):
            self.failure = tiny_lines()
            return b""
        hides = inside.may_hide(batch)
        passed: list[bytes] = []
        for bare in batch.split(sse.END):
            if not bare:
                continue
            event = bare.lstrip(b"\n") + sse.END
            if self._index is None and not hides and not sse.may_be_special(event):
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
            if not sse.is_done(lines[0]) and (hides or not inside.is_plain(event)):
                event = self.shown(event)
            if sse.is_usage_only(event):
                if self._ends_early():
                    break
                event = self.counted(event)
                self.usage = usage_of(sse.payload(event))
                self.usage_event = event
                if not self.wants_usage:
                    passed += [
                        sse.with_fingerprint(last, event) for last in self._take_last_events()
                    ]
                    continue
            passed += self._take_last_events()
            if sse.is_done(lines[0]):
                if self._ends_early():
                    break
                self.done = True
                if self.wants_done:
                    passed.append(event)
                break
            if self._index is not None:
                event = self._with_index(event, self._index)
            if sse.is_last_of_choice(event):
                self.finished += 1
                if not self.keeps_usage:
                    if not sse.has_usage(event):
                        # its fingerprint is in the usage event, behind all choices
                        passed += self._hold(event)
                        continue
                    self.keeps_usage = True
                    self.wants_usage = self._index is None
            passed.append(event)
        if self.failure is not None and self._ended:
            passed += self.take_ended()
        return b"".join(passed)

    def shown(self, events: bytes) -> bytes:
        """Return whole events without what no client may see. It keeps a handle that they have."""
        events, found = inside.batch_without_inside(events)
        self.handle = found or self.handle
        return events

    def _ends_early(self) -> bool:
        """Return whether the stream ends before its choices, and note that it has failed.

        A terminated vLLM sends nothing of a choice without a token, and goes on with the usage and
        the end mark.
        """
        if early := self.finished < self._choices:
            self.failure = GivenUpError("the engine ended the stream before the answer's end")
        return early

    def _with_index(self, event: bytes, index: int) -> bytes:
        """Return an event as an event of the merged stream."""
        if self._creation_time is not None:
            event = self._creation_time.put_into(event)
        return sse.with_index(event, index)

    def _hold(self, event: bytes) -> list[bytes]:
        """Hold back the last event of a choice. Return those that can't be held back any longer."""
        self._ended.append(event)
        self._size += len(event)
        if self.finished >= self._choices:
            self.last_events += self.take_ended()
        return self.take_ended() if self._size > _MAX_HELD else []

    def take_ended(self) -> list[bytes]:
        """Return the last events of choices that were held back while others go on, and hold them
        no more.
        """
        events, self._ended, self._size = self._ended, [], 0
        return events

    def _take_last_events(self) -> list[bytes]:
        events, self.last_events = self.last_events, []
        return events
