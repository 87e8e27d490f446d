"""The relay: a decode engine's answer to the client, byte for byte, read by read.

Owns one answer from its first byte to its last. It holds everything back until real data proves
that the answer is good (`proof`): an engine may answer 200 and then fail, and a status that was
sent can't be changed. Then it forwards whole plain events as they are, all others through its
`EventFilter`. A stream without its end mark has failed.

    HOLDING --real data--> PROVEN --flow()--> FLOWING --[DONE]--> ENDED
       |  whole answer: `first` gets it           |
       +--error, EOF-----> `first` fails          +--error event, EOF, deadline--> `done` fails
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import EngineError, EngineTimeoutError, PdproxyError, Wait
from pdproxy.kit.one_shot_event import OneShotEvent
from pdproxy.serving.stream import beginning
from pdproxy.serving.stream.event_filter import EventFilter
from pdproxy.serving.stream.fast_path import FastPath, Templates
from pdproxy.serving.stream.held_events import HeldEvents
from pdproxy.serving.stream.named_events import NamedEventFilter
from pdproxy.serving.stream.phase import STREAM_STARTED, Phase, StreamStarted
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.serving.stream.stall_timer import StallTimer
from pdproxy.serving.stream.whole_events import CreationTime, limit_to_events, whole_events
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.upstream.client import Answer
from pdproxy.upstream.connection import Headers, Reads
from pdproxy.wire import inside, sse, tokens
from pdproxy.wire.api_errors import Dialect
from pdproxy.wire.engine import Usage
from pdproxy.wire.event_template import EventTemplates

MAX_COMMENTS = 4096
"""Bytes of comments that pass before an engine's first data. More is held, and counted, like its
events.
"""


class Relay:
    """One answer of an engine: the sink of its connection, the source of the client's bytes.

    `first` resolves once the answer is known to be good or bad, `done` once it is over. A caller
    that stops waiting for one of them closes the connection. `takes_ids`: whether the engine was
    asked for token ids that the client did not ask for; they are kept in `fast_path.ids`;
    `shows_ids`: that it asked for. `budget`, `templates`: those of the process; without them, the
    relay has its own. `named`: the API of a stream whose events have names, None for the others.
    `comment` gets the engine's comments before its data: they pass at once. All
    other parameters are those of `EventFilter`; `keeps_usage` is as `wants_usage` if it is None.
    """

    __slots__ = (
        "_comment",
        "_commented",
        "_ending",
        "_held",
        "_is_stream",
        "_leg",
        "_phase",
        "_share",
        "_time",
        "accepted",
        "beginning",
        "budget",
        "done",
        "fast_path",
        "filter",
        "first",
        "headers",
        "opened",
        "output",
        "paused",
        "status",
    )

    def __init__(
        self,
        *,
        wants_usage: bool,
        wants_done: bool = True,
        choices: int = 1,
        index: int | None = None,
        keeps_usage: bool | None = None,
        creation_time: CreationTime | None = None,
        takes_ids: bool = False,
        shows_ids: bool = False,
        budget: AnswerBudget | None = None,
        templates: Templates | None = None,
        named: Dialect | None = None,
        now: Callable[[], float] = time.monotonic,
        comment: Callable[[bytes], None] | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[Answer | StreamStarted] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()
        self.accepted = OneShotEvent()
        """Set once the engine has answered with headers, or the leg has failed."""
        self.status = 0
        """The status of the answer, 0 before it has come."""
        self.headers: Headers = []
        """The headers of the answer, until they are used."""
        self.budget = AnswerBudget() if budget is None else budget
        known = EventTemplates() if templates is None else templates
        self.fast_path = FastPath(now, known, takes_ids=takes_ids, shows_ids=shows_ids)
        self.filter: EventFilter | NamedEventFilter
        if named is not None:
            self.filter = NamedEventFilter(named)
        else:
            self.filter = EventFilter(
                wants_usage=wants_usage,
                keeps_usage=wants_usage if keeps_usage is None else keeps_usage,
                wants_done=wants_done,
                choices=choices,
                index=index,
                creation_time=creation_time,
            )
        self._time = now
        self._comment = comment
        self._commented = 0
        self._phase = Phase.HOLDING
        self._is_stream = False
        # counts all that is held; keeps a whole answer, or the beginning of an event
        self._share = self.budget.share()
        self._held = HeldEvents(self._share, takes_ids)  # of a stream, until it flows
        self.output: ResponseWriter | None = None  # before the stream flows
        self.beginning = beginning.UNKNOWN
        """What a stream with ids has begun with, once it flows."""
        self._leg: Reads | None = None
        self.paused = False
        self.opened = 0
        """Events that were forwarded and not counted: those before the first one with a token."""
        self._ending: EngineError | None = None

    def __repr__(self) -> str:
        return f"<Relay {self._phase.value}, {self.fast_path.events} events, status {self.status}>"

    @property
    def usage(self) -> Usage | None:
        """The answer's token counts, None before they came."""
        return self.filter.usage

    @property
    def has_data(self) -> bool:
        """Whether the first data has come, or the whole answer."""
        first = self.first
        return first.done() and not first.cancelled() and first.exception() is None

    # -- for the caller

    def first_again(self) -> asyncio.Future[Answer | StreamStarted]:
        """Return `first`; a new one if it was cancelled, as it is with the task that waits for
        it.
        """
        if self.first.cancelled():
            self.first = asyncio.get_running_loop().create_future()
            if self._phase is Phase.PROVEN:
                self.first.set_result(STREAM_STARTED)
            elif self._phase is Phase.ENDED:
                self._refuse(EngineError("the answer has failed"))
        return self.first

    def flow(self, output: ResponseWriter, leg: Reads | None, *, direct: bool = True) -> None:
        """Forward what was held, and from now on each read as it comes. Without a leg, everything
        has already come.

        `direct`: the leg's answer is the client's, so that reads may take the fast path.
        """
        self.output, self._leg, self.headers = output, leg, []
        self._phase = Phase.FLOWING if self._phase is Phase.PROVEN else self._phase
        output.on_pressure(self._pause, self._resume)
        batch, prompt_ids = self._held.take()
        if batch:
            shown = self.filter.shown(batch) if not sse.has_tiny_lines(batch) else batch
            direct = direct and shown is batch  # other events may have the same form
            batch = shown
            if self.fast_path.keeps_ids:
                self.beginning = beginning.shown(batch, prompt_ids)
            self._forward(batch)
        if self._ending is not None:
            self._stream_over(self._ending)
        elif output.paused:
            self._pause()
        self._set_fast_path()
        direct = (
            direct
            and self.fast_path.keeps_ids == self.fast_path.takes_ids
            and not self.filter.every
        )
        if leg is not None and direct and (write := output.chunk_writer()) is not None:
            self.fast_path.write_to(write)
            leg.offer_reads(self.fast_path.forward)

    async def watch(
        self,
        clock: Clock,
        between_tokens: float,
        passed: Callable[[Wait], None],
        works: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """Wait until the stream is over. The client's connection checks how slowly its client may
        read.

        `works` returns whether the engine is seen to work although it sends nothing: then the wait
        goes on.

        Raises:
            EngineError: the stream failed after data had been sent; EngineTimeoutError: no event
                for `between_tokens` s.
        """

        def last() -> float | None:
            return None if self.paused else self.fast_path.last

        def late() -> None:
            passed(Wait.BETWEEN_TOKENS)
            self._fail(
                EngineTimeoutError(
                    f"the engine sent nothing for {between_tokens:g} s", wait=Wait.BETWEEN_TOKENS
                )
            )

        timer = StallTimer(clock, between_tokens, last, late, works)
        try:
            await self.done
        finally:
            timer.cancel()

    # -- for the connection

    def head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        content_type = dict(reversed(headers)).get(b"content-type", b"")
        self._is_stream = status == 200 and content_type.startswith(b"text/event-stream")
        self.accepted.set()
        if self._is_stream:
            limit_to_events(self._share)
        else:
            self._share.check_length(headers)

    def data(self, chunk: bytes) -> None:
        if not self._is_stream:
            self._share.add(chunk)
            return
        self.fast_path.enabled = False
        if (self._share.kept or not chunk.endswith(sse.END)) and not (
            chunk := whole_events(self._share, chunk)
        ):
            return
        if self._phase is Phase.FLOWING:
            self._forward(chunk)
            self._set_fast_path()
        elif self._phase is not Phase.ENDED:
            self._hold(chunk)

    def end(self) -> None:
        if self._is_stream:
            self._stream_over(EngineError("the engine ended the stream without its end mark"))
            return
        body = self._share.take_counted()
        if self.status == 200:
            body = self.filter.whole(body)
            self.fast_path.events = 1
        self._phase = Phase.ENDED
        if not self.first.done():
            self.first.set_result(Answer(self.status, self.headers, body))

    def failed(self, error: EngineError) -> None:
        self.accepted.set()
        if self._is_stream:
            self._stream_over(error)
        else:
            self._fail(error)

    # -- inside

    def _set_fast_path(self) -> None:
        held = self._share.kept or self.filter.last_events
        self.fast_path.enabled = self._phase is Phase.FLOWING and not held

    def _hold(self, batch: bytes) -> None:
        """Keep events until one of them is real data. Comments are not kept: whoever sends them
        wants to be heard now.
        """
        if self._comment is not None and sse.is_comment(batch) and self._commented < MAX_COMMENTS:
            self._commented += len(batch)
            self._comment(batch)
            return
        batch = self._held.add(batch)
        if self._phase is Phase.PROVEN:
            return
        try:
            real = self.filter.has_real_data(batch)
        except EngineError as error:
            self._fail(error.with_traceback(None))  # a traceback would refer to this relay
            return
        if real:
            self._phase = Phase.PROVEN
            if not self.first.done():
                self.first.set_result(STREAM_STARTED)

    def _forward(self, batch: bytes) -> None:
        now = self._time()
        fast_path, events = self.fast_path, self.filter
        if fast_path.keeps_ids and tokens.are_too_many(batch):
            self._fail(EngineError("the engine sent an event with many lists of token ids"))
            return
        plain = 0
        if not (events.every or events.last_events or inside.may_hide(batch)):
            plain = sse.plain_size(batch)
        if plain < len(batch):
            rest = events.filtered(batch[plain:])
            batch = batch[:plain] + rest if plain else rest
            if events.failure is not None:
                self._fail(events.failure)
        if fast_path.keeps_ids and batch:
            # not before: the client has no ids of events that are held
            batch = fast_path.written(batch)
        count = batch.count(sse.END) - (events.done and events.wants_done)
        if events.opening:
            skipped = min(events.opening, count)
            events.opening -= skipped
            count -= skipped
            self.opened += skipped
        fast_path.count(count, now)
        fast_path.last = now
        if batch and self.output is not None:
            self.output.write(batch)
        if events.done:
            self._stream_over(None)

    def _stream_over(self, error: EngineError | None) -> None:
        if self._phase is Phase.PROVEN:
            self._ending = error  # the end mark may be in what is held: `flow` finds it
            return
        if error is not None and not self.filter.done:
            self._fail(error)
            return
        self._phase = Phase.ENDED
        self.fast_path.enabled = False
        if not self.done.done():
            self.done.set_result(None)

    def _fail(self, error: PdproxyError) -> None:
        """Fail where the caller is waiting: at the first data, or in the stream."""
        before, self._phase = self._phase, Phase.ENDED
        self.fast_path.enabled = False
        self._held.drop()
        self._share.drop()
        if before is Phase.HOLDING and not self.first.done():
            self._refuse(error)
        elif before is not Phase.ENDED and not self.done.done():
            if self.output is not None and (ended := self.filter.take_ended()):
                self.output.write(b"".join(ended))
            self.done.set_exception(error)
            self.done.exception()

    def _refuse(self, error: PdproxyError) -> None:
        self.first.set_exception(error)
        # asyncio would log the error if the caller has left and never reads it
        self.first.exception()

    def _pause(self) -> None:
        if not self.paused and self._leg is not None:
            self.paused = True
            self._leg.pause()

    def _resume(self) -> None:
        if self.paused and self._leg is not None:
            self.paused = False
            self.fast_path.last = self._time()
            self._leg.resume()
