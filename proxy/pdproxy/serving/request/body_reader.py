"""Reads clients' bodies: those that take a few milliseconds in the event loop, all others in reader
processes.

Owns the reader processes and their deadline. A parser holds the interpreter's lock until it is
done, in a thread as well: one client's body would delay all other requests.
"""

from __future__ import annotations

import asyncio

import msgspec

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import BodyTooLargeError, OverloadedError, RefusalReason, Wait
from pdproxy.kit.process_pool import NoMemoryError, ProcessPool
from pdproxy.observe.description import Label, MergeRule, Samples, gauge
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.serving.access.clients import Client
from pdproxy.settings.limits import Deadlines, Limits, MediaSettings
from pdproxy.wire.api_errors import Dialect
from pdproxy.wire.body_bounds import Body, Bounds
from pdproxy.wire.form import boundary_in, form_in
from pdproxy.wire.passthrough_body import PassedBody, Rename, Salt, passed_body, read_if_quick
from pdproxy.wire.reader_process import BodyQuestion, Found, fields_in, request_in
from pdproxy.wire.request import Parsed, parse_if_quick
from pdproxy.wire.route import Route
from pdproxy.wire.speech_body import speech_body

READER = "pdproxy.wire.reader_process"
WAITING = 64
"""Requests that may wait for a reader process. Each takes up to a second, so one more would miss
its deadline.
"""
IDLE = 60.0
"""Seconds after which a reader process without work ends. A process takes 20 MB, and 60 ms to
start.
"""
MEMORY = 256 * 2**20
"""Bytes of address space for a reader process itself, and for its objects: `limits.max_body_items`
objects take 100 MB.
"""
COPIES = 6
"""Additional address space, as a multiple of the largest body: a body with NaN or in UTF-16 becomes
objects, then JSON again.
"""
BODY_READERS = gauge(
    "pdproxy_body_readers",
    "processes",
    "Reader processes, and large bodies that wait for one, by state",
    Label(
        "state",
        (
            ("busy", "processes at work"),
            ("idle", "free ones"),
            ("awaited", "bodies that wait for one"),
        ),
    ),
    workers=MergeRule.SUM,
)


def memory_for(max_body: int) -> int:
    """Return the bytes of address space of a reader process for bodies of up to `max_body`
    bytes.
    """
    return MEMORY + COPIES * max_body


def readers(max_readers: int, max_body: int, clock: Clock, observers: Observers) -> ProcessPool:
    """Return at most `max_readers` reader processes for bodies of up to `max_body` bytes. None is
    started yet.
    """
    return ProcessPool(
        READER,
        max_processes=max_readers,
        waiting=WAITING,
        memory=memory_for(max_body),
        idle=IDLE,
        clock=clock,
        overdue=lambda: observers.notify(DeadlinePassed(Wait.READ_BODY.value)),
    )


class BodyReader:
    """Reads bodies within the bounds of `limits` and `media`; large ones in reader processes
    (`deadlines.read_body`).

    `workers`: these processes, None: as `limits` say.
    """

    def __init__(
        self,
        limits: Limits,
        deadlines: Deadlines,
        media: MediaSettings,
        clock: Clock,
        observers: Observers,
        workers: ProcessPool | None = None,
    ) -> None:
        self._limits, self._deadlines, self._media = limits, deadlines, media
        self.workers = workers or readers(
            limits.body_readers, limits.max_body_bytes, clock, observers
        )
        self._clock = clock
        self._observers = observers
        self._bounds = self._bounds_of_settings()
        observers.show(BODY_READERS, self._states)

    def _states(self) -> Samples:
        workers = self.workers
        return [
            (("busy",), workers.busy),
            (("idle",), workers.idle),
            (("awaited",), workers.waiting),
        ]

    def configure(self) -> None:
        """Use the settings as they are now, from the next body on."""
        self._bounds = self._bounds_of_settings()
        self.workers.resize(self._limits.body_readers, memory_for(self._limits.max_body_bytes))

    def _bounds_of_settings(self) -> Bounds:
        return Bounds(self._limits.max_prompts, self._limits.max_body_items, self._media.rule)

    async def request(self, route: Route, body: Body, client: Client) -> Parsed:
        """Read a client's generating request.

        Raises:
            BadRequestError: no engine would read it as a JSON object, or it holds more than one
                request may.
            OverloadedError: too many are being read, or it took too long.
        """
        light = parse_if_quick(route, body, self._bounds)
        if light is not None:
            return light
        question = BodyQuestion(self._bounds, route)
        return request_in(await self._in_process(question, body, client), body)

    async def passed(
        self,
        dialect: Dialect,
        body: Body,
        client: Client,
        name: Rename | None = None,
        salt: Salt | None = None,
    ) -> PassedBody:
        """Read the body of a request that one engine serves whole. Raises what `request`, `name`
        and `salt` raise.

        `name`, `salt`: see `wire.passthrough_body`.
        """
        light = read_if_quick(dialect, body, self._bounds, name, salt)
        if light is not None:
            return light
        question = BodyQuestion(self._bounds, None, dialect)
        return passed_body(
            dialect, *fields_in(await self._in_process(question, body, client), body), name, salt
        )

    async def speech(
        self, content_type: str, body: Body, name: Rename | None = None, salt: Salt | None = None
    ) -> PassedBody:
        """Read the form of a request for speech. Its file is searched, not read: in the event loop,
        in portions.

        Raises what `name` and `salt` raise, and:
            BadRequestError: engines would not read it, or not all in the same way.
        """
        steps = form_in(body, boundary_in(content_type))
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return speech_body(body, end.value, name, salt)
            await asyncio.sleep(0)

    async def _in_process(self, question: BodyQuestion, body: Body, client: Client) -> Found:
        end = self._clock.now() + self._deadlines.read_body
        try:
            with self._clock.within(self._deadlines.read_body):
                return await self.workers.ask(client, msgspec.msgpack.encode(question), body, end)
        except TimeoutError:
            self._observers.notify(DeadlinePassed(Wait.READ_BODY.value))
            raise OverloadedError(
                f"the body was not read in {self._deadlines.read_body:g} s", RefusalReason.READERS
            ) from None
        except NoMemoryError:
            raise BodyTooLargeError(
                "The body takes too much memory to be read", param="body"
            ) from None
