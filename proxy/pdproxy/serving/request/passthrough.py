"""A request that one engine serves whole: it is sent to one engine after the other, until one has
sent data.

Owns the answer to the client. Nothing reaches the client before the engine has sent data, so that
until then another engine can be asked. The request's steps are those of `lifecycle`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Sequence
from contextlib import suppress
from functools import partial

from pdproxy.kit.errors import (
    BadRequestError,
    ClientLeftError,
    EngineError,
    EngineRefusedError,
    EnginesLostError,
    EngineTimeoutError,
    Fault,
    ModelNotFoundError,
    OverloadedError,
    PdproxyError,
    RefusalReason,
    StandstillError,
    Wait,
)
from pdproxy.kit.frames import drop_traceback
from pdproxy.observe.events import DeadlinePassed, LegTimes
from pdproxy.scheduling.admission import Admission, Quotas, RequestDemand
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.losses import SOON, Fingerprint, LostUnder, Slot, Turn, protected
from pdproxy.scheduling.policy import Ask
from pdproxy.serving.access.keys import Keys
from pdproxy.serving.access.models import Routes
from pdproxy.serving.access.permits import check_model, check_pool, shown_to
from pdproxy.serving.access.routes import RouteKind
from pdproxy.serving.dispatch.broken_legs import broke
from pdproxy.serving.dispatch.doubtful_failures import DoubtfulFailures
from pdproxy.serving.dispatch.failure_class import (
    SAME_ELSEWHERE,
    is_clients_fault,
    is_doubtful,
    is_schema_refusal,
    is_unknown_model,
    refused,
    verdict_of,
)
from pdproxy.serving.dispatch.fingerprint import fields_of
from pdproxy.serving.dispatch.recovery import has_stalled
from pdproxy.serving.dispatch.resources import ExchangeResources, LegHeaders
from pdproxy.serving.request.body_reader import BodyReader
from pdproxy.serving.request.demand import passed_demand, prioritized
from pdproxy.serving.request.hints import timeout_of, user_in
from pdproxy.serving.request.incoming import IncomingPassthrough
from pdproxy.serving.request.lifecycle import STREAM_TYPE, Lifecycle, LiveRequest, Serve
from pdproxy.serving.request.meter import Meter
from pdproxy.serving.request.open_leg import OpenPassedLeg
from pdproxy.serving.request.rights import bound_speech
from pdproxy.serving.stream.async_response_writer import AsyncResponseWriter
from pdproxy.serving.stream.comments import Comments
from pdproxy.serving.stream.failures import as_event
from pdproxy.serving.stream.proof import has_real_data
from pdproxy.settings.keys import KeyRights
from pdproxy.upstream.client import Answer
from pdproxy.upstream.passthrough import PassthroughLeg, PassthroughLegs
from pdproxy.wire.api_errors import WholeEvents, failure_body, failure_event
from pdproxy.wire.cache_salt import check, session_within
from pdproxy.wire.engine import Usage
from pdproxy.wire.fields import Fields
from pdproxy.wire.inside import (
    error_events_without_inside,
    error_without_inside,
    passed_events_without_inside,
    passed_without_inside,
)
from pdproxy.wire.lenient_json import check_content_type
from pdproxy.wire.passed_usage import METADATA, usage_in
from pdproxy.wire.passthrough_body import NO_BODY, PassedBody
from pdproxy.wire.route_form import Alone
from pdproxy.wire.speech_body import speech_usage

_PASSED_HEADERS = (b"content-type", b"retry-after", METADATA, b"endpoint-load-metrics")
"""The last one comes with chats and completions."""


class _ModelRefusedError(EngineRefusedError):
    """The engine does not have the model, which another one lists."""


class Passthrough:
    """Serves the routes of the kind `RouteKind.PASSED`."""

    def __init__(
        self,
        resources: ExchangeResources,
        admission: Admission,
        keys: Keys,
        legs: PassthroughLegs,
        bodies: BodyReader,
        quotas: Quotas,
    ) -> None:
        self.pool = ""
        """The name of its pool."""
        self.resources = resources
        self.keys = keys
        self.legs = legs
        self.bodies = bodies
        self.routes: Routes[Passthrough] | None = None
        """Those of all pools, None where there is nothing to choose: one pool without aliases."""
        self.lifecycle = Lifecycle(resources, admission, quotas, keys)

    def serve(self, incoming: IncomingPassthrough, output: AsyncResponseWriter) -> Awaitable[None]:
        """Answer a request through `output`. Raises as `Lifecycle.run`."""
        return self.lifecycle.run(PassthroughRequest(self, incoming, output))


class _Lost:
    """The engines that disappear under one such request: see `scheduling.losses`.

    `body`: as engines get it.

    `computes`: whether an engine's core computes its prompt. Otherwise its answer says nothing of
    that core.
    """

    def __init__(
        self, resources: ExchangeResources, headers: LegHeaders, body: PassedBody, *, computes: bool
    ) -> None:
        self._resources = resources
        self._headers = headers
        self._body = body
        self._computes = computes
        self._fingerprint: Fingerprint | None = None
        self._permit: Turn | None = None

    def _known(self) -> Fingerprint:
        """Return the request's fingerprint."""
        if self._fingerprint is None:
            body = self._body
            fields = fields_of(body.data) if body.parts is None else body.parts
            self._fingerprint = self._resources.fingerprint(self._headers.path, fields)
        return self._fingerprint

    async def admit(self) -> None:
        """As `Losses.turn`. Raises EnginesLostError also if too many engines were lost under it
        before.
        """
        resources, headers = self._resources, self._headers
        if headers.lost:
            why_not = await resources.lost.judge(headers, self._known(), looks_back=True)
            if why_not is not None:
                raise why_not
        if resources.suspects.remembers and resources.suspects.know(self._known(), headers.client):
            self._permit = await resources.lost.turn(
                headers, self._known(), resources.deadlines.queue
            )

    def sent(self) -> None:
        """An engine is asked: its turn ends a moment later."""
        if self._permit is not None:
            self._permit.leave_in(SOON)

    def leave(self) -> None:
        """The request is over."""
        if self._permit is not None:
            self._permit.leave(harmless=False)

    def began(self) -> None:
        """Its stream has begun."""
        if self._computes and self._resources.suspects.remembers:
            self._resources.cleared(self._headers, self._known(), whole=False)

    def answered(self) -> None:
        """It was answered."""
        if self._computes and self._resources.suspects.remembers:
            self._resources.cleared(self._headers, self._known(), whole=True)

    def left(self, lease: Lease) -> None:
        """Its client has left before any data."""
        self._resources.lost.left(self._headers, [lease], self._known())
        if self._permit is not None:  # it may still end its engine
            self._permit.leave_in(SOON, harmless=False)
            self._permit = None

    async def under(
        self, lease: Lease, error: EngineError, *, streamed: bool
    ) -> EnginesLostError | None:
        """Note an engine that has failed. Return why no other one is risked, None if one may be."""
        lost, headers = self._resources.lost, self._headers
        may_be_lost = broke(lost, headers, lease.engine, error, lease.since, streamed=streamed)
        if may_be_lost and self._permit is not None:
            self._permit.leave_in(SOON, harmless=False)  # unless it is tried again before
        if not headers.lost:
            return None
        drop_traceback(error)  # the client may leave while this waits
        try:
            return await lost.judge(headers, self._known())
        except asyncio.CancelledError:
            if not streamed:
                self.left(lease)
            raise


class PassthroughRequest(LiveRequest[AsyncResponseWriter]):
    """A request of a route that one engine serves whole.

    `losses`: the engines that were lost under it before, where parts of it were served on another
    route (`LegHeaders.lost`).
    """

    __slots__ = (
        "_asked",
        "_attempts",
        "_beside_idle",
        "_commenting",
        "_doubtful",
        "_events",
        "_forward",
        "_incoming",
        "_losses",
        "_lost",
        "_service",
        "_slot",
        "_stream",
        "_url",
        "_usage",
        "_whole",
    )

    def __init__(
        self,
        service: Passthrough,
        incoming: IncomingPassthrough,
        output: AsyncResponseWriter,
        losses: list[LostUnder] | None = None,
    ) -> None:
        super().__init__(incoming.entry.path, incoming.request_id, output, service.resources.now())
        self.method, self.address, self.key = (
            incoming.entry.methods[0],
            incoming.client,
            incoming.key,
        )
        self._service = service
        self._incoming = incoming
        self._forward = incoming.forward
        self._url: str | None = None
        """The URL of the engine that was asked last."""
        self._asked = 0.0
        """When that was."""
        self._whole: float | None = None
        """When its whole answer had come, if that was not a stream."""
        self._attempts = 0
        self._beside_idle = False
        """Whether that is an engine for decode although one for prefill had no request."""
        self._slot: Slot | None = None
        """The place of an attempt behind the first one, until its first data."""
        self._stream: WholeEvents | None = None
        self._events = 0
        """Writes of events so far."""
        self._usage: Usage | None = None
        """What the engine has reported with a whole answer."""
        self._losses = [] if losses is None else losses
        self._lost: _Lost | None = None
        self._doubtful: DoubtfulFailures | None = None
        """Failures of engines that it may have caused, until it is answered; None while there are
        none.
        """
        self._commenting: asyncio.Task[None] | None = None
        """The write of the last comment."""

    async def read(self) -> Serve:
        """Check and read the request."""
        incoming, service = self._incoming, self._service
        rights = service.keys.admit(incoming)
        self.timeout = timeout_of(incoming.hints)
        if not incoming.entry.has_body:
            if rights is not None:
                check_pool(rights, service.pool)
                check_model(rights, None)
            return partial(self.serve, NO_BODY)
        name = None
        if service.routes is not None or rights is not None:
            name = partial(self._name, service.routes, rights)
        salt, entry, bodies = None, incoming.entry, service.bodies
        if entry.computes:
            salt = check if incoming.salt is None else incoming.salt.put_into
        if entry.form:
            body = await bodies.speech(incoming.content_type, incoming.body, name, salt)
        else:
            check_content_type(incoming.content_type, incoming.body)
            body = await bodies.passed(entry.dialect, incoming.body, self.writer.client, name, salt)
        self.model, self.stream = self.model or body.model, body.stream
        demand = passed_demand(body.size, body.limit, body.pairs, generates=entry.form)
        allowed = service.keys.priorities(self.key)
        self.demand, self._forward = prioritized(demand, incoming.forward, allowed, is_known=False)
        return partial(self.serve, body)

    def _name(
        self,
        routes: Routes[Passthrough] | None,
        rights: KeyRights | None,
        model: str | None,
        fields: Fields,
    ) -> str | None:
        """Choose the pool, and return the engines' name of a model. Raises what `Routes.of` raises,
        and ForbiddenError.
        """
        self.model, known = model, model
        if routes is not None:
            session = session_within(self._incoming.salt, self._incoming.session or user_in(fields))
            try:
                self._service, known = routes.of(
                    model, session, None if rights is None else rights.pools
                )
            except ModelNotFoundError as error:
                raise shown_to(rights, error) from None
        if rights is not None:
            check_pool(rights, self._service.pool)
            check_model(rights, known)
            if self._incoming.entry.form:
                bound_speech(rights, fields)
        return known

    async def serve(self, body: PassedBody) -> None:
        """Ask engines one after the other, until one has sent data. Raises the last one's
        EngineError.
        """
        resources = self._service.resources
        comments = Comments(
            resources.clock,
            resources.deadlines.stream_comment if body.stream else 0.0,
            lambda: self._events,
            self._comment,
        )
        try:
            await self._ask_engines(body)
        finally:
            comments.stop()
            if self._commenting is not None:
                self._commenting.cancel()

    async def _ask_engines(self, body: PassedBody) -> None:
        incoming, resources = self._incoming, self._service.resources
        authorization = self._service.keys.to_engine(incoming.authorization)
        own = [(b"content-type", body.content_type)] if incoming.entry.has_body else []
        headers = (
            *own,
            (b"x-request-id", self.request_id.encode()),
            *authorization,
            *self._forward,
        )
        client, losses = self.writer.client.name, self._losses
        leg_headers = LegHeaders(
            self.request_id, incoming.entry.path, headers, authorization, client=client, lost=losses
        )
        lost = self._lost = _Lost(resources, leg_headers, body, computes=incoming.entry.computes)
        try:
            await lost.admit()
            if any(one.some for one in losses):
                await self._take_slot(leg_headers)
            await self._ask_one_after_the_other(body, leg_headers, lost)
        finally:
            self._leave_slot()
            lost.leave()

    async def _ask_one_after_the_other(
        self, body: PassedBody, leg_headers: LegHeaders, lost: _Lost
    ) -> None:
        incoming, resources, size = self._incoming, self._service.resources, body.size
        without: set[str] = set()
        stalled, refused, until = 0, 0, 0.0
        avoid: tuple[str, ...] = ()
        while True:
            ask = Ask(
                body.model,
                size,
                resources.now(),
                session=session_within(incoming.salt, incoming.session),
            )
            forbidden: Sequence[str] = ()
            if leg_headers.lost:
                forbidden = await resources.lost.forbidden(leg_headers)
            lease = await resources.scheduler.choose_one(ask, (*without, *forbidden), avoid)
            if lease is not None and lease.engine.url in forbidden:
                resources.close(lease, Verdict.NEUTRAL)
                raise protected()
            if lease is None:
                is_retry = self._slot is not None
                self._leave_slot()  # others are tried again meanwhile
                until = until or resources.now() + resources.deadlines.queue
                if not await resources.engines_change(body.model, until):
                    raise OverloadedError(
                        "no engine can serve this request: see /ready", RefusalReason.NO_ENGINE
                    )
                if is_retry:
                    await self._take_slot(leg_headers)
                continue
            url, self._beside_idle = lease.engine.url, lease.beside_idle
            self._url = url
            self._attempts += 1
            self._asked = resources.now()
            lost.sent()
            verdict = Verdict.NEUTRAL
            try:
                open_legs = resources.engines.known[url].open_legs
                open_leg = OpenPassedLeg(open_legs, self._asked, lease.prompt_bytes, stalled)
                async with open_leg:
                    verdict = await self._try(lease, leg_headers, body, open_leg, without)
                    if verdict is Verdict.GOOD:
                        open_leg.ended_well = resources.now()
                        lost.answered()
                        self._answered_well()
                return
            except asyncio.CancelledError:
                if self.first is None and self._whole is None:
                    lost.left(lease)
                raise
            except _ModelRefusedError as error:
                resources.report_failure(leg_headers, url, "alone", error, will_retry=True)
                without.add(url)
                # this says nothing of the others, and the engine is asked for this model no more
                refused += 1
                continue
            except EngineError as error:
                verdict = verdict_of(error, streamed=self.first is not None)
                is_over = has_stalled(error, stalled) or self._note_doubt(lease, error)
                why_not = await lost.under(lease, error, streamed=self.first is not None)
                if isinstance(error, StandstillError):
                    stalled += error.may_be_cause
                    avoid = resources.suspected()
                elif self._doubtful is not None:
                    avoid = resources.doubted()
                again = (
                    self.first is None
                    and not is_over
                    and why_not is None
                    and self._attempts - refused < resources.limits.attempts
                    and not isinstance(error, SAME_ELSEWHERE)
                    and error.fault is not Fault.CLIENT
                )
                if (wait := getattr(error, "wait", None)) is not None:
                    resources.observers.notify(DeadlinePassed(wait.value, url))
                if error.fault is not Fault.CLIENT:
                    resources.report_failure(leg_headers, url, "alone", error, will_retry=again)
                if not again and why_not is not None:
                    raise why_not from None
                if not again:
                    if self._doubtful is not None and is_doubtful(error):
                        resources.unanswered(self._doubtful)
                    raise
                without.add(url)
            finally:
                resources.close(lease, verdict)
                self._leave_slot()
            await self._take_slot(leg_headers)

    def _note_doubt(self, lease: Lease, error: EngineError) -> bool:
        """Note an engine that has failed perhaps because of the request. Return whether a second
        one has failed so.
        """
        if self.first is not None or not is_doubtful(error):
            return False
        if self._doubtful is None:
            self._doubtful = DoubtfulFailures()
        self._doubtful.answer_failed(lease)
        return self._doubtful.follow(prefill=False)

    def _answered_well(self) -> None:
        """Count what has failed before: another engine has answered, so that the request was not
        the cause.
        """
        doubtful, self._doubtful = self._doubtful, None
        if doubtful is not None:
            self._service.resources.count(*doubtful.answered())

    async def _take_slot(self, leg_headers: LegHeaders) -> None:
        """Wait for a place for one more attempt. Raises OverloadedError if none came free."""
        resources = self._service.resources
        self._slot = await resources.retry_slot(leg_headers)
        if self._slot is None:
            raise resources.not_retried()

    def _comment(self, comment: bytes) -> None:
        """Send a comment, unless the client has not taken the last one."""
        if self._commenting is None or self._commenting.done():
            self._commenting = asyncio.ensure_future(self._write_comment(comment))

    async def _write_comment(self, comment: bytes) -> None:
        """Send a comment. The first one sends the status: what fails from then on is an event of
        the stream.
        """
        output = self.writer
        with suppress(ClientLeftError):
            if not output.begun:
                self.status = 200
                await output.begin(self.stream_headers([STREAM_TYPE], _PASSED_HEADERS))
            await output.write(comment)

    def _leave_slot(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.leave()

    async def _try(
        self,
        lease: Lease,
        leg_headers: LegHeaders,
        body: PassedBody,
        open_leg: OpenPassedLeg,
        without: Collection[str],
    ) -> Verdict:
        url, resources = lease.engine.url, self._service.resources
        deadlines = resources.deadlines
        seconds = (
            deadlines.total
            if self._incoming.entry.slow and not body.stream
            else deadlines.first_token
        )
        leg: PassthroughLeg | None = None
        answer: Answer | None = None
        try:
            # A machine that is down closes no connection.
            open_leg.in_silence = True
            resources.down_watch.watch()
            try:
                with resources.clock.within(seconds):
                    method = self._incoming.entry.methods[0]
                    leg = await self._service.legs.send(
                        method, url, leg_headers.path, leg_headers.headers, body.data
                    )
                    if not (leg.streamed and leg.status == 200):
                        answer = Answer(leg.status, leg.headers, await leg.read())
                        if body.own is not None and is_schema_refusal(answer):
                            leg.close()
                            leg = await self._service.legs.send(
                                method, url, leg_headers.path, leg_headers.headers, body.own
                            )
                            if leg.status == answer.status:
                                answer = Answer(leg.status, leg.headers, await leg.read())
            except TimeoutError:
                raise EngineTimeoutError(
                    f"{url} did not answer in {seconds:g} s", wait=Wait.FIRST_TOKEN
                ) from None
            open_leg.in_silence = False
            if answer is None:
                await self._relay(leg, lease, open_leg)
                return Verdict.GOOD
        finally:
            if leg is not None:
                leg.close()
        # vLLM answers 501 if its model can't do this: the engine has not failed.
        if answer.status not in (200, 501) and not is_clients_fault(answer):
            raise refused(url, answer)
        if (
            answer.status == 404
            and body.unknown_id is not None
            and body.unknown_id.encode() in answer.body
        ):
            why = "no response is stored to be fetched later"
            raise BadRequestError(f"`background` is not supported: {why}", param="background")
        if body.model is not None and is_unknown_model(answer):
            resources.scheduler.lost_model(url, body.model)
            if resources.states.lists(body.model, (*without, url)):
                text = f"{url} does not have the model any more"
                raise _ModelRefusedError(text, status=answer.status, body=b"")
        if self.writer.begun:
            raise as_event(answer)
        self.status = answer.status
        self._whole = self._service.resources.now() if answer.status == 200 else None
        if answer.status == 200:
            self._usage = (
                speech_usage(answer.body, self.demand.prompt)
                if self._incoming.entry.form
                else usage_in(answer.body, answer.headers)
            )
            shown = passed_without_inside(answer.body)
        else:
            shown = error_without_inside(answer.body, answer.status, self._engines())
        await self.writer.whole(
            answer.status, self.answer_headers(answer.headers, _PASSED_HEADERS), shown
        )
        return Verdict.GOOD if answer.status == 200 else Verdict.NEUTRAL

    async def _relay(self, leg: PassthroughLeg, lease: Lease, open_leg: OpenPassedLeg) -> None:
        """Pass a stream on in whole events; the first ones only once the model has begun to
        generate.
        """
        resources, output = self._service.resources, self.writer
        url, deadlines, now = lease.engine.url, resources.deadlines, resources.now
        stream = self._stream = WholeEvents(self._incoming.entry.dialect)
        first_by = now() + deadlines.first_token
        held = b""
        while True:
            if self.first is not None:
                wait, seconds = Wait.BETWEEN_TOKENS, deadlines.between_tokens
            else:
                wait, seconds = Wait.FIRST_TOKEN, max(first_by - now(), 0)
            try:
                with resources.clock.within(seconds):
                    data = await leg.chunk()
            except TimeoutError:
                if await resources.works(url, wait.value):
                    first_by = now() + deadlines.first_token
                    continue
                raise EngineTimeoutError(f"{url} sent no data in time", wait=wait) from None
            if not data:
                break
            open_leg.paused = True
            held += self._shown(stream, data)
            # events before that are the API server's: they say nothing of the engine's core
            if stream.generating:
                open_leg.sign = now()
            leg.share.hold(len(held) + stream.waiting)
            if held and self._may_begin(stream, held):
                if self.first is None:
                    self.first, self.status = now(), 200
                    self._leave_slot()
                    self._answered_well()
                    if self._lost is not None:
                        self._lost.began()
                    if not output.begun:
                        await output.begin(self.stream_headers(leg.headers, _PASSED_HEADERS))
                self._events += 1
                await output.write(held)
                held = b""
            open_leg.paused = False
        if not stream.ended or stream.rest or self.first is None:
            raise EngineError(f"{url} ended its stream before it was complete")
        await output.finish()

    def _may_begin(self, stream: WholeEvents, held: bytes) -> bool:
        """Return whether an engine is bound to what it has sent. Raises EngineError: it has begun
        with an error, as vLLM does where a stream of speech fails.
        """
        if self._incoming.entry.form and self.first is None:
            return has_real_data(held)
        return stream.generating or stream.ended

    def _shown(self, stream: WholeEvents, data: bytes) -> bytes:
        """Return the events that are whole now, as clients see them. The last ones may be an
        error.
        """
        events = passed_events_without_inside(stream.feed(data))
        if stream.ended or self._incoming.entry.form:  # there, the end mark follows the error
            return error_events_without_inside(events, self._engines())
        return events

    def _engines(self) -> Sequence[str]:
        """Return the URLs that no client may see."""
        return [*self._service.resources.engines.known]

    async def answer_error(self, error: PdproxyError) -> None:
        """Answer an error in the route's dialect: with its status, or as the last event of a stream
        that was begun.
        """
        if isinstance(error, ClientLeftError):
            return
        dialect = self._incoming.entry.dialect
        try:
            if self.writer.begun:
                event = failure_event(dialect, error, self.sequence, self._engines())
                await self.writer.write(event)
                await self.writer.finish()
                return
            self.status = error.status
            await self.writer.whole(
                error.status,
                self.error_headers(error),
                failure_body(dialect, error, self._engines()),
            )
        except ClientLeftError:
            return  # nobody reads the answer

    @property
    def sequence(self) -> int:
        """The number of the next event of its stream."""
        return 0 if self._stream is None else self._stream.sequence

    def times(self) -> LegTimes:
        """Return which engine was asked last, its times, and how many were asked."""
        first_s = decode_s = whole_s = None
        if self.first is not None:
            first_s, decode_s = self.first - self._asked, self._service.resources.now() - self.first
        elif self._whole is not None:
            whole_s = self._whole - self._asked
        return LegTimes(
            decode=self._url,
            first_s=first_s,
            decode_s=decode_s,
            whole_s=whole_s,
            attempts=self._attempts,
        )

    def legs_so_far(self) -> Sequence[LegTimes]:
        """Return those of the engine that was asked last."""
        return [self.times()] if self._url is not None else []

    def add_up(self) -> None:
        """Add the engine that was asked last, and what it has used."""
        if self._url is not None:
            self.totals.add_legs(0, self.times())
            self.measure(self.totals.meter, self.demand)

    def measure(self, meter: Meter, demand: RequestDemand, why_alone: str | None = None) -> None:
        """Add what was used to a meter that has nothing yet, and count how the prompt was served,
        if its answer was generated. `why_alone`: None if that is not known.

        A route that runs no model uses nothing, nor does what an engine has refused as wrong.
        """
        usage, stream = self._usage, self._stream
        if self._url is None or not self._incoming.entry.computes or 400 <= self.status < 500:
            return
        if usage is not None:
            meter.report(usage.prompt_tokens, usage.completion_tokens or 0)
        elif stream is None:
            meter.see(demand.prompt, 0, 0 if self.stream or self._whole else demand.answers)
        else:
            found = stream.usage
            prompt = demand.prompt if found is None else found.prompt_tokens or demand.prompt
            (meter.report if stream.reported else meter.see)(prompt, stream.tokens)
        entry = self._incoming.entry
        # an invocation may also be for a pooling model
        if entry.form or (entry.kind is RouteKind.SPLIT and meter.completion):
            why = why_alone or Alone.UNUSUAL.value
            times = LegTimes(decode=self._url, why_alone=why, beside_idle=self._beside_idle)
            self._service.resources.shares.add(meter.prompt, times)
