"""A generating request from its first byte to its last: read, admitted, exchanged, answered, reported.

Owns the answer to the client and the one report (`RequestEnded`) that each request leaves, whatever became of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from pdproxy.kit.errors import (
    ClientLeftError,
    EngineError,
    EngineTimeoutError,
    Fault,
    OverloadedError,
    PdproxyError,
    UnauthorizedError,
    Wait,
)
from pdproxy.kit.frames import drop_traceback, frames
from pdproxy.kit.ids import mint, usable
from pdproxy.observe.events import DeadlinePassed, RequestEnded
from pdproxy.serving.access.clients import Client
from pdproxy.serving.access.keys import CHALLENGE, Keys
from pdproxy.serving.dispatch.exchange import Exchange
from pdproxy.serving.dispatch.resources import ExchangeResources, LegHeaders
from pdproxy.serving.request.admission import Admission
from pdproxy.serving.request.body_reader import BodyReader
from pdproxy.serving.request.merged_answer import merge_usage_events
from pdproxy.serving.request.prompt_list import PromptList
from pdproxy.serving.request.totals import RequestTotals
from pdproxy.serving.stream.relay import Relay
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.upstream.client import Answer
from pdproxy.upstream.connection import Headers
from pdproxy.wire import sse
from pdproxy.wire.errors import error_body
from pdproxy.wire.fields import body_request_id
from pdproxy.wire.lenient_json import check_content_type
from pdproxy.wire.request import Incoming, Parsed

logger = logging.getLogger("pdproxy")

_PASSED_HEADERS = (b"content-type", b"retry-after")
JSON_TYPE = (b"content-type", b"application/json")


@dataclass(slots=True)
class _Report:
    """What becomes known of a request as it goes. Owned by one call of `Service.generate`."""

    request_id: str
    received: float
    model: str | None = None
    admitted: float | None = None
    exchange: Exchange | None = None
    """The only one of a request that is no list."""
    tally: RequestTotals = field(default_factory=RequestTotals)
    first: float | None = None
    status: int = 0


class Service:
    """Serves the two generating routes."""

    def __init__(self, engines: ExchangeResources, admission: Admission, keys: Keys, bodies: BodyReader) -> None:
        self._engines = engines
        self._admission = admission
        self.keys = keys
        self._bodies = bodies

    async def generate(self, incoming: Incoming, output: ResponseWriter) -> None:
        """Answer a request through `output`. Raises nothing but CancelledError, at a shutdown or when the client has left."""
        now = self._engines.now
        report = _Report(usable(incoming.request_id) or mint(), now())
        error: PdproxyError | None = None
        admitted = False
        try:
            run = await self._read(incoming, output.client, report)
            async with self._engines.clock.within(self._engines.deadlines.total):
                await self._admission.enter(output.client)
                admitted = True
                report.admitted = now()
                await run(output, report)
        except asyncio.CancelledError:
            error = ClientLeftError("the client closed the connection")
            if not output.gone:  # it was the shutdown
                error = OverloadedError("pdproxy is shutting down")
            raise
        except TimeoutError:
            total = self._engines.deadlines.total
            self._engines.observers.notify(DeadlinePassed(Wait.TOTAL.value))
            error = EngineTimeoutError(f"the request took longer than {total:g} s", wait=Wait.TOTAL)
        except PdproxyError as failed:
            error = failed
        except Exception as failed:
            logger.error("request %s failed in pdproxy itself: %s", report.request_id, frames(failed))  # noqa: TRY400
            error = PdproxyError(type(failed).__name__)
        finally:
            if admitted:
                self._admission.leave(output.client)
            if error is not None and not isinstance(error, ClientLeftError):
                self._answer_error(error, output, report)
            elif error is not None:
                output.break_off()
            self._report(incoming, report, error)
            if error is not None:
                drop_traceback(error)

    async def _read(self, incoming: Incoming, client: Client, report: _Report) -> _Run:
        """Read a request, and return what serves it.

        From here on, the body is in the exchanges' hands alone: they let go of it once no engine needs it any more.
        """
        self.keys.check(incoming.authorization)
        body, incoming.body = incoming.body, b""
        check_content_type(incoming.content_type, body)
        parsed = await self._bodies.request(incoming.route, body, client)
        report.model = parsed.model
        if incoming.request_id is None:
            report.request_id = usable(body_request_id(parsed.fields)) or report.request_id
        authorization = self.keys.to_engine(incoming.authorization)
        request_id = report.request_id.encode()
        heading = LegHeaders(
            report.request_id,
            incoming.route.value,
            ((b"x-request-id", request_id), *authorization, *incoming.forward),
            authorization,
        )
        if parsed.is_list and len(parsed.prompts) > 1 and parsed.alone is None:
            return partial(self._serve_list, parsed, heading)
        prompt = None if parsed.alone is not None else parsed.prompts[0]
        new_relay = partial(
            Relay,
            wants_usage=not parsed.adds_usage,
            takes_ids=parsed.adds_ids,
            room=self._engines.room,
            now=self._engines.now,
        )
        report.exchange = Exchange(self._engines, parsed, prompt, heading, new_relay)
        return self._serve_one

    async def _serve_one(self, output: ResponseWriter, report: _Report) -> None:
        exchange = report.exchange
        assert exchange is not None

        def begin(relay: Relay) -> ResponseWriter:
            report.first = self._engines.now()
            report.status = 200
            output.let_go_of_body()
            output.begin(self._headers(relay.headers, report))
            return output

        answer = await exchange.run(begin)
        if answer is None:
            output.finish()
        else:
            self._answer(answer, output, report)

    async def _serve_list(self, parsed: Parsed, heading: LegHeaders, output: ResponseWriter, report: _Report) -> None:
        def begin(headers: Headers) -> None:
            if report.first is None:
                report.first = self._engines.now()
                report.status = 200
                output.begin(self._headers(headers, report))

        prompts = PromptList(self._engines, parsed, heading, output, begin, report.tally)
        await prompts.run()
        if output.gone:
            return
        if not output.begun:
            self._answer(prompts.answer.whole(), output, report)
        elif prompts.answer:
            raise EngineError("an engine answered one prompt of a streamed list whole")
        else:
            self._end_merged(parsed, prompts, output)

    def _end_merged(self, parsed: Parsed, prompts: PromptList, output: ResponseWriter) -> None:
        events = [prompts.usage_events[index] for index in sorted(prompts.usage_events)]
        created = prompts.parts.created
        if parsed.wants_usage and events:
            event = merge_usage_events(events)
            output.write(event if created is None else sse.with_created(event, created))
        output.write(sse.DONE + sse.END)
        output.finish()

    # -- answering

    def _headers(self, headers: Headers, report: _Report) -> Headers:
        passed = [(name, value) for name, value in headers if name in _PASSED_HEADERS]
        return [*passed, (b"x-request-id", report.request_id.encode())]

    def _answer(self, answer: Answer, output: ResponseWriter, report: _Report) -> None:
        report.status = answer.status
        if report.first is None and answer.status == 200:
            report.first = self._engines.now()
        output.whole(answer.status, self._headers(answer.headers, report), answer.body)

    def _answer_error(self, error: PdproxyError, output: ResponseWriter, report: _Report) -> None:
        body = error_body(error)
        if output.begun:
            output.write(sse.data(body))
            output.break_off()
            return
        report.status = error.status
        headers = [JSON_TYPE, (b"x-request-id", report.request_id.encode())]
        if error.fault is Fault.CAPACITY:
            headers.append((b"retry-after", b"1"))
        if isinstance(error, UnauthorizedError):
            headers.append(CHALLENGE)
        output.whole(error.status, headers, body)

    def _report(self, incoming: Incoming, report: _Report, error: PdproxyError | None) -> None:
        now = self._engines.now()
        tally = report.tally
        if report.exchange is not None:
            tally.add(0, report.exchange)
        outcome = "ok" if error is None else error.fault.value
        if error is None and report.status >= 400:
            outcome = Fault.CLIENT.value
        self._engines.observers.notify(
            RequestEnded(
                request_id=report.request_id,
                endpoint=incoming.route.value,
                model=report.model,
                outcome=outcome,
                status=report.status,
                legs=tally.legs,
                queue_s=(report.admitted or now) - report.received,
                first_s=None if report.first is None else report.first - report.received,
                total_s=now - report.received,
                prompt_tokens=tally.prompt_tokens,
                completion_tokens=tally.completion_tokens,
                gaps=tally.gaps,
                error=None if error is None else error.logged,
            )
        )


_Run = Callable[[ResponseWriter, _Report], Awaitable[None]]
