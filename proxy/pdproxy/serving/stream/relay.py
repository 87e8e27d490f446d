"""The relay: a decode engine's answer to the client, byte for byte, read by read.

Owns one answer from its first byte to its last. It holds everything back until the answer is proven good by real data
(an engine may say 200 and then fail: status first would be a lie), then passes reads on with as little work as possible:
whole events that hold nothing special are forwarded as they are, and only errors, the usage and the end mark are looked at.
A stream that ends without its end mark has failed, whatever the connection says.

    HOLDING --real data--> PROVEN --flow()--> FLOWING --[DONE]--> ENDED
       |  whole answer: `first` gets it           |
       +--error, EOF-----> `first` fails          +--error event, EOF, deadline--> `done` fails
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import Enum

from pdproxy.kit.clock import Clock, Timer
from pdproxy.kit.errors import EngineError, EngineTimeoutError, PdproxyError, Wait
from pdproxy.kit.one_shot_event import OneShotEvent
from pdproxy.serving.stream.failures import failure_in
from pdproxy.serving.stream.fast_path import FastPath
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.serving.stream.whole_events import Parts, crumbs, for_events, whole_events
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.upstream.client import Answer
from pdproxy.upstream.connection import Headers, Leg
from pdproxy.wire import sse, tokens
from pdproxy.wire.engine import Usage, usage_of
from pdproxy.wire.usage import with_cache


class _Phase(Enum):
    HOLDING = "holding"
    PROVEN = "proven"
    FLOWING = "flowing"
    ENDED = "ended"


class StreamStarted:
    """The answer is a stream, and its first real data has come."""


STREAM_STARTED = StreamStarted()


class Relay:
    """One answer of an engine: the sink of its connection, the source of the client's bytes.

    `first` resolves once the answer is known to be good or bad, `done` once it is over; both before and after that the
    caller closes the connection. `wants_usage`: whether the client asked for the usage event that we always ask for.
    `keeps_usage`: whether the client will see it at the end of several streams, after all (default: as `wants_usage`).
    `wants_done`: whether the end mark goes to the client (False for one stream of several).
    `takes_ids`: whether the engine was asked for token ids that the client did not ask for. They are kept in `lane.ids`.
    `room`: where all that is held back counts; one of its own where none is given.
    """

    __slots__ = (
        "_ending",
        "_finished",
        "_headers",
        "_held",
        "_index",
        "_is_stream",
        "_keeps_usage",
        "_leg",
        "_output",
        "_parts",
        "_paused",
        "_phase",
        "_saw_done",
        "_share",
        "_status",
        "_takes_ids",
        "_time",
        "_wants_done",
        "_wants_usage",
        "accepted",
        "cached_tokens",
        "created_cache_tokens",
        "done",
        "first",
        "lane",
        "room",
        "usage",
        "usage_event",
    )

    def __init__(
        self,
        *,
        wants_usage: bool,
        wants_done: bool = True,
        index: int | None = None,
        keeps_usage: bool | None = None,
        parts: Parts | None = None,
        takes_ids: bool = False,
        room: AnswerBudget | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[Answer | StreamStarted] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()
        self.accepted = OneShotEvent()
        self.usage: Usage | None = None
        self.usage_event: bytes | None = None
        self.cached_tokens: int | None = None
        self.created_cache_tokens: int | None = None
        """What the usage must say of the prefill engine's cache; None: what the engine says."""
        self._time = now
        self.lane = FastPath(now, takes_ids=takes_ids)
        self._wants_usage = wants_usage
        self._keeps_usage = wants_usage if keeps_usage is None else keeps_usage
        self._wants_done = wants_done
        self._takes_ids = takes_ids
        self._index = index
        self._parts = parts
        self._phase = _Phase.HOLDING
        self._status = 0
        self._headers: Headers = []
        self._is_stream = False
        self._held: list[bytes] = []  # of a stream, until it flows
        self.room = AnswerBudget() if room is None else room
        self._share = self.room.share()  # all that is held; it keeps a whole answer, or the beginning of an event
        self._saw_done = False
        self._finished: list[bytes] = []
        self._output: ResponseWriter | None = None
        self._leg: Leg | None = None
        self._paused = False
        self._ending: EngineError | None = None

    def __repr__(self) -> str:
        return f"<Relay {self._phase.value}, {self.lane.events} events, status {self._status}>"

    @property
    def status(self) -> int:
        """The engine's status, 0 before it came."""
        return self._status

    @property
    def headers(self) -> Headers:
        """The engine's headers."""
        return self._headers

    # -- the caller's side

    def flow(self, output: ResponseWriter, leg: Leg | None, *, direct: bool = True) -> None:
        """Pass on what was held, and from now on everything as it comes; `direct`: as it was on the wire, unless somebody looks.

        Without a leg, all has come.
        """
        self._output, self._leg, self._headers = output, leg, []
        self._phase = _Phase.FLOWING if self._phase is _Phase.PROVEN else self._phase
        self.lane.last = self._time()
        output.on_pressure(self._pause, self._resume)
        held, self._held = self._held, []
        if held:
            batch = b"".join(held)
            self._share.shrink(len(batch))
            self._forward(tokens.without_prompt(batch) if self._takes_ids else batch)
        if self._ending is not None:
            self._over(self._ending)
        elif output.paused:
            self._pause()
        self._look_ahead()
        if leg is not None and direct and self._index is None and (write := output.chunk_writer()) is not None:
            self.lane.open(write)
            leg.take_reads(self.lane.take)

    async def watch(self, clock: Clock, between_tokens: float, passed: Callable[[Wait], None]) -> None:
        """Wait until the stream is over. How slowly its client may read is its connection's to judge.

        Raises:
            EngineError: the stream failed after data had been sent; EngineTimeoutError: no event for `between_tokens` s.
        """
        timer: Timer
        suspected = -1.0

        def look() -> None:
            nonlocal timer, suspected
            now, last = clock.now(), self.lane.last
            if self._paused:
                wait = between_tokens
            elif now < last + between_tokens:
                wait = last + between_tokens - now
            elif suspected != last:
                # A loop that was held up may not have read what is here: it is judged in the tick after a read.
                suspected, wait = last, 0.0
            else:
                passed(Wait.BETWEEN_TOKENS)
                message = f"the engine sent nothing for {between_tokens:g} s"
                self._fail(EngineTimeoutError(message, wait=Wait.BETWEEN_TOKENS))
                return
            timer = clock.after(wait, look)  # noqa: F821

        timer = clock.after(between_tokens, look)
        try:
            await self.done
        finally:
            timer.cancel()
            del look  # which refers to itself

    # -- the connection's side

    def head(self, status: int, headers: Headers) -> None:
        self._status, self._headers = status, headers
        content_type = next((value for name, value in headers if name == b"content-type"), b"")
        self._is_stream = status == 200 and content_type.startswith(b"text/event-stream")
        self.accepted.set()
        if self._is_stream:
            for_events(self._share)
        else:
            self._share.expect(headers)

    def data(self, chunk: bytes) -> None:
        if not self._is_stream:
            self._share.add(chunk)
            return
        self.lane.plain = False
        if (self._share.kept or not chunk.endswith(sse.END)) and not (chunk := whole_events(self._share, chunk)):
            return
        if self._phase is _Phase.FLOWING:
            self._forward(chunk)
            self._look_ahead()
        elif self._phase is not _Phase.ENDED:
            self._hold(chunk)

    def end(self) -> None:
        if not self._is_stream:
            body = self._share.whole()
            if self._status == 200:
                body = with_cache(body, cached=self.cached_tokens, created=self.created_cache_tokens)
                self.usage = usage_of(body)
                self.lane.events = 1
            self._phase = _Phase.ENDED
            if not self.first.done():
                self.first.set_result(Answer(self._status, self._headers, body))
            return
        self._over(EngineError("the engine ended the stream without its end mark"))

    def failed(self, error: EngineError) -> None:
        self.accepted.set()
        if self._is_stream:
            self._over(error)
        else:
            self._fail(error)

    # -- inside

    def _look_ahead(self) -> None:
        self.lane.plain = self._phase is _Phase.FLOWING and not self._share.kept and not self._finished

    def _hold(self, batch: bytes) -> None:
        """Keep events until one of them is real data: not the opening of a chat, a comment, an error or the end mark."""
        self._share.grow(len(batch), "the engine sent a stream without data")
        self._held.append(batch)
        if self._phase is _Phase.PROVEN:
            return
        if sse.is_crumbs(batch):
            self._fail(crumbs())
            return
        real = False
        spaced = sse.is_spaced(batch)
        for bare in batch.split(sse.END):
            if not bare:
                continue
            event = sse.compact(bare) if spaced else bare
            lines = sse.data_lines(event)
            if not lines or sse.is_role_only(event):  # nothing, a keep-alive comment, the opening of a chat
                continue
            if (error := failure_in(event, lines)) is not None:
                self._fail(error)
                return
            if sse.is_done(lines[0]):
                if not real:
                    self._fail(EngineError("the engine ended the stream without any data"))
                    return
                break
            plain = not real and not sse.may_need_care(batch)
            real = True
            if plain:
                break  # so are all others
        if real:
            self._phase = _Phase.PROVEN
            if not self.first.done():
                self.first.set_result(STREAM_STARTED)

    def _forward(self, batch: bytes) -> None:
        now = self._time()
        if self._takes_ids:
            if tokens.are_too_many(batch):
                self._fail(EngineError("the engine sent an event with many lists of token ids"))
                return
            batch, listed = tokens.taken(batch)
            if listed:
                self.lane.keep(listed)
            if tokens.WITHHELD in batch:
                batch = b"".join(
                    [event + sse.END for event in batch.split(sse.END) if event and tokens.WITHHELD not in event]
                )
        if self._finished or self._index is not None or sse.may_need_care(batch):
            batch = self._care(batch)
        count = batch.count(sse.END) - (self._saw_done and self._wants_done)
        self.lane.count(count, now)
        self.lane.last = now
        if batch and self._output is not None:
            self._output.write(batch)
        if self._saw_done:
            self._over(None)

    def _care(self, batch: bytes) -> bytes:
        """Look at each event of a batch: take out what is ours, mark what ends the stream, return what goes on."""
        passed: list[bytes] = []
        if sse.is_crumbs(batch):
            self._fail(crumbs())
            return b""
        for bare in batch.split(sse.END):
            if not bare:
                continue
            event = bare.lstrip(b"\n") + sse.END
            if self._index is None and not sse.may_need_care(event):
                passed += [*self._take_finished(), event]
                continue
            if sse.is_spaced(event):
                event = sse.compact(event)
            lines = sse.data_lines(event)
            if (error := failure_in(event, lines)) is not None:
                self._fail(error)
                break
            if not lines:
                passed.append(event)  # a keep-alive comment
                continue
            if sse.is_usage_only(event):
                event = with_cache(event, cached=self.cached_tokens, created=self.created_cache_tokens)
                self.usage = usage_of(sse.payload(event))
                self.usage_event = event
                if not self._wants_usage:
                    passed += [sse.with_fingerprint(last, event) for last in self._take_finished()]
                    continue
            passed += self._take_finished()
            if sse.is_done(lines[0]):
                self._saw_done = True
                if self._wants_done:
                    passed.append(event)
                break
            if self._index is not None:
                event = self._as_part(event)
            if not self._keeps_usage and sse.is_last_of_choice(event):
                self._finished.append(event)  # our usage event, which comes next, has taken its fingerprint
                continue
            passed.append(event)
        return b"".join(passed)

    def _as_part(self, event: bytes) -> bytes:
        """Return an event as one of a stream that several make up."""
        if self._parts is not None:
            event = self._parts.joined(event)
        return sse.with_index(event, self._index or 0)

    def _take_finished(self) -> list[bytes]:
        finished, self._finished = self._finished, []
        return finished

    def _over(self, error: EngineError | None) -> None:
        if self._phase is _Phase.PROVEN:
            self._ending = error  # what was held may hold the end mark: `flow` will see
            return
        if error is not None and not self._saw_done:
            self._fail(error)
            return
        self._phase = _Phase.ENDED
        self.lane.plain = False
        if not self.done.done():
            self.done.set_result(None)

    def _fail(self, error: PdproxyError) -> None:
        """Fail where the caller is waiting: at the first data, or in the stream."""
        before, self._phase = self._phase, _Phase.ENDED
        self.lane.plain = False
        self._held = []
        self._share.drop()
        if before is _Phase.HOLDING and not self.first.done():
            self.first.set_exception(error)
            self.first.exception()  # read: a caller that has left must not be reported as careless
        elif before is not _Phase.ENDED and not self.done.done():
            self.done.set_exception(error)
            self.done.exception()

    def _pause(self) -> None:
        if not self._paused and self._leg is not None:
            self._paused = True
            self._leg.pause()

    def _resume(self) -> None:
        if self._paused and self._leg is not None:
            self._paused = False
            self.lane.last = self._time()
            self._leg.resume()
