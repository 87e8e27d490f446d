"""The exchange that goes on with a stream whose engine has failed, and what both are to the client and the report: one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec
from msgspec import structs

from pdproxy.kit.errors import EngineTimeoutError, PdproxyError, UnparsedError, Wait
from pdproxy.kit.frames import drop_traceback
from pdproxy.observe.events import DeadlinePassed, LegTimes, StreamContinued
from pdproxy.serving.dispatch.continuing import Continuation, cause_of, continuation, finish, why_failed
from pdproxy.serving.dispatch.prompt_request import PromptRequest
from pdproxy.serving.dispatch.record import Record
from pdproxy.serving.dispatch.recovery import DecodeFailed
from pdproxy.serving.dispatch.resources import ExchangeResources, LegHeaders
from pdproxy.serving.dispatch.retry_budget import RetrySlot
from pdproxy.serving.stream.failures import GivenUpError
from pdproxy.serving.stream.fast_path import FastPath
from pdproxy.serving.stream.relay import Relay
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.upstream.client import Answer
from pdproxy.wire.continuable import Reason
from pdproxy.wire.engine import Usage
from pdproxy.wire.request import Parsed, Prompt


class Streams(msgspec.Struct):
    """The streams of one answer in order. `usage`: that of the last one; `done`: tokens of the answer in those before it.

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
        slot: RetrySlot,
        *,
        silent: bool,
    ) -> Follower:
        """Return an exchange that avoids the engine at `failed`, and leaves the slot.

        `silent`: whether that engine was silent, or is going down. Then it gets the prompt only if no other engine can serve the
        prompt in any way; else already if no other engine can serve the prompt in the same way.
        """


class Following:
    """What follows the failure of one stream. Run once. `headers`: of the legs; `failed`: how the stream has failed."""

    __slots__ = ("_cause", "_continuation", "_exchange", "_headers", "_pause", "_resources")

    def __init__(self, resources: ExchangeResources, headers: LegHeaders, failed: DecodeFailed) -> None:
        self._resources = resources
        self._headers = headers
        self._cause = cause_of(failed.error)
        self._pause: float | None = None
        """Seconds without data, None before the data goes on."""
        self._continuation: Continuation | None = None
        self._exchange: Follower | None = None

    def __repr__(self) -> str:
        return f"<Following after {self._cause}: {self._exchange!r}>"

    async def run(self, request: PromptRequest, relay: Relay, failed: DecodeFailed, exchange_of: MakeFollower) -> None:
        """Have another engine go on with the stream of `relay` to its end, or end it if only its end is missing.

        Raises:
            PdproxyError: the error of the engine that failed, if none goes on; or of the last one that did.
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
    ) -> Reason | None:
        """Have another engine go on, if one can. Return why none does, None once the stream is over."""
        resources, since = self._resources, self._resources.now()
        within = resources.clock.within(resources.deadlines.continuation)
        try:
            with within:
                silent = isinstance(failed.error, EngineTimeoutError | GivenUpError)  # or is going down
                found = await continuation(resources, request, relay, failed.url, silent=silent)
                if isinstance(found, Reason):
                    return found
                if (slot := await resources.retry_slot(self._headers)) is None:
                    return Reason.RETRY_BUDGET
                self._report(failed, will_retry=True)
                self._continuation = found
                exchange = self._exchange = exchange_of(*found.take_request(), failed.url, slot, silent=silent)

                def begin(_relay: Relay) -> ResponseWriter:
                    within.disarm()
                    self._pause = resources.now() - since
                    self._notify("continued", self._cause, self._pause)
                    return found.writer(exchange.times().decode)

                if await exchange.run(begin) is not None:
                    return Reason.REFUSED
                await found.end()
                return None
        except asyncio.CancelledError:
            writer = relay.output
            is_wanted = writer is not None and not writer.gone and writer.ended_by is None
            if self._pause is None and is_wanted:  # `deadlines.total`, or the shutdown
                if self._exchange is None:
                    self._report(failed, will_retry=False)
                self._notify("refused" if self._exchange is None else "failed", Reason.DEADLINE.value)
            raise
        except TimeoutError:
            resources.observers.notify(DeadlinePassed(Wait.CONTINUATION.value))
            return Reason.DEADLINE
        except PdproxyError as error:
            if self._pause is not None:  # the stream went on, and has failed again
                if isinstance(error, UnparsedError) and self._continuation is not None and self._continuation.parsed:
                    self._notify("failed", Reason.DERENDER.value)
                raise
            drop_traceback(error)
            return why_failed(error)
        finally:
            if self._continuation is not None:
                self._continuation.close()

    def _report(self, failed: DecodeFailed, *, will_retry: bool) -> None:
        self._resources.report_failure(self._headers, failed.url, "decode", failed.error, will_retry=will_retry)

    def _notify(self, result: str, reason: str, seconds: float | None = None) -> None:
        self._resources.observers.notify(StreamContinued(result, reason, seconds, self._headers.request_id))

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
        return Streams(own.paths + found.paths, found.usage, self._continuation.done + found.done, keeps_usage)

    def usage_event(self, own: bytes | None) -> bytes | None:
        """Return the usage event of the answer, None if none has come."""
        if self._pause is None or self._exchange is None or self._continuation is None:
            return own
        event = self._exchange.usage_event
        return None if event is None else self._continuation.rewritten(event)
