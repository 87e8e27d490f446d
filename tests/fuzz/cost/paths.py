"""The paths on which bytes of a client or an engine are read, each with what it may cost.

A path reads an input as the proxy does, and lets the event loop turn wherever the proxy lets it.
What works in another process does not count, since its caller awaits it: a body that a reader
process reads has its answer before anything is measured. What reader processes do are paths of
their own (`READER`), with bounds of their own. Only this file knows the names of the proxy's
functions.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from uvicorn.server import ServerState

from pdproxy.kit.clock import Clock, Timer
from pdproxy.kit.errors import PdproxyError
from pdproxy.kit.ids import usable
from pdproxy.observe.events import Gaps, RequestEnded
from pdproxy.observe.formats import JsonFormatter, TextFormatter
from pdproxy.observe.logs import access_fields
from pdproxy.serving.access.clients import Clients
from pdproxy.serving.access.keys import Keys
from pdproxy.serving.access.routes import TABLE, RouteKind
from pdproxy.serving.request.merged_answer import MergedAnswer
from pdproxy.serving.stream.relay import Relay
from pdproxy.transfer.contract import NO_DISPATCH, Handle
from pdproxy.transfer.nixl import handle
from pdproxy.transfer.refusal import release_body
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.upstream.client import Answer, Pending
from pdproxy.upstream.connection import EngineConnection
from pdproxy.upstream.metrics_page import MAX_PAGE, read_metrics
from pdproxy.web.client_identifier import ClientIdentifier
from pdproxy.web.cycle import FORWARDED
from pdproxy.web.passthrough_asgi import PassthroughAsgi, PassthroughResponse
from pdproxy.wire import lmcache_telemetry, notices, reader_process
from pdproxy.wire.api_errors import Dialect, WholeEvents, failure_body
from pdproxy.wire.body_bounds import DEFAULT
from pdproxy.wire.chunks import chunk
from pdproxy.wire.engine import error_of, prefill_answer, usage_of
from pdproxy.wire.fields import body_request_id
from pdproxy.wire.form import form_in
from pdproxy.wire.passthrough_body import passed_body, read_if_quick
from pdproxy.wire.request import Parsed, parse, parse_if_quick
from pdproxy.wire.route import Route
from pdproxy.wire.speech_body import speech_body
from tests.fuzz import ingress, streams
from tests.fuzz.cost import bounds, shapes
from tests.fuzz.cost.bounds import KIB, MIB, Bound
from tests.fuzz.cost.measure import Run
from tests.fuzz.cost.recipes import Grammar, Recipe

READ = 256_000
"""Bytes that uvloop reads from a socket at once."""
BODY_LIMIT = 64 * MIB


@dataclass(frozen=True)
class Path:
    """One way in. `most`: bytes of the largest input that gets there."""

    name: str
    run: Run
    grammar: Grammar
    known: dict[str, Recipe]
    bound: Bound
    most: int = BODY_LIMIT


class Transport(ingress.Transport):
    """A socket that keeps nothing of what is written."""

    def write(self, data: Any) -> None:
        """Drop it."""


class Output(streams.Output):
    """A client that keeps nothing of what it reads."""

    def write(self, data: bytes) -> None:
        """Drop it."""

    def chunk_writer(self) -> Callable[[bytes], None]:
        return self.write


def reads(data: bytes, size: int = READ) -> Iterator[bytes]:
    """Yield an input as a socket gives it."""
    for at in range(0, len(data), size):
        yield data[at : at + size]


def _question(route: Route | None, dialect: Dialect = Dialect.OPENAI) -> bytes:
    return msgspec.msgpack.encode(reader_process.BodyQuestion(DEFAULT, route, dialect))


def _is_quick(read: Callable[[], object]) -> bool:
    """Tell whether a body is read, or refused, at once."""
    try:
        return read() is not None
    except PdproxyError:
        return True


def generating(route: Route) -> Run:
    """A body of a generating route, in the event loop's thread."""

    def then(parsed: Parsed) -> None:
        body_request_id(parsed.fields)

    return _read(route, then)


def _read(
    route: Route,
    then: Callable[[Parsed], int | None],
    refused: Callable[[PdproxyError], int | None] = lambda _: None,
) -> Run:
    question = _question(route)

    def run(data: bytes) -> Awaitable[int | None]:
        light = _is_quick(lambda: parse_if_quick(route, data))
        found = None if light else reader_process.answer(question, data)

        async def measured() -> int | None:
            try:
                parsed = parse_if_quick(route, data)
                if parsed is None:
                    assert found is not None
                    parsed = reader_process.request_in(found, data)
            except PdproxyError as error:
                return refused(error)
            return then(parsed)

        return measured()

    return run


def passed(dialect: Dialect) -> Run:
    """A body of a route that is passed on, and the refusal of one that can't be, in the event
    loop's thread.
    """
    question = _question(None, dialect)

    def run(data: bytes) -> Awaitable[None]:
        light = _is_quick(lambda: read_if_quick(dialect, data))
        found = None if light else reader_process.answer(question, data)

        async def measured() -> None:
            try:
                if read_if_quick(dialect, data) is None:
                    assert found is not None
                    passed_body(dialect, *reader_process.fields_in(found, data))
            except PdproxyError as error:
                failure_body(dialect, error)

        return measured()

    return run


async def spoken(data: bytes) -> None:
    """A form with audio, as `BodyReader.speech` reads it."""
    steps = form_in(data, b"x")
    try:
        while True:
            try:
                next(steps)
            except StopIteration as end:
                speech_body(data, end.value)
                return
            await asyncio.sleep(0)
    except PdproxyError as error:
        failure_body(Dialect.OPENAI, error)


def elsewhere(route: Route | None, dialect: Dialect = Dialect.OPENAI) -> Run:
    """A body in a reader process. Small ones get there, too, as far as their objects are many."""
    question = _question(route, dialect)

    async def run(data: bytes) -> None:
        reader_process.answer(question, data)

    return run


def logged() -> Run:
    """The access line of a request with this body, in both formats."""

    def line(model: str | None, said: str | None, request_id: str | None) -> int:
        ended = RequestEnded(
            request_id=request_id or "id", endpoint="/v1/completions", model=model, outcome="ok",
            status=200, legs=[],
            queue_s=0.0, first_s=None, total_s=0.0, prompt_tokens=None, completion_tokens=None,
            gaps=Gaps(), error=said,
        )  # fmt: skip
        lines = [
            one().line(time.time(), "INFO", "access", "request", access_fields(ended))
            for one in (TextFormatter, JsonFormatter)
        ]
        return max(map(len, lines))

    return _read(
        Route.COMPLETIONS,
        lambda parsed: line(parsed.model, None, usable(body_request_id(parsed.fields))),
        lambda error: line(None, error.logged, None),
    )


class _StoppedClock(Clock):
    """Calls nothing: each run has an event loop of its own, and the entry with its clock outlives
    it.
    """

    def after(self, seconds: float, then: Callable[[], None]) -> Timer:
        return Timer(self._slots, 0, then)


class _Entry(ingress.Ingress):
    """The real way in: the generating routes' and, for all others, that of passed ones."""

    def __init__(self) -> None:
        super().__init__(BODY_LIMIT, _StoppedClock())
        passed_on = next(entry for entry in TABLE if entry.kind is RouteKind.PASSED)
        clients = Clients()
        passthrough = PassthroughAsgi(
            self._serve,
            ClientIdentifier(clients, Keys()),
            clients,
            self.path.body_budget,
            FORWARDED,
            max_body=BODY_LIMIT,
        )
        self._answer = lambda: PassthroughResponse(passthrough, passed_on)

    async def _serve(self, request: Any, sink: Any) -> None:
        await sink.whole(200, [], b"")

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        await self._answer()(scope, receive, send)

    async def _generate(self, incoming: Any, output: Any) -> None:
        output.whole(200, [], b"")


@functools.cache
def _entry() -> _Entry:
    """Return the one entry: what it takes to build one is no input's."""
    return _Entry()


async def connected(data: bytes) -> None:
    """What a client sends on one connection, read by read."""
    entry, state, transport = _entry(), ServerState(), Transport()
    protocol = entry.config.http_protocol_class(  # type: ignore[call-arg]
        config=entry.config, server_state=state, app_state={}, _loop=asyncio.get_running_loop()
    )
    protocol.connection_made(transport)
    for part in reads(data):
        for _ in range(1000):
            await asyncio.sleep(0)
            if not transport.reading_paused:
                break
        if transport.closing or transport.eof or transport.reading_paused:
            break
        protocol.data_received(part)
    for _ in range(1000):
        if not state.tasks:
            break
        await asyncio.sleep(0)
    protocol.connection_lost(None)
    while state.tasks:
        await asyncio.sleep(0)


def streamed(*, framed: bool, takes_ids: bool) -> Run:
    """A decode engine's stream on its connection, through the relay; `framed`: the input has its
    head and its chunks.
    """
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )

    async def run(data: bytes) -> None:
        connection, relay = (
            EngineConnection("engine", lambda _: None, lambda _: None),
            Relay(wants_usage=False, takes_ids=takes_ids),
        )
        connection.connection_made(Transport())
        leg = connection.send(b"", relay)
        started = False
        if not framed:
            connection.data_received(head)
        for part in reads(data):
            connection.data_received(part if framed else chunk(part))
            if not started and relay.first.done() and relay.first.exception() is None:
                started = True
                if relay.status == 200 and not isinstance(relay.first.result(), Answer):
                    relay.flow(Output(), leg)  # type: ignore[arg-type]
            await asyncio.sleep(0)
        connection.connection_lost(None)
        if relay.first.done():
            relay.first.exception()
        if relay.done.done():
            relay.done.exception()

    return run


async def passed_stream(data: bytes) -> None:
    """A stream of an engine that serves alone, in whole events."""
    events = WholeEvents(Dialect.RESPONSES)
    try:
        for part in reads(data, 65_536):
            events.feed(part)
            await asyncio.sleep(0)
    except PdproxyError:
        pass


async def awaited(data: bytes) -> None:
    """An engine's answer of which the whole is awaited, as it is on the wire."""
    connection, pending = (
        EngineConnection("engine", lambda _: None, lambda _: None),
        Pending(AnswerBudget().share()),
    )
    connection.connection_made(Transport())
    connection.send(b"", pending)
    for part in reads(data):
        connection.data_received(part)
        await asyncio.sleep(0)
    connection.connection_lost(None)


async def prefilled(data: bytes) -> None:
    """A prefill engine's answer."""
    answer = prefill_answer(data)
    if answer is not None:
        found = handle(parse(Route.COMPLETIONS, b'{"prompt":"x"}'), answer, NO_DISPATCH)
        if isinstance(found, Handle):
            release_body("x", found)


async def answered(data: bytes) -> None:
    """A decode engine's whole answer, through the relay, and an engine's error."""
    connection, relay = (
        EngineConnection("engine", lambda _: None, lambda _: None),
        Relay(wants_usage=True),
    )
    relay.filter.cached_tokens = relay.filter.created_cache_tokens = 1
    connection.connection_made(Transport())
    connection.send(b"", relay)
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data))
    for part in reads(data):
        connection.data_received(part)
        await asyncio.sleep(0)
    connection.connection_lost(None)
    usage_of(data)
    await asyncio.sleep(0)
    error_of(data)


async def merged(data: bytes) -> None:
    """The answers to a list of two prompts, made one."""
    answer = MergedAnswer(AnswerBudget().share())
    with suppress(PdproxyError):
        for index in range(2):
            answer.add(index, Answer(200, [], data))
            await asyncio.sleep(0)
        answer.whole()


async def scraped(data: bytes) -> None:
    """An engine's metrics."""
    with suppress(PdproxyError):
        read_metrics(data)


async def noticed(data: bytes) -> None:
    """A notice. JSON is the handle, or the token ids, of one of ours. In one turn as many bytes are
    read as one may have.
    """
    said = {"type": "PdproxyKV", "v": notices.VERSION, "event": "ready", "req_id": "x"}
    if data[:1] in (b"{", b"["):
        data = msgspec.msgpack.encode(said | {"params" if data[:1] == b"{" else "prompt_ids": data})
    notices.decode(data)


async def posted(data: bytes) -> None:
    """A post of telemetry."""
    lmcache_telemetry.notices(data)


PATHS = [
    Path("body of completions", generating(Route.COMPLETIONS), shapes.BODY, shapes.BODIES,
    bounds.BODY),
    Path("body of chats", generating(Route.CHAT), shapes.BODY, shapes.BODIES, bounds.BODY),
    Path("body of responses", generating(Route.RESPONSES), shapes.BODY, shapes.BODIES,
    bounds.BODY),
    Path("body of messages", generating(Route.MESSAGES), shapes.BODY, shapes.BODIES, bounds.BODY),
    Path("body of batches", generating(Route.BATCH), shapes.BODY, shapes.BODIES, bounds.BODY),
    Path("body of invocations", generating(Route.INVOCATIONS), shapes.BODY, shapes.BODIES,
    bounds.BODY),
    Path("passed body", passed(Dialect.OPENAI), shapes.BODY, shapes.BODIES, bounds.PASSED),
    Path("passed body of responses", passed(Dialect.RESPONSES), shapes.BODY, shapes.BODIES,
    bounds.PASSED),
    Path("passed body of messages", passed(Dialect.MESSAGES), shapes.BODY, shapes.BODIES,
    bounds.PASSED),
    Path("form", spoken, shapes.FORM, shapes.FORMS, bounds.FORM),
    Path("completions, reader process", elsewhere(Route.COMPLETIONS), shapes.BODY, shapes.BODIES,
    bounds.READER),
    Path("chats, reader process", elsewhere(Route.CHAT), shapes.BODY, shapes.BODIES, bounds.READER),
    Path("responses, reader process", elsewhere(Route.RESPONSES), shapes.BODY, shapes.BODIES,
    bounds.READER),
    Path("messages, reader process", elsewhere(Route.MESSAGES), shapes.BODY, shapes.BODIES,
    bounds.READER),
    Path("batches, reader process", elsewhere(Route.BATCH), shapes.BODY, shapes.BODIES,
    bounds.READER),
    Path("passed, reader process", elsewhere(None), shapes.BODY, shapes.BODIES, bounds.READER),
    Path("access line", logged(), shapes.BODY, shapes.NAMES, bounds.LOG),
    Path("connection", connected, shapes.REQUEST, shapes.REQUESTS, bounds.INGRESS),
    Path("stream", streamed(framed=False, takes_ids=False), shapes.STREAM, shapes.STREAMS,
    bounds.STREAM),
    Path("stream with ids", streamed(framed=False, takes_ids=True), shapes.STREAM, shapes.STREAMS,
    bounds.STREAM),
    Path("stream in chunks", streamed(framed=True, takes_ids=False), shapes.ANSWER, shapes.ANSWERS,
    bounds.STREAM),
    Path("passed stream", passed_stream, shapes.STREAM, shapes.STREAMS, bounds.STREAM),
    Path("answer on the wire", awaited, shapes.ANSWER, shapes.ANSWERS, bounds.ANSWER),
    Path("prefill's answer", prefilled, shapes.JSON_ANSWER, shapes.JSON_ANSWERS,
    bounds.ENGINE_JSON),
    Path("decode's answer", answered, shapes.JSON_ANSWER, shapes.JSON_ANSWERS, bounds.ENGINE_JSON),
    Path("answers merged", merged, shapes.JSON_ANSWER, shapes.JSON_ANSWERS, bounds.MERGED),
    Path("metrics page", scraped, shapes.PAGE, shapes.PAGES, bounds.METRICS, MAX_PAGE),
    Path("notices", noticed, shapes.NOTICE, shapes.NOTICES, bounds.NOTICE, notices.MAX_BYTES - KIB),
    Path("telemetry", posted, shapes.TELEMETRY, shapes.TELEMETRY_POSTS, bounds.NOTICE,
    lmcache_telemetry.MAX_BYTES),
]  # fmt: skip
