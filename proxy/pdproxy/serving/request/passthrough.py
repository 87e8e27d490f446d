"""A request that one engine serves whole, from its first byte to its last: read, admitted, passed on, reported.

Owns the answer to the client and the one report that each request leaves. Nothing reaches the client before the engine has shown
data, so that until then another engine can be asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from pdproxy.kit.errors import (
    ClientLeftError,
    EngineError,
    EngineTimeoutError,
    Fault,
    NoAnswerRoomError,
    OverloadedError,
    PdproxyError,
    UnauthorizedError,
    Wait,
)
from pdproxy.kit.frames import drop_traceback, frames
from pdproxy.kit.ids import mint, usable
from pdproxy.observe.events import DeadlinePassed, Gaps, LegTimes, RequestEnded
from pdproxy.scheduling.ledger import Lease, Verdict
from pdproxy.serving.access.clients import Client
from pdproxy.serving.access.keys import CHALLENGE, Keys
from pdproxy.serving.access.routes import Entry
from pdproxy.serving.dispatch.failure_class import is_clients_fault, refused, verdict_of
from pdproxy.serving.dispatch.resources import ExchangeResources, LegHeaders
from pdproxy.serving.request.admission import Admission
from pdproxy.serving.request.body_reader import BodyReader
from pdproxy.serving.request.service import JSON_TYPE
from pdproxy.upstream.client import Answer
from pdproxy.upstream.connection import Headers
from pdproxy.upstream.passthrough import Leg, PassthroughLegs
from pdproxy.wire.api_errors import WholeEvents, failure_body, failure_event
from pdproxy.wire.body_bounds import Body
from pdproxy.wire.lenient_json import check_content_type
from pdproxy.wire.passthrough_body import PassedBody

logger = logging.getLogger("pdproxy")

_PASSED_HEADERS = (b"content-type", b"retry-after", b"metadata")
"""`metadata` is where vLLM says what an answer of `encoding_format: "bytes"` consists of."""


@dataclass(frozen=True, slots=True)
class PassedRequest:
    """A request as it came: `forward` holds the header lines that go on, without the credentials."""

    entry: Entry
    request_id: str | None
    authorization: bytes | None
    content_type: str
    forward: tuple[tuple[bytes, bytes], ...]
    body: Body


class Sink(Protocol):
    """The client's end. An answer is either `whole`, or `begin`, `write`..., `finish`.

    Each waits until the client has room for more, and raises ClientLeftError where it takes too long.
    """

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a complete answer."""

    async def begin(self, headers: Headers) -> None:
        """Send the status 200 and the headers of a stream."""

    async def write(self, data: bytes) -> None:
        """Send stream bytes."""

    async def finish(self) -> None:
        """End the stream."""

    @property
    def client(self) -> Client:
        """Whose request it is."""

    @property
    def begun(self) -> bool:
        """Whether anything was sent."""

    @property
    def gone(self) -> bool:
        """Whether the client has left."""


@dataclass(slots=True)
class _Report:
    """What becomes known of a request as it goes. Owned by one call of `Passthrough.serve`."""

    request_id: str
    received: float
    admitted: float | None = None
    model: str | None = None
    node: str | None = None
    attempts: int = 0
    first: float | None = None
    status: int = 0
    stream: WholeEvents | None = None


class Passthrough:
    """Serves the routes of the kind `PASSED`."""

    def __init__(
        self, engines: ExchangeResources, admission: Admission, keys: Keys, legs: PassthroughLegs, bodies: BodyReader
    ) -> None:
        self._engines = engines
        self._admission = admission
        self._keys = keys
        self._legs = legs
        self._bodies = bodies

    async def serve(self, request: PassedRequest, sink: Sink) -> None:
        """Answer a request through `sink`. Raises nothing but CancelledError: a shutdown, or the client has left."""
        report = _Report(usable(request.request_id) or mint(), self._engines.now())
        error: PdproxyError | None = None
        try:
            await self._admitted(request, sink, report)
        except asyncio.CancelledError:
            error = ClientLeftError("the client closed the connection")
            if not sink.gone:
                error = OverloadedError("pdproxy is shutting down")
            raise
        except TimeoutError:
            self._engines.observers.notify(DeadlinePassed(Wait.TOTAL.value))
            total = self._engines.deadlines.total
            error = EngineTimeoutError(f"the request took longer than {total:g} s", wait=Wait.TOTAL)
        except PdproxyError as failed:
            error = failed
        except Exception as failed:
            logger.error("request %s failed in pdproxy itself: %s", report.request_id, frames(failed))  # noqa: TRY400
            error = PdproxyError(type(failed).__name__)
        finally:
            try:
                if error is not None and not isinstance(error, ClientLeftError):
                    await self._answer_error(error, request, sink, report)
            finally:
                self._tell(request, report, error)
                if error is not None:
                    drop_traceback(error)

    async def _admitted(self, request: PassedRequest, sink: Sink, report: _Report) -> None:
        self._keys.check(request.authorization)
        check_content_type(request.content_type, request.body)
        body = await self._bodies.passed(request.entry.dialect, request.body, sink.client)
        report.model = body.model
        async with self._engines.clock.within(self._engines.deadlines.total):
            await self._admission.enter(sink.client)
            report.admitted = self._engines.now()
            try:
                await self._tries(request, body, sink, report)
            finally:
                self._admission.leave(sink.client)

    # -- the engine's side

    async def _tries(self, request: PassedRequest, body: PassedBody, sink: Sink, report: _Report) -> None:
        """Ask engines one after the other, until one has shown data."""
        engines, size = self._engines, len(body.data)
        authorization = self._keys.to_engine(request.authorization)
        headers = (JSON_TYPE, (b"x-request-id", report.request_id.encode()), *authorization, *request.forward)
        heading = LegHeaders(report.request_id, request.entry.path, headers, authorization)
        without: set[str] = set()
        while True:
            lease = engines.ledger.alone(body.model, size, engines.now(), without=without)
            lease = lease or engines.ledger.alone(body.model, size, engines.now())
            if lease is None:
                raise OverloadedError("no engine can serve this request: see /ready")
            url = report.node = lease.node.url
            report.attempts += 1
            verdict = Verdict.NEUTRAL
            try:
                verdict = await self._try(lease, heading, request.entry, body, sink, report)
                return
            except EngineError as error:
                verdict = verdict_of(error)
                again = (
                    not sink.begun and report.attempts < engines.attempts and not isinstance(error, NoAnswerRoomError)
                )
                wait = getattr(error, "wait", None)
                if wait is not None:
                    engines.observers.notify(DeadlinePassed(wait.value, url))
                engines.tell(heading, url, "alone", error, will_retry=again)
                if not again:
                    raise
                without.add(url)
            finally:
                engines.close(lease, verdict)

    async def _try(
        self, lease: Lease, heading: LegHeaders, entry: Entry, body: PassedBody, sink: Sink, report: _Report
    ) -> Verdict:
        url, deadlines = lease.node.url, self._engines.deadlines
        seconds = deadlines.total if entry.slow and not body.stream else deadlines.first_token
        leg: Leg | None = None
        answer: Answer | None = None
        try:
            async with self._patience(lease, seconds):
                leg = await self._legs.post(url, heading.path, heading.headers, body.data)
                if not (leg.streamed and leg.status == 200):
                    answer = Answer(leg.status, leg.headers, await leg.read())
            if answer is None:
                await self._relay(leg, lease, entry, sink, report)
                return Verdict.GOOD
        finally:
            if leg is not None:
                leg.close()
        # 501 is vLLM's way to say that its model can't do this: true, and no sign of ill health.
        if answer.status not in (200, 501) and not is_clients_fault(answer):
            raise refused(url, answer)
        report.status = answer.status
        await sink.whole(answer.status, self._headers(answer.headers, report), answer.body)
        return Verdict.GOOD if answer.status == 200 else Verdict.NEUTRAL

    async def _relay(self, leg: Leg, lease: Lease, entry: Entry, sink: Sink, report: _Report) -> None:
        """Hand a stream on in whole events; the first ones only once the model has shown life."""
        url, deadlines, now = lease.node.url, self._engines.deadlines, self._engines.now
        stream = report.stream = WholeEvents(entry.dialect)
        first_by = now() + deadlines.first_token
        held = b""
        while True:
            if sink.begun:
                wait, seconds = Wait.BETWEEN_TOKENS, deadlines.between_tokens
            else:
                wait, seconds = Wait.FIRST_TOKEN, max(first_by - now(), 0)
            try:
                async with self._engines.clock.within(seconds):
                    data = await leg.chunk()
            except TimeoutError:
                raise EngineTimeoutError(f"{url} sent no data in time", wait=wait) from None
            if not data:
                break
            held += stream.feed(data)
            leg.share.hold(len(held) + stream.waiting)
            if held and (stream.generating or stream.ended):
                if not sink.begun:
                    report.first, report.status = now(), 200
                    await sink.begin(self._headers(leg.headers, report))
                await sink.write(held)
                held = b""
        if not stream.ended or stream.rest or not sink.begun:
            raise EngineError(f"{url} ended its stream before it was over")
        await sink.finish()

    @asynccontextmanager
    async def _patience(self, lease: Lease, seconds: float) -> AsyncIterator[None]:
        """Give an engine so long, and less if probes find it down: a dead machine closes no connection."""
        engines, node, clock = self._engines, lease.node, self._engines.clock
        gone = engines.deadlines.between_tokens
        try:
            async with clock.within(seconds), asyncio.timeout(None) as limit:

                def look() -> None:
                    if node.down_for(engines.now()) >= gone:
                        limit.reschedule(0.0)  # at once
                    else:
                        timers.append(clock.after(gone / 4, look))  # noqa: F821

                timers = deque([clock.after(gone / 4, look)], maxlen=1)
                try:
                    yield
                finally:
                    timers[0].cancel()
                    del look  # which refers to itself
        except TimeoutError:
            raise EngineTimeoutError(f"{node.url} did not answer in {seconds:g} s", wait=Wait.FIRST_TOKEN) from None

    # -- the client's side

    def _headers(self, headers: Headers, report: _Report) -> Headers:
        passed = [(name, value) for name, value in headers if name in _PASSED_HEADERS]
        return [*passed, (b"x-request-id", report.request_id.encode())]

    async def _answer_error(self, error: PdproxyError, request: PassedRequest, sink: Sink, report: _Report) -> None:
        dialect = request.entry.dialect
        try:
            if sink.begun:
                sequence = report.stream.sequence if report.stream is not None else 0
                await sink.write(failure_event(dialect, error, sequence))
                await sink.finish()
                return
            report.status = error.status
            headers = [JSON_TYPE, (b"x-request-id", report.request_id.encode())]
            if error.fault is Fault.CAPACITY:
                headers.append((b"retry-after", b"1"))
            if isinstance(error, UnauthorizedError):
                headers.append(CHALLENGE)
            await sink.whole(error.status, headers, failure_body(dialect, error))
        except ClientLeftError:
            return  # nobody is left to be told

    def _tell(self, request: PassedRequest, report: _Report, error: PdproxyError | None) -> None:
        now = self._engines.now()
        outcome = "ok" if error is None else error.fault.value
        if error is None and report.status >= 400:
            outcome = Fault.CLIENT.value
        self._engines.observers.notify(
            RequestEnded(
                request_id=report.request_id,
                endpoint=request.entry.path,
                model=report.model,
                outcome=outcome,
                status=report.status,
                legs=[LegTimes(decode=report.node, attempts=report.attempts)] if report.node is not None else [],
                queue_s=(report.admitted or now) - report.received,
                first_s=None if report.first is None else report.first - report.received,
                total_s=now - report.received,
                prompt_tokens=None,
                completion_tokens=None,
                gaps=Gaps(),
                error=None if error is None else error.logged,
            )
        )
