"""A WebSocket on `/v1/realtime`: its messages go between the client and one engine, in each
direction one at a time.

Owns the order of its beginning. An engine learns the model from the client's first event, and
pdproxy chooses the engine by it. So pdproxy itself sends the first event, which is an engine's in
vLLM, reads the client's `session.update`, and opens a WebSocket to an engine then. From then on
messages go on as they came, but for a `session.update`, whose model is looked at again. The steps
of the request are those of `lifecycle`; it has its place until its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from pdproxy.kit.errors import (
    BodyTimeoutError,
    ClientLeftError,
    EngineError,
    EngineTimeoutError,
    Fault,
    ModelNotFoundError,
    OverloadedError,
    PdproxyError,
    RefusalReason,
    Wait,
)
from pdproxy.observe.events import DeadlinePassed, LegTimes
from pdproxy.scheduling.admission import RequestDemand
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.policy import Ask
from pdproxy.serving.access.permits import check_model, check_pool, shown_to
from pdproxy.serving.dispatch.failure_class import verdict_of
from pdproxy.serving.dispatch.resources import LegHeaders
from pdproxy.serving.request.incoming import IncomingPassthrough
from pdproxy.serving.request.lifecycle import LiveRequest, Serve
from pdproxy.serving.request.open_leg import OpenWebSocketLeg
from pdproxy.serving.request.passthrough import Passthrough
from pdproxy.serving.stream.client_websocket import ClientWebSocket
from pdproxy.settings.keys import KeyRights
from pdproxy.upstream.passthrough import EngineWebSocket
from pdproxy.wire.cache_salt import session_within
from pdproxy.wire.errors import error_body
from pdproxy.wire.inside import error_without_inside, passed_without_inside
from pdproxy.wire.realtime import (
    COMMIT,
    CREATED,
    DELTA,
    DONE,
    ERROR,
    UPDATE,
    InvalidEventError,
    close_code,
    failure_event,
    model_in,
    not_validated,
    read_event,
    read_sent,
    session_created,
    with_model,
)


def serve_websocket(
    service: Passthrough, incoming: IncomingPassthrough, client: ClientWebSocket
) -> Coroutine[Any, Any, None]:
    """Serve a WebSocket to its end. `service`: the first pool's. Raises as `Lifecycle.run`."""
    return service.lifecycle.run(RealtimeRequest(service, incoming, client))


class RealtimeRequest(LiveRequest[ClientWebSocket]):
    """One WebSocket."""

    __slots__ = (
        "_attempts",
        "_deltas",
        "_has_begun",
        "_incoming",
        "_known",
        "_moved",
        "_opened",
        "_service",
        "_update",
        "_url",
    )

    def __init__(
        self, service: Passthrough, incoming: IncomingPassthrough, client: ClientWebSocket
    ) -> None:
        now = service.resources.now()
        super().__init__(incoming.entry.path, incoming.request_id, client, now)
        self.method, self.address, self.key = "GET", incoming.client, incoming.key
        self._service = service
        self._incoming = incoming
        self._update: bytes | None = None
        """The client's first `session.update`, as the engine gets it."""
        self._known: str | None = None
        """The engines' name of its model."""
        self._url: str | None = None
        """The URL of the engine that was asked last."""
        self._opened = False
        """Whether that engine has taken the WebSocket."""
        self._attempts = 0
        self._moved = now
        """When a message has gone on last, in either direction."""
        self._has_begun = False
        """Whether the engine has begun with a text, and not ended it."""
        self._deltas = 0
        """Pieces of text behind the last usage that the engine has reported: a token each."""

    @property
    def sent(self) -> bool:
        """Whether the engine has made anything. Asked once `totals` are complete."""
        return self.totals.meter.asked

    # -- before an engine is asked

    async def read(self) -> Serve:
        """Take the WebSocket, and read which model it is for."""
        rights, client = self._rights(), self.writer
        if not client.begun:
            client.accept([(b"x-request-id", self.request_id.encode())])
            self.status = 101
            await client.send_message(session_created(self.request_id, int(time.time())))
        if self._update is None:
            self._update = await self._first_update()
        elif self.model is not None:
            self._name(self.model, rights)
        self.demand = RequestDemand(answers=1)
        return self.serve

    @property
    def _session(self) -> str | None:
        return session_within(self._incoming.salt, self._incoming.session)

    def _rights(self) -> KeyRights | None:
        return self._service.keys.admit(self._incoming)

    async def _first_update(self) -> bytes:
        resources, client = self._service.resources, self.writer
        seconds = resources.deadlines.client_body
        try:
            with resources.clock.within(seconds):
                while (message := await client.next_message()) is not None:
                    try:
                        if read_event(message)[0] == UPDATE:
                            return self._checked(message)
                        await client.send_message(not_validated())
                    except InvalidEventError as error:
                        await client.send_message(error.answer)
        except TimeoutError:
            resources.observers.notify(DeadlinePassed(Wait.CLIENT_BODY.value))
            text = f"No session.update with a model came in {seconds:g} s"
            raise BodyTimeoutError(text) from None
        raise ClientLeftError("the client closed the WebSocket before it named a model")

    def _checked(self, update: bytes) -> bytes:
        """Return a `session.update` as the engine gets it.

        Raises:
            InvalidEventError: it names no model, or one that this WebSocket can't have.
            ForbiddenError: its key is not good for the model.
        """
        model = model_in(update)
        try:
            known = self._name(model, self._rights())
        except ModelNotFoundError as error:
            raise InvalidEventError(error.message, "model_not_found") from None
        return update if known == model else with_model(update, known)

    def _name(self, model: str, rights: KeyRights | None) -> str:
        """Choose the pool at the first model; return the engines' name of a model. Raises what
        `Routes.of` raises, and ForbiddenError.
        """
        service, known = self._service, model
        if model == self.model and self._known is not None:
            known = self._known
        elif service.routes is not None:
            pools = None if rights is None else rights.pools
            try:
                service, found = service.routes.of(model, self._session, pools)
            except ModelNotFoundError as error:
                raise shown_to(rights, error) from None
            known = found or model
        if rights is not None:
            check_pool(rights, service.pool)
            check_model(rights, known)
        if self._known is None:
            self.model, self._known, self._service = model, known, service
        elif service is not self._service:
            raise ModelNotFoundError(model, [])  # its engine is in another pool
        return known

    # -- with an engine

    async def serve(self) -> None:
        """Ask engines one after the other, until one takes the WebSocket; stay with it until an end
        closes it. Raises EngineError.
        """
        service, incoming = self._service, self._incoming
        resources, authorization = service.resources, service.keys.to_engine(incoming.authorization)
        headers = (
            (b"x-request-id", self.request_id.encode()),
            *authorization,
            *incoming.forward,
        )
        leg_headers = LegHeaders(self.request_id, incoming.entry.path, headers, authorization)
        without: set[str] = set()
        until = resources.now() + resources.deadlines.queue
        while True:
            ask = Ask(self._known, 0, resources.now(), session=self._session)
            lease = await resources.scheduler.choose_one(ask, tuple(without))
            if lease is None:
                if not await resources.engines_change(self._known, until):
                    raise OverloadedError(
                        "no engine can serve this request: see /ready", RefusalReason.NO_ENGINE
                    )
                continue
            verdict = Verdict.NEUTRAL
            try:
                self._url = lease.engine.url
                self._attempts += 1
                await self._with_engine(lease, leg_headers)
                verdict = Verdict.GOOD
                return
            except EngineError as error:
                verdict = verdict_of(error, streamed=self._opened)
                again = (
                    not self._opened
                    and self._attempts < resources.limits.attempts
                    and error.fault is Fault.ENGINE
                )
                if (wait := getattr(error, "wait", None)) is not None:
                    resources.observers.notify(DeadlinePassed(wait.value, self._url))
                if error.fault is not Fault.CLIENT:
                    resources.report_failure(
                        leg_headers, lease.engine.url, "alone", error, will_retry=again
                    )
                if not again:
                    raise
                without.add(lease.engine.url)
            finally:
                resources.close(lease, verdict)
            slot = await resources.retry_slot(leg_headers)
            if slot is None:
                raise resources.not_retried()
            slot.leave()  # a handshake is no work for the other engines

    async def _with_engine(self, lease: Lease, headers: LegHeaders) -> None:
        service, url = self._service, lease.engine.url
        resources, seconds = service.resources, service.resources.deadlines.first_token
        open_leg = OpenWebSocketLeg(resources.engines.known[url].open_legs, resources.now())
        async with open_leg:
            try:
                with resources.clock.within(seconds):
                    engine = await service.legs.open_websocket(url, headers.path, headers.headers)
            except TimeoutError:
                raise EngineTimeoutError(
                    f"{url} did not answer in {seconds:g} s", wait=Wait.FIRST_TOKEN
                ) from None
            try:
                self._opened = True
                self.writer.keep()
                await self._relay(engine, open_leg)
            finally:
                await engine.close()

    async def _relay(self, engine: EngineWebSocket, leg: OpenWebSocketLeg) -> None:
        resources = self._service.resources
        ways = {
            asyncio.ensure_future(way)
            for way in (self._to_engine(engine, leg), self._to_client(engine, leg))
        }
        self._moved = resources.now()
        try:
            while not any(way.done() for way in ways):
                seconds = await self._may_be_silent(leg)
                try:
                    with resources.clock.within(seconds):
                        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                except TimeoutError:
                    continue  # a message may have gone meanwhile
            for way in ways:
                if way.done():
                    way.result()
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _may_be_silent(self, leg: OpenWebSocketLeg) -> float:
        """Return after how many seconds to look again whether an end is silent for too long.

        Raises:
            BodyTimeoutError: no message went in either direction.
            EngineTimeoutError: the engine owes something, and is not seen to work.
        """
        resources, url = self._service.resources, self._url or ""
        deadlines, now = resources.deadlines, resources.now()
        idle, silent = deadlines.websocket_idle, deadlines.between_tokens
        if now >= self._moved + idle:
            resources.observers.notify(DeadlinePassed(Wait.WEBSOCKET_IDLE.value))
            raise BodyTimeoutError(f"No message went in either direction for {idle:g} s")
        left = self._moved + idle - now
        if not leg.must_progress:
            return min(left, silent)
        if now >= leg.heard + silent:
            if not await resources.works(url, Wait.BETWEEN_TOKENS.value):
                raise EngineTimeoutError(f"{url} sent no data in time", wait=Wait.BETWEEN_TOKENS)
            leg.heard = resources.now()
        return min(left, leg.heard + silent - now)

    async def _to_engine(self, engine: EngineWebSocket, leg: OpenWebSocketLeg) -> None:
        resources, client = self._service.resources, self.writer
        assert self._update is not None
        await engine.send(self._update)
        while (message := await client.next_message()) is not None:
            try:
                kind, is_final = read_event(message)
                await engine.send(self._checked(message) if kind == UPDATE else message)
            except InvalidEventError as error:
                await client.send_message(error.answer)
            else:
                if kind == COMMIT and not is_final:
                    self._has_begun = True
                elif kind == COMMIT and self._has_begun:
                    leg.owes(resources.now())
            self._moved = resources.now()

    async def _to_client(self, engine: EngineWebSocket, leg: OpenWebSocketLeg) -> None:
        resources, client = self._service.resources, self.writer
        is_first = True
        while True:
            event = await engine.receive()
            kind, usage = read_sent(event)
            if is_first and kind == CREATED:
                is_first = False  # the client has one
                continue
            is_first = False
            if kind == DELTA:
                leg.wrote(resources.now())
                self._deltas += 1
                if self.use is not None:
                    self.use.spend(1)
            elif kind == DONE and usage is not None:
                meter = self.totals.meter
                meter.report(usage.prompt_tokens, usage.completion_tokens or self._deltas)
                self._deltas = 0
            if kind in (DONE, ERROR):
                self._has_begun = leg.owed = False
            if kind == ERROR:
                event = error_without_inside(event, self.status, [*resources.engines.known])
            leg.paused = True  # what the client does not read is no silence of the engine
            await client.send_message(passed_without_inside(event))
            leg.paused = False
            self._moved = leg.heard = resources.now()

    # -- the end

    async def answer_error(self, error: PdproxyError) -> None:
        """Answer the handshake with the error, or send it as the last event."""
        client = self.writer
        if not client.begun:
            self.status = error.status
            client.whole(error.status, self.error_headers(error), error_body(error))
        elif not isinstance(error, ClientLeftError):
            client.close(close_code(error), failure_event(error))

    def _times(self) -> LegTimes:
        return LegTimes(decode=self._url, attempts=self._attempts)

    def legs_so_far(self) -> Sequence[LegTimes]:
        """Return that of the engine that was asked last."""
        return [self._times()] if self._url is not None else []

    def add_up(self) -> None:
        """Add the engine that was asked last, and what it has not reported."""
        if self._url is not None:
            self.totals.add_legs(0, self._times())
        if self._deltas:
            self.totals.meter.see(0, self._deltas)
