"""The exchange that goes on with a stream whose engine has failed, and what both are to the client
and the report: one answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec
from msgspec import structs

from pdproxy.kit.errors import EngineTimeoutError, PdproxyError, UnparsedError, Wait
from pdproxy.kit.frames import drop_traceback
from pdproxy.observe.description import Label, counter, histogram
from pdproxy.observe.events import DeadlinePassed, LegTimes, StreamContinued
from pdproxy.scheduling.losses import Slot
from pdproxy.serving.dispatch.continuing import (
    Continuation,
    cause_of,
    continuation,
    finish,
    why_failed,
)
from pdproxy.serving.dispatch.prompt_request import PromptRequest
from pdproxy.serving.dispatch.record import Record
from pdproxy.serving.dispatch.recovery import DecodeFailed
from pdproxy.serving.dispatch.resources import ExchangeResources, LegHeaders
from pdproxy.serving.stream.failures import GivenUpError
from pdproxy.serving.stream.fast_path import FastPath
from pdproxy.serving.stream.relay import Relay
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.upstream.client import Answer
from pdproxy.wire.continuable import NotContinued
from pdproxy.wire.engine import Usage
from pdproxy.wire.request import Parsed
from pdproxy.wire.route_form import Prompt

RESULTS = (
    ("continued", "another engine goes on; counted at its first data"),
    ("finished", "only the end of the stream was missing: the client got it from pdproxy"),
    ("refused", "nobody may go on with this stream, or can: it ended with an error"),
    (
        "failed",
        "another engine was asked to go on, and sent no data: the stream ended with an error",
    ),
)
CAUSES = (
    ("eof", "the connection closed, or the stream ended without its end mark"),
    ("unreachable", "the engine could not be reached"),
    ("deadline", "the engine sent nothing in time"),
    ("stalled", "the engine stands still"),
    ("aborted", "the engine gave the answer up"),
    ("error_event", "the engine sent an error"),
)
REASONS = (
    ("n", "several choices"),
    ("beam", "beam search"),
    ("echo", "the client wants its prompt back"),
    ("prompt_logprobs", "the client wants log probabilities of its prompt"),
    ("logprobs", "the client wants log probabilities"),
    ("media", "the prompt is not only text"),
    ("grammar", "a grammar binds the answer: it would begin anew"),
    ("penalty", "penalties depend on the answer so far"),
    ("bad_words", "bad_words depend on the answer so far"),
    ("thinking_budget", "thinking_token_budget depends on the answer so far"),
    ("repetition_detection", "repetition_detection depends on the answer so far"),
    ("seed", "drawn by chance with a seed: another engine would draw otherwise"),
    ("sampled", "drawn by chance, and continuations.sampled is off"),
    (
        "hidden_reasoning",
        "the client does not want the reasoning, so that its tokens are not known",
    ),
    (
        "reasoning_seen",
        "a parser of the engine makes the events, and the answer is not known to be at its content",
    ),
    (
        "tools",
        (
            "the request has tools, whose parser would begin anew: not all engines derender, or a "
            "tool is forced"
        ),
    ),
    ("stop_pending", "the text ends with the beginning of a stop string"),
    ("half_letter", "it is not known where the text that was sent ends in the tokens"),
    ("no_ids", "the token ids of the prompt or of the answer are not known"),
    ("derender", "no engine has rendered the request, or parsed what came of it"),
    ("too_long", "the answer fills the context, or is too long to be given to another engine"),
    ("memory", "continuations.max_bytes"),
    ("unknown_field", "the request has a field that may depend on the answer so far"),
    ("no_limit", "it is not known how many tokens the answer may still have"),
    ("none_left", "limits.continuations"),
    ("route", "answers of this route have no token ids"),
    ("retry_budget", "no place of the retry budget came free in deadlines.retry"),
    ("engines_lost", "engines disappeared under the request, and it may be the cause"),
    ("deadline", "no data in deadlines.continuation, or in another deadline before"),
    ("no_engine", "no engine could be leased for it"),
    ("refused", "the engine that was to go on failed, or refused it"),
)
CONTINUATIONS = counter(
    "pdproxy_continuations_total",
    "streams",
    "Streams whose engine failed after their first data, by what became of them",
    Label("result", RESULTS),
    Label("reason", (*CAUSES, *(one for one in REASONS if one[0] != "deadline"))),
    together=(
        *((result, cause) for result in ("continued", "finished") for cause, _ in CAUSES),
        *((result, reason) for result in ("refused", "failed") for reason, _ in REASONS),
    ),
    of=StreamContinued,
)
CONTINUATION_SECONDS = histogram(
    "pdproxy_continuation_seconds",
    "Seconds without data in a stream, from the failure of its engine to the first data of the "
    "one that went on",
    bounds=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    of=StreamContinued,
    counts=lambda event: [] if event.seconds is None else [((), event.seconds)],
)


class Streams(msgspec.Struct):
    """The streams of one answer in order. `usage`: that of the last one; `done`: tokens of the
    answer in those before it.

    `keeps_usage`: as of `EventFilter`, of any of them.
    """

    paths: list[FastPath] = msgspec.field(default_factory=list)
    usage: Usage | None = None
    done: int = 0
    keeps_usage: bool = False


class Follower(Protocol):
    """An exchange, as the one before it sees it."""

    async def run(self, stream_to: Callable[[Relay], ResponseWriter]) -> Answer | None:
        """See `Exchange.run`."""

    def times(self) -> LegTimes:
        """See `Exchange.times`."""

    @property
    def streams(self) -> Streams:
        """See `Exchange.streams`."""

    @property
    def usage_event(self) -> bytes | None:
        """See `Exchange.usage_event`."""


class MakeFollower(Protocol):
    """Makes the exchange that goes on with a stream."""

    def __call__(
        self,
        parsed: Parsed,
        prompt: Prompt,
        headers: LegHeaders,
        new_relay: Callable[[], Relay],
        failed: str,
        slot: Slot,
        *,
        silent: bool,
    ) -> Follower:
        """Return an exchange that avoids the engine at `failed`, and leaves the slot.

        `silent`: whether that engine was silent, or is going down. Then it gets the prompt only if
        no other engine can serve the prompt in any way; else already if no other engine can serve
        the prompt in the same way.
        """


class Following:
    """What follows the failure of one stream. Run once. `headers`: of the legs; `failed`: how the
    stream has failed.
    """

    __slots__ = ("_cause", "_continuation", "_exchange", "_headers", "_pause", "_resources")

    def __init__(
        self, resources: ExchangeResources, headers: LegHeaders, failed: DecodeFailed
    ) -> None:
        self._resources = resources
        self._headers = headers
        self._cause = cause_of(failed.error)
        self._pause: float | None = None
        """Seconds without data, None before the data goes on."""
        self._continuation: Continuation | None = None
        self._exchange: Follower | None = None

    def __repr__(self) -> str:
        return f"<Following after {self._cause}: {self._exchange!r}>"

    async def run(
        self, request: PromptRequest, relay: Relay, failed: DecodeFailed, exchange_of: MakeFollower
    ) -> None:
        """Have another engine go on with the stream of `relay` to its end, or end it if only its
        end is missing.

        Raises:
            PdproxyError: the error of the engine that failed, if none goes on; or of the last one
                that did.
        """
        record = request.record
        if finish(relay, record if isinstance(record, Record) else None):
            self._report(failed, will_retry=True)
            self._notify("finished", self._cause)
            return
        reason = await self._why_not(request, relay, failed, exchange_of)
        if reason is None:
            return
        if self._exchange is None:
            self._report(failed, will_retry=False)
        self._notify("refused" if self._exchange is None else "failed", reason.value)
        try:
            raise failed.error
        finally:
            del failed

    async def _why_not(
        self, request: PromptRequest, relay: Relay, failed: DecodeFailed, exchange_of: MakeFollower
    ) -> NotContinued | None:
        """Have another engine go on, if one can. Return why none does, None once the stream is
        over.
        """
        resources, since = self._resources, self._resources.now()
        within = resources.clock.within(resources.deadlines.continuation)
        try:
            with within:
                # or is going down
                silent = isinstance(failed.error, EngineTimeoutError | GivenUpError)
                found = await continuation(resources, request, relay, failed.url, silent=silent)
                if isinstance(found, NotContinued):
                    return found
                if (slot := await resources.retry_slot(self._headers)) is None:
                    return NotContinued.RETRY_BUDGET
                self._report(failed, will_retry=True)
                self._continuation = found
                exchange = self._exchange = exchange_of(
                    *found.take_request(), failed.url, slot, silent=silent
                )

                def begin(_relay: Relay) -> ResponseWriter:
                    within.disarm()
                    self._pause = resources.now() - since
                    self._notify("continued", self._cause, self._pause)
                    return found.writer(exchange.times().decode)

                if await exchange.run(begin) is not None:
                    return NotContinued.REFUSED
                await found.end()
                return None
        except asyncio.CancelledError:
            writer = relay.output
            is_wanted = writer is not None and not writer.gone and writer.ended_by is None
            if self._pause is None and is_wanted:  # `deadlines.total`, or the shutdown
                if self._exchange is None:
                    self._report(failed, will_retry=False)
                self._notify(
                    "refused" if self._exchange is None else "failed", NotContinued.DEADLINE.value
                )
            raise
        except TimeoutError:
            resources.observers.notify(DeadlinePassed(Wait.CONTINUATION.value))
            return NotContinued.DEADLINE
        except PdproxyError as error:
            if self._pause is not None:  # the stream went on, and has failed again
                if (
                    isinstance(error, UnparsedError)
                    and self._continuation is not None
                    and self._continuation.parsed
                ):
                    self._notify("failed", NotContinued.DERENDER.value)
                raise
            drop_traceback(error)
            return why_failed(error)
        finally:
            if self._continuation is not None:
                self._continuation.close()

    def _report(self, failed: DecodeFailed, *, will_retry: bool) -> None:
        self._resources.report_failure(
            self._headers, failed.url, "decode", failed.error, will_retry=will_retry
        )

    def _notify(self, result: str, reason: str, seconds: float | None = None) -> None:
        self._resources.observers.notify(
            StreamContinued(result, reason, seconds, self._headers.request_id)
        )

    # -- both streams together

    def times(self, own: LegTimes) -> LegTimes:
        """Return what happened so far. `own`: in the exchange of the stream that has failed."""
        if self._pause is None or self._exchange is None:
            return own
        times = self._exchange.times()
        return structs.replace(
            times,
            attempts=own.attempts + times.attempts,
            continued=times.continued + 1,
            continued_by=self._cause,
            pause_s=self._pause + (times.pause_s or 0.0),
        )

    def streams(self, own: Streams) -> Streams:
        """Return all streams of the answer. `own`: the one that has failed."""
        if self._pause is None or self._exchange is None or self._continuation is None:
            return own
        found = self._exchange.streams
        keeps_usage = own.keeps_usage or found.keeps_usage
        return Streams(
            own.paths + found.paths, found.usage, self._continuation.done + found.done, keeps_usage
        )

    def usage_event(self, own: bytes | None) -> bytes | None:
        """Return the usage event of the answer, None if none has come."""
        if self._pause is None or self._exchange is None or self._continuation is None:
            return own
        event = self._exchange.usage_event
        return None if event is None else self._continuation.rewritten(event)
