"""The generating routes: one exchange per prompt, and one answer.

Owns the answer to the client. The request's steps are those of `lifecycle`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from pdproxy.kit.errors import (
    ClientLeftError,
    EngineError,
    EngineRefusedError,
    Fault,
    ForbiddenError,
    ModelNotFoundError,
    PdproxyError,
    RefusalReason,
)
from pdproxy.kit.frames import drop_traceback
from pdproxy.kit.ids import usable
from pdproxy.observe.events import LegTimes, ServedAlone
from pdproxy.scheduling.admission import Admission, Quotas
from pdproxy.scheduling.losses import LostUnder
from pdproxy.serving.access.keys import Keys
from pdproxy.serving.access.models import Routes
from pdproxy.serving.access.permits import check_model, check_pool, shown_to
from pdproxy.serving.access.routes import ENTRIES
from pdproxy.serving.dispatch.exchange import Exchange
from pdproxy.serving.dispatch.failure_class import is_clients_fault
from pdproxy.serving.dispatch.hints import NO_HINTS
from pdproxy.serving.dispatch.resources import ExchangeResources, LegHeaders
from pdproxy.serving.request.body_reader import BodyReader
from pdproxy.serving.request.demand import (
    demand_of,
    is_priority_known,
    prioritized,
    prioritized_in_body,
)
from pdproxy.serving.request.hints import DECISION, read_hints, session_in, session_of, timeout_of
from pdproxy.serving.request.incoming import Incoming, IncomingPassthrough
from pdproxy.serving.request.lifecycle import (
    STREAM_HEADERS,
    STREAM_TYPE,
    Lifecycle,
    LiveRequest,
    Serve,
)
from pdproxy.serving.request.merged_answer import merge_usage_events
from pdproxy.serving.request.meter import Meter
from pdproxy.serving.request.passthrough import Passthrough, PassthroughRequest
from pdproxy.serving.request.prompt_list import PromptList
from pdproxy.serving.request.rights import bound_request
from pdproxy.serving.request.server_timing import SERVER_TIMING, server_timing
from pdproxy.serving.stream.comments import Comments, write_comment
from pdproxy.serving.stream.failures import as_event
from pdproxy.serving.stream.relay import Relay
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.serving.stream.waiting_writer import WaitingWriter
from pdproxy.settings.keys import KeyRights
from pdproxy.upstream.client import Answer
from pdproxy.upstream.connection import Headers
from pdproxy.wire import sse
from pdproxy.wire.api_errors import failure_body, failure_event
from pdproxy.wire.cache_salt import FIELD, check, session_within
from pdproxy.wire.client_routes import ADAPTER_HEADER, with_adapter
from pdproxy.wire.continuable import shows_ids
from pdproxy.wire.fields import body_request_id
from pdproxy.wire.inside import error_without_inside
from pdproxy.wire.lenient_json import check_content_type
from pdproxy.wire.request import Parsed
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Alone

_PASSED_HEADERS = (b"content-type", b"retry-after", b"endpoint-load-metrics")
"""The last one is the load of the engine that answered; vLLM sends it with whole answers to clients
that name a format.
"""

_NO_SALT = (
    "This route is closed: tenants have caches of their own here (tenants.caches), and engines can "
    "not keep them apart on this route."
)
_BATCH, _INVOCATIONS = Route.BATCH, Route.INVOCATIONS


class Service:
    """Serves the generating routes. `passthrough`: for batches and invocations that one engine must
    get whole.
    """

    def __init__(
        self,
        resources: ExchangeResources,
        admission: Admission,
        keys: Keys,
        bodies: BodyReader,
        passthrough: Passthrough,
        quotas: Quotas,
    ) -> None:
        self.pool = ""
        """The name of its pool."""
        self.session_header: str | None = None
        """The header that names a conversation, None where nothing needs it."""
        self.routes: Routes[Service] | None = None
        """The services of all pools, None where there is nothing to choose: one pool without
        aliases.
        """
        self.resources = resources
        self.passthrough = passthrough
        self.keys = keys
        self.quotas = quotas
        self.bodies = bodies
        self.lifecycle = Lifecycle(resources, admission, quotas, keys)

    def generate(self, incoming: Incoming, output: ResponseWriter) -> Awaitable[None]:
        """Answer a request through `output`. Raises as `Lifecycle.run`."""
        return self.lifecycle.run(GeneratingRequest(self, incoming, output))


class GeneratingRequest(LiveRequest[ResponseWriter]):
    """A request of a generating route."""

    __slots__ = ("_dialect", "_exchange", "_incoming", "_metered", "_passed", "_service", "_whole")

    def __init__(self, service: Service, incoming: Incoming, output: ResponseWriter) -> None:
        super().__init__(incoming.route.path, incoming.request_id, output, service.resources.now())
        self.address, self.key = incoming.client, incoming.key
        self._service = service
        self._incoming = incoming
        self._dialect = incoming.route.form.dialect
        self._exchange: Exchange | None = None
        """The only exchange, if the request is not a list."""
        self._metered = False
        """Whether the meter has what was used: by one engine that has got a batch or an invocation
        whole.
        """
        self._passed: PassthroughRequest | None = None
        """The request as one engine gets it whole, once it does."""
        self._whole: Parsed | None = None
        """A batch or an invocation, while one engine may still get it whole."""

    async def read(self) -> Serve:
        """Check and read the request.

        Once it is served, only the exchanges hold the body: they drop it once no engine needs it
        any more.
        """
        incoming, service = self._incoming, self._service
        rights = service.keys.admit(incoming)
        body = incoming.body
        is_invocation = incoming.route is _INVOCATIONS
        # The body of an invocation is not read before its type is checked.
        check_content_type(incoming.content_type, b"" if is_invocation else body)
        parsed = await service.bodies.request(incoming.route, body, self.writer.client)
        self.model, self.stream = parsed.model, parsed.stream
        if (salt := incoming.salt) is not None:
            if not incoming.route.form.has_salt:
                raise ForbiddenError(_NO_SALT)
            salt.put_into(parsed.fields)
        elif FIELD in parsed.fields:
            check(parsed.fields)
        if is_invocation and (named := with_adapter(parsed.fields, incoming.adapter)) is not None:
            self.model = named
            parsed = msgspec.structs.replace(parsed, model=named)
        if service.routes is not None:
            parsed, service = self._routed(parsed, service.routes, rights)
        if rights is not None:
            check_pool(rights, service.pool)
            check_model(
                rights, parsed.model if not is_invocation or incoming.adapter is not None else None
            )
            bound_request(rights, parsed)
        if incoming.request_id is None:
            self.request_id = usable(body_request_id(parsed.fields)) or self.request_id
        allowed = service.keys.priorities(self.key)
        if parsed.route.form.has_priority_header:
            self.demand, incoming.forward = prioritized(
                demand_of(parsed),
                incoming.forward,
                allowed,
                is_known=allowed is None or is_priority_known(parsed),
            )
        else:
            self.demand = prioritized_in_body(demand_of(parsed), parsed, allowed)
        hints = NO_HINTS
        if incoming.hints:
            hints = read_hints(incoming.hints, service.session_header)
            if salt is not None and hints.wants_decision:
                # it shows what others have engines do
                hints = msgspec.structs.replace(hints, wants_decision=False)
            self.timeout = timeout_of(incoming.hints)
        authorization = service.keys.to_engine(incoming.authorization)
        request_id = self.request_id.encode()
        route, forward = parsed.route, incoming.forward
        is_batch = route is _BATCH
        if is_batch:  # vLLM reports no load with the answer to a batch
            route, forward = (
                Route.CHAT,
                tuple(line for line in forward if line[0] != b"endpoint-load-metrics-format"),
            )
        leg_headers = LegHeaders(
            self.request_id,
            route.path,
            ((b"x-request-id", request_id), *authorization, *forward),
            authorization,
            hints,
            salt,
            self.writer.client.name,
        )
        if incoming.route.form.has_own_words:
            self._whole = parsed
            if parsed.goes_whole:
                return partial(self._serve_whole, leg_headers.lost)
        if is_batch or (parsed.is_list and len(parsed.prompts) > 1 and parsed.alone is None):
            return partial(self._serve_list, parsed, leg_headers)
        whole = parsed.alone is not None and not parsed.needs_loading
        prompt = None if whole else parsed.prompts[0]
        # only its engine knows surely how many choices an unusual request has
        choices = 1 if parsed.alone in (None, Alone.UNUSUAL) else self.demand.answers
        if (
            parsed.stream
            and "tools" in parsed.fields
            and route is Route.CHAT
            and parsed.alone is None
        ):
            parsed = service.resources.with_ids_of_calls(parsed)
        resources, form = service.resources, route.form
        new_relay = partial(
            Relay,
            wants_usage=not parsed.adds_usage,
            choices=choices,
            takes_ids=parsed.adds_ids,
            shows_ids=shows_ids(parsed),
            budget=resources.answer_budget,
            templates=resources.named_templates if form.is_named else resources.templates,
            named=form.dialect if form.is_named else None,
            now=resources.now,
            comment=partial(_engine_comment, self.writer, self.request_id)
            if parsed.stream
            else None,
        )
        self._exchange = Exchange(service.resources, parsed, prompt, leg_headers, new_relay)
        return self._serve_one

    def _routed(
        self, parsed: Parsed, routes: Routes[Service], rights: KeyRights | None
    ) -> tuple[Parsed, Service]:
        """Choose the pool, and name the model as its engines do. `rights`: of the request's key,
        None: all.
        """
        pools = None if rights is None else rights.pools
        incoming = self._incoming
        session = session_within(incoming.salt, session_in(incoming.hints, parsed.fields))
        try:
            service, model = routes.of(parsed.model, session, pools)
        except ModelNotFoundError as error:
            if incoming.route is not _INVOCATIONS or incoming.adapter is not None:
                raise shown_to(rights, error) from None
            # vLLM does not read the `model` of an invocation's body
            service, model = routes.of(None, session, pools)
        self._service = service
        if model != parsed.model and model is not None:
            fields = {**parsed.fields, "model": msgspec.Raw(msgspec.json.encode(model))}
            parsed = msgspec.structs.replace(parsed, fields=fields, model=model)
        return parsed, service

    async def _serve_one(self) -> None:
        exchange, output = self._exchange, self.writer
        assert exchange is not None
        self._incoming.body = b""

        def begin(relay: Relay) -> ResponseWriter:
            output.drop_body()
            self._begin(relay.headers)
            return output

        comments = self._comments(lambda: exchange.events)
        try:
            answer = await exchange.run(begin)
        finally:
            comments.stop()
        if answer is None:
            output.finish()
        elif self._whole is not None and is_clients_fault(answer):
            await self._serve_whole(exchange.headers.lost)
        else:
            self._answer(answer)

    async def _serve_list(self, parsed: Parsed, leg_headers: LegHeaders) -> None:
        output = self.writer
        self._incoming.body = b""

        def begin(headers: Headers) -> None:
            if self.first is None:
                self._begin(headers)

        prompts = PromptList(
            self._service.resources, parsed, leg_headers, output, begin, self.totals
        )
        comments = self._comments(lambda: prompts.events)
        try:
            await prompts.run()
        except EngineRefusedError as error:
            if self._whole is None or self.first is not None or error.fault is not Fault.CLIENT:
                raise
            drop_traceback(error)  # its frames refer to the tasks of the list, which refer to it
            refused = True
        else:
            refused = False
        finally:
            comments.stop()
        if refused:
            del prompts  # with the answers to the other conversations
            await self._serve_whole(leg_headers.lost)
            return
        if output.gone:
            return
        if self.first is None:
            self._answer(prompts.answer.whole())
        elif prompts.answer:
            raise EngineError("an engine answered one prompt of a streamed list whole")
        else:
            self._end_merged(parsed, prompts)

    async def _serve_whole(self, losses: list[LostUnder]) -> None:
        """Have one engine serve the whole request on the client's route. `losses`: the engines that
        were lost under it before.

        Also after engines refused a part of it on another route: only this one has the client's
        route's words for that.
        """
        incoming, parsed, self._whole = self._incoming, self._whole, None
        assert parsed is not None
        incoming.body = b""
        body = incoming.route.form.whole(parsed.fields, parsed.model)
        # After a refusal, its prompts were counted before.
        why_alone = parsed.alone.value if parsed.goes_whole and parsed.alone is not None else None
        if why_alone is not None:
            self._service.resources.observers.notify(ServedAlone(why_alone))
        forward, adapter = incoming.forward, incoming.adapter
        if adapter is not None:
            if parsed.model is not None and parsed.model != self.model:
                adapter = parsed.model.encode()
            forward = (*forward, (ADAPTER_HEADER, adapter))
        entry = ENTRIES[incoming.route.path]
        session = session_of(self._service.session_header, dict(reversed(incoming.hints)))
        passed = IncomingPassthrough(
            entry,
            self.request_id,
            incoming.authorization,
            "",
            forward,
            b"",
            incoming.head,
            session=session,
            salt=incoming.salt,
        )
        request = self._passed = PassthroughRequest(
            self._service.passthrough, passed, WaitingWriter(self.writer), losses
        )
        request.stream = body.stream
        del parsed
        try:
            await request.serve(body)
        finally:
            self.first, self.status = request.first, request.status
            self._metered = True
            meter = Meter()
            request.measure(meter, self.demand, why_alone)
            if meter.asked:
                # each token counts once, also if it was computed before the refusal
                self.totals.meter = meter
            else:
                if self._exchange is not None:
                    self.totals.meter.refuse(self._exchange)
                self.totals.meter.end_wrong()
            times = msgspec.structs.replace(request.times(), why_alone=why_alone)
            self.totals.add_legs(len(self.totals.legs), times)

    def _end_merged(self, parsed: Parsed, prompts: PromptList) -> None:
        events = [prompts.usage_events[index] for index in sorted(prompts.usage_events)]
        created = prompts.creation_time.created
        if (parsed.wants_usage or prompts.forced_usage) and events:
            event = merge_usage_events(events)
            self.writer.write(event if created is None else sse.with_created(event, created))
        self.writer.write(sse.DONE + sse.END)
        self.writer.finish()

    def _comments(self, sent: Callable[[], int]) -> Comments:
        """Return the comments of the answer, if it is a stream; stop them. `sent` changes with each
        event.
        """
        resources, wanted = self._service.resources, self.stream
        return Comments(
            resources.clock,
            resources.deadlines.stream_comment if wanted else 0.0,
            sent,
            self._comment,
        )

    def _comment(self, comment: bytes) -> None:
        """Send a comment. The first one sends the status: what fails from then on is an event of
        the stream.
        """
        self.status = 200
        lines = self.stream_headers([STREAM_TYPE], _PASSED_HEADERS)
        write_comment(self.writer, [*lines, *self._asked_for()], comment)

    def _begin(self, headers: Headers) -> None:
        self._whole = None
        self.first = self._service.resources.now()
        self.status = 200
        lines = self.stream_headers(headers, _PASSED_HEADERS)
        self.writer.begin([*lines, *self._asked_for()] if self._incoming.hints else lines)

    def _answer(self, answer: Answer) -> None:
        """Send a whole answer. Behind a comment it is an event: an engine's error, since a stream
        was asked for.

        Raises:
            EngineError: the answer of an engine, in a stream that has begun.
        """
        if self.writer.begun:
            raise as_event(answer)
        self.status = answer.status
        lines, body = self.answer_headers(answer.headers, _PASSED_HEADERS), answer.body
        if answer.status != 200:
            body = error_without_inside(
                body, answer.status, [*self._service.resources.engines.known]
            )
        self.writer.whole(
            answer.status, [*lines, *self._asked_for()] if self._incoming.hints else lines, body
        )

    def _asked_for(self) -> Headers:
        """Return the headers that the client has asked for: which engines were chosen, and where
        the time went so far. A list has none.
        """
        exchange = self._exchange
        if exchange is None:
            return []
        found = []
        if (shown := exchange.decision) is not None:
            found.append((DECISION, shown.encode("latin-1", "replace")))
        if exchange.headers.hints.wants_timing:
            total = self._service.resources.now() - self.received
            queued = total if self.admitted is None else self.admitted - self.received
            found.append((SERVER_TIMING, server_timing(queued, exchange.times(), total)))
        return found

    async def answer_error(self, error: PdproxyError) -> None:
        """Answer an error: with its status, or as the last event of a stream that was begun. Never
        waits.
        """
        if isinstance(error, ClientLeftError):
            self.writer.break_off()
            return
        dialect, engines = self._dialect, [*self._service.resources.engines.known]
        if self.writer.begun:
            self.status = 200
            self.writer.write(failure_event(dialect, error, self._next_number(), engines))
            if error.reason is RefusalReason.DRAINING:
                # the connection ends as well: its client must not send the next request there
                self.writer.break_off()
            else:
                self.writer.finish()
            return
        self.status = error.status
        lines = [*self.error_headers(error), *self._asked_for()]
        self.writer.whole(error.status, lines, failure_body(dialect, error, engines))

    def _next_number(self) -> int:
        """Return the number of the next event of the stream, where its events have numbers."""
        if self._passed is not None:
            return self._passed.sequence
        relay = None if self._exchange is None else self._exchange.relay
        return 0 if relay is None else relay.opened + relay.fast_path.events

    def legs_so_far(self) -> Sequence[LegTimes]:
        """Return those of the only exchange, or of a list's that have ended."""
        return self.totals.legs or (
            [self._exchange.times()] if self._exchange and self.admitted is not None else []
        )

    def add_up(self) -> None:
        """Add the only exchange. Those of a list are added as they end."""
        exchange = self._exchange
        if exchange is not None:
            streams = self.totals.add(0, exchange)
            if self._metered:
                return
            if 400 <= self.status < 500:
                self.totals.meter.refuse(exchange)
            else:
                demand = self.demand
                self.totals.meter.add(
                    exchange,
                    streams,
                    demand.prompt,
                    0 if self.stream else demand.answers,
                    demand.answers,
                )


def _engine_comment(writer: ResponseWriter, request_id: str, comment: bytes) -> None:
    """Pass an engine's comment on, which has come before its data. It refers to nothing that refers
    to the engine's answer.
    """
    write_comment(writer, [*STREAM_HEADERS, (b"x-request-id", request_id.encode())], comment)
