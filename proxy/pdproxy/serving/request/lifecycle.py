"""The steps of a request that engines serve, the same for every route: it is read, admitted,
served, answered, reported.

Owns the order of these steps, the request's place, its total deadline, its use of its key's limits,
and the report of its end (`RequestEnded`): one per request, however it ended. The subclasses of
`LiveRequest` have what differs by route.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from pdproxy.kit.errors import (
    ClientLeftError,
    EngineTimeoutError,
    Fault,
    OverloadedError,
    PdproxyError,
    RefusalReason,
    UnauthorizedError,
    Wait,
)
from pdproxy.kit.frames import drop_traceback, frames
from pdproxy.kit.ids import mint, usable
from pdproxy.kit.ordered_set import OrderedSet
from pdproxy.observe.events import DeadlinePassed, LegTimes, RequestEnded
from pdproxy.observe.recent import RunningRequest, SoFar
from pdproxy.scheduling.admission import NO_DEMAND, Admission, Place, Quotas, Use
from pdproxy.serving.access.keys import CHALLENGE, Keys
from pdproxy.serving.dispatch.resources import ExchangeResources
from pdproxy.serving.kv.custody import Custody
from pdproxy.serving.request.totals import RequestTotals
from pdproxy.serving.stream.async_response_writer import AsyncResponseWriter
from pdproxy.serving.stream.client_websocket import ClientWebSocket
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.upstream.connection import Headers
from pdproxy.wire.errors import retry_headers

logger = logging.getLogger("pdproxy")

JSON_TYPE = (b"content-type", b"application/json")
STREAM_TYPE = (b"content-type", b"text/event-stream; charset=utf-8")
_AS_IT_COMES = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""Headers of a stream for proxies in between: nginx would collect tokens into blocks of its
buffer's size.
"""
STREAM_HEADERS = (STREAM_TYPE, *_AS_IT_COMES)

Writer = TypeVar("Writer", ResponseWriter, AsyncResponseWriter, ClientWebSocket)
Serve = Callable[[], Awaitable[None]]


class LiveRequest(ABC, Generic[Writer]):
    """One request, and what is known of it so far. Subclasses have the steps that differ. Owned by
    one call of `Lifecycle.run`.

    `method` and `endpoint`: the route's. `received`, `admitted` and `first` are times in seconds of
    `ExchangeResources.now`; `first` is that of a stream's first data. `address` and `key`: the
    client's address and the name of its key, for the report.
    """

    __slots__ = (
        "address",
        "admitted",
        "demand",
        "endpoint",
        "first",
        "key",
        "method",
        "model",
        "received",
        "request_id",
        "status",
        "stream",
        "timeout",
        "totals",
        "use",
        "writer",
    )

    def __init__(
        self, endpoint: str, request_id: str | None, writer: Writer, received: float
    ) -> None:
        self.method = "POST"
        self.endpoint = endpoint
        self.request_id = usable(request_id) or mint()
        self.writer: Writer = writer
        self.received = received
        self.model: str | None = None
        self.stream: bool | None = None
        """Whether the client wants a stream, None before that is known."""
        self.address: str | None = None
        self.key: str | None = None
        self.demand = NO_DEMAND
        self.timeout: float | None = None
        """Seconds from `received` within which the client wants its answer, None if it does not say
        so.
        """
        self.admitted: float | None = None
        self.first: float | None = None
        self.status = 0
        self.totals = RequestTotals()
        self.use: Use | None = None
        """Its use of its key's limits, None without limits."""

    @property
    def sent(self) -> bool:
        """Whether a part of the answer was sent to the client."""
        return self.first is not None

    @abstractmethod
    async def read(self) -> Serve:
        """Check and read the request, and return what serves and answers it once it is admitted.

        Called again if keys have changed until then.

        Raises:
            PdproxyError: the request is refused.
        """

    @abstractmethod
    async def answer_error(self, error: PdproxyError) -> None:
        """Answer an error, as far as an answer is still possible. After ClientLeftError, only end
        an answer that was begun.
        """

    @abstractmethod
    def add_up(self) -> None:
        """Complete `totals` for the report. Called once, after the last engine was asked."""

    @abstractmethod
    def legs_so_far(self) -> Sequence[LegTimes]:
        """Return the legs of each prompt of which something is known."""

    def so_far(self) -> SoFar:
        """Return what is known of it while it runs."""
        return SoFar(
            self.request_id,
            self.method,
            self.endpoint,
            self.model,
            self.status,
            self.stream,
            self.address,
            self.key,
            self.writer.client.label,
            self.received,
            self.admitted,
            self.first,
            self.legs_so_far(),
        )

    def answer_headers(self, headers: Headers, passed: tuple[bytes, ...]) -> Headers:
        """Return the headers of an engine's answer: those named in `passed`, and the request's
        id.
        """
        return [
            *[line for line in headers if line[0] in passed],
            (b"x-request-id", self.request_id.encode()),
        ]

    def stream_headers(self, headers: Headers, passed: tuple[bytes, ...]) -> Headers:
        """Return the headers of an engine's stream: as `answer_headers`, and that it must not be
        buffered on its way.
        """
        return [*self.answer_headers(headers, passed), *_AS_IT_COMES]

    def error_headers(self, error: PdproxyError) -> Headers:
        """Return the headers of an error that pdproxy answers itself."""
        headers = [JSON_TYPE, (b"x-request-id", self.request_id.encode()), *retry_headers(error)]
        if isinstance(error, UnauthorizedError):
            headers.append(CHALLENGE)
        return headers


class Lifecycle:
    """Takes requests through their steps. One for all requests of a service."""

    def __init__(
        self, resources: ExchangeResources, admission: Admission, quotas: Quotas, keys: Keys
    ) -> None:
        self._resources = resources
        self._keys = keys
        self._admission = admission
        self._quotas = quotas
        self.running: OrderedSet[RunningRequest] | None = None
        """The requests that run, None where nobody is shown them."""

    async def run(self, request: LiveRequest[Writer]) -> None:
        """Serve, answer and report a request. Raises only CancelledError: at a shutdown, or when
        the client has left.
        """
        resources = self._resources
        error: PdproxyError | None = None
        place: Place | None = None
        use: Use | None = None
        own_limit = False
        total = resources.deadlines.total
        running = self.running
        if running is not None:
            running.add(request)
        try:
            if request.writer.ended_by is not None:
                raise request.writer.ended_by
            if (key := request.key) is not None:
                use = request.use = await self._quotas.enter(key)
            changes = self._keys.changes
            serve = await request.read()
            if use is not None:
                demand = request.demand
                await use.reserve(demand.prompt, demand.most, demand.answers)
            deadline = None
            if request.timeout is not None and request.timeout < total:
                deadline = request.received + request.timeout
                total = max(deadline - resources.now(), 0.0)
            with resources.clock.within(total):
                place = await self._admission.enter(request.writer.client, request.demand, deadline)
                # its key may be good for less than when it began to wait
                while self._keys.changes != changes:
                    changes = self._keys.changes
                    serve = await request.read()
                request.admitted = resources.now()
                await serve()
        except asyncio.CancelledError:
            error = ClientLeftError("the client closed the connection")
            if not request.writer.gone:  # its key is not valid any more, or it was the shutdown
                error = request.writer.ended_by or OverloadedError(
                    "pdproxy is shutting down", RefusalReason.DRAINING
                )
            raise
        except TimeoutError:
            resources.observers.notify(DeadlinePassed(Wait.TOTAL.value))
            limit = min(request.timeout or math.inf, resources.deadlines.total)
            own_limit = limit < resources.deadlines.total
            error = EngineTimeoutError(f"the request took longer than {limit:g} s", wait=Wait.TOTAL)
        except PdproxyError as failed:
            error = failed
        except Exception as failed:
            logger.error(  # noqa: TRY400
                "request %s failed in pdproxy itself: %s", request.request_id, frames(failed)
            )
            error = PdproxyError(type(failed).__name__)
        finally:
            meter = request.totals.meter
            try:
                request.add_up()
                if error is not None:
                    meter.end(error, request.demand, sent=request.sent, own_limit=own_limit)
                meter.bound(request.demand)
            finally:
                try:
                    if use is not None:
                        unseen = meter.unseen / (request.demand.answers or 1)
                        use.end(meter.prompt + meter.completion, unseen, meter.seen)
                        for custody in meter.later:
                            custody.when_over(
                                partial(_pay_later, use, custody, request.demand.longest)
                            )
                finally:
                    if place is not None:
                        seconds = resources.now() - (request.admitted or request.received)
                        tokens = (
                            (meter.prompt, meter.completion) if meter.measured else (None, None)
                        )
                        place.leave(
                            seconds,
                            *tokens,
                            late=isinstance(error, EngineTimeoutError),
                            answered=error is None,
                        )
            try:
                if error is not None:
                    await request.answer_error(error)
            finally:
                if running is not None:
                    running.discard(request)
                self._report(request, error)
                if error is not None:
                    drop_traceback(error)

    def _report(self, request: LiveRequest[Writer], error: PdproxyError | None) -> None:
        now = self._resources.now()
        totals = request.totals
        text = reason = None
        if error is None:
            outcome = "ok" if request.status < 400 else Fault.CLIENT.value
        else:
            outcome, text = error.fault.value, error.logged
            if error.reason is not None:
                reason = error.reason.value
        self._resources.observers.notify(
            RequestEnded(
                request_id=request.request_id,
                endpoint=request.endpoint,
                model=request.model,
                outcome=outcome,
                status=request.status,
                legs=totals.legs,
                queue_s=(request.admitted or now) - request.received,
                first_s=None if request.first is None else request.first - request.received,
                total_s=now - request.received,
                prompt_tokens=totals.prompt_tokens,
                completion_tokens=totals.completion_tokens,
                gaps=totals.gaps,
                error=text,
                method=request.method,
                stream=request.stream,
                client=request.address,
                key=request.key,
                reason=reason,
                tenant=request.writer.client.label,
            )
        )


def _pay_later(use: Use, custody: Custody, most: int) -> None:
    """Charge a prompt that was computed behind the request's end, `most` tokens at most."""
    use.add(min(custody.made_tokens, most))
