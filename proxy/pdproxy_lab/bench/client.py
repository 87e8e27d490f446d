"""Sends a run's requests, each at its time, whatever the others do (open loop), and notes when what
came back.

One task per request, one connection per request in flight. Each request has a deadline, also if the
server sends without end. Nothing is sent twice. Times are in seconds, by `time.perf_counter`: the
event loop's own time has steps of a millisecond.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypedDict

import aiohttp
import msgspec

from pdproxy_lab.bench.decision import HEADER, MAX_LENGTH
from pdproxy_lab.bench.errors import one_line
from pdproxy_lab.bench.events import BrokenStream, ErrorEvent, EventReader
from pdproxy_lab.bench.outcome import Observed, Outcome
from pdproxy_lab.bench.prompts import PATHS, Endpoint
from pdproxy_lab.bench.workload import Planned

_TICK = 0.02
"""Seconds between two samples of the event loop's own delay."""
_AHEAD = 0.1
"""Seconds until the first request: for its body."""
_AFTER_DONE = 1.0
"""Seconds that a server gets to end an answer after its end mark, so that the connection can be
used again.
"""
_KEEP_ALIVE = 2.0
"""Seconds that an idle connection is kept. Servers close theirs after 5 s (uvicorn) or later: no
request must meet that.
"""
_MAX_SHOWN = 200
_NONE: Mapping[str, str] = MappingProxyType({})


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server. `headers` are sent with each request."""

    name: str
    url: str
    model: str
    headers: Mapping[str, str] = {}


class RunProgress(TypedDict):
    """How far a run is: seconds since its start, requests sent, in flight and failed."""

    seconds: float
    sent: int
    in_flight: int
    failed: int


def session_of(tls: ssl.SSLContext | None) -> aiohttp.ClientSession:
    """Return a session with unlimited connections, no proxies and no total deadline: each use has
    its own. Close it.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_KEEP_ALIVE, ssl=True if tls is None else tls
        ),
        timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


class Sender:
    """Sends single requests to one server. `timeout`: seconds from a request's start to its last
    byte.
    """

    def __init__(
        self, session: aiohttp.ClientSession, target: Target, endpoint: Endpoint, *, timeout: float
    ) -> None:
        self._session = session
        self._url = target.url + PATHS[endpoint]
        self._headers = {
            "content-type": "application/json",
            "accept": "text/event-stream",
            "accept-encoding": "identity",
            **target.headers,
        }
        self._timeout = timeout
        self._clock = time.perf_counter

    async def send(
        self, outcome: Outcome, body: bytes, start: float, headers: Mapping[str, str] = _NONE
    ) -> None:
        """Send a request, and note in `outcome` what came back, in seconds from `start`, which is a
        time of `time.perf_counter`. An error is noted there, too. `headers`: of this request alone.
        """
        reader = EventReader(4 * outcome.asked_output + 64)
        outcome.sent = self._clock() - start
        try:
            async with asyncio.timeout(self._timeout):
                await self._exchange(outcome, body, reader, {**self._headers, **headers})
        except TimeoutError:
            outcome.fail("timeout", f"no whole answer within {self._timeout:g} s")
        except asyncio.CancelledError:
            outcome.fail("cut", "stopped before its end")
        except (
            BrokenStream,
            aiohttp.ClientPayloadError,
            aiohttp.ServerDisconnectedError,
            ConnectionResetError,
        ) as error:
            outcome.fail(
                "stream" if outcome.answered else "connection", str(error) or type(error).__name__
            )
        except ErrorEvent as error:
            outcome.fail("error event", str(error))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            outcome.fail("connection", str(error) or type(error).__name__)
        finally:
            outcome.times = [at - start for at in reader.times]
            outcome.prompt_tokens = reader.prompt_tokens
            outcome.output_tokens = reader.output_tokens
            outcome.cached_tokens = reader.cached_tokens
            outcome.end = self._clock() - start

    async def _exchange(
        self, outcome: Outcome, body: bytes, reader: EventReader, headers: Mapping[str, str]
    ) -> None:
        async with self._session.post(
            self._url, data=body, headers=headers, allow_redirects=False
        ) as answer:
            outcome.answered = True
            if (decision := answer.headers.get(HEADER)) is not None:
                outcome.decision = one_line(decision, MAX_LENGTH)
            if answer.status != 200:
                text = (await answer.content.read(4096)).decode("utf-8", "replace")
                outcome.fail(f"status {answer.status}", text)
                return
            if answer.content_type != "text/event-stream":
                raise BrokenStream(f"content-type is {answer.content_type[:_MAX_SHOWN]}")
            clock, feed = self._clock, reader.feed
            async for chunk in answer.content.iter_any():
                feed(chunk, clock())
                if reader.done:
                    break
            reader.end()
            with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                async with asyncio.timeout(_AFTER_DONE):
                    async for _ in answer.content.iter_any():
                        pass


class Run:
    """One run against one server. `body` makes a request's body, `headers` what headers it has
    beside those of all requests; `timeout`: seconds from a request's start to its last byte.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        endpoint: Endpoint,
        body: Callable[[int, Planned], bytes],
        *,
        timeout: float,
        max_in_flight: int,
        headers: Callable[[int, Planned], Mapping[str, str]] = lambda index, planned: _NONE,
    ) -> None:
        self._sender = Sender(session, target, endpoint, timeout=timeout)
        self._body = body
        self._headers = headers
        self._max_in_flight = max_in_flight
        self._clock = time.perf_counter
        self._open: set[asyncio.Task[None]] = set()
        self._offering: asyncio.Task[None] | None = None
        self._seen = Observed(outcomes=[], loop_lags=[], seconds=0.0)
        self._start = 0.0

    def progress(self) -> RunProgress:
        """Return how far it is."""
        failed = sum(outcome.error is not None for outcome in self._seen.outcomes)
        passed = max(self._clock() - self._start, 0.0) if self._start else 0.0
        return {
            "seconds": passed,
            "sent": len(self._seen.outcomes),
            "in_flight": len(self._open),
            "failed": failed,
        }

    def stop(self) -> None:
        """End it now: requests in flight are closed, and what was measured is returned by `go`,
        marked as cut.
        """
        self._seen.cut = True
        self._close()

    def _close(self) -> None:
        for task in (*self._open, *([self._offering] if self._offering is not None else [])):
            task.cancel()

    def give_up(self, why: str) -> None:
        """End it now, as `stop`: nothing of it may be used."""
        self._seen.given_up = why
        self._close()

    async def go(
        self, planned: Sequence[Planned], limit: tuple[float, str] | None = None
    ) -> Observed:
        """Send all requests, wait until each has ended, and return what was seen.

        `limit`: seconds after which it is given up, and why it then was; None: only the requests'
        own deadlines end it.
        """
        if self._seen.cut:
            return self._seen
        async with self._watching_loop(), self._within(limit):
            self._start = self._clock() + _AHEAD
            self._offering = asyncio.create_task(self._offer(planned))
            try:
                await asyncio.wait([self._offering])
                if self._seen.cut or self._seen.given_up:
                    self._close()
                elif not self._offering.cancelled():
                    self._offering.result()  # a defect of this program is not kept quiet
                while self._open:
                    await asyncio.wait(self._open)
            finally:
                self._close()
            self._seen.seconds = self._clock() - self._start
        return self._seen

    async def _offer(self, planned: Sequence[Planned]) -> None:
        for index, one in enumerate(planned):
            body, headers = (
                self._body(index, one),
                self._headers(index, one),
            )  # before it is due: it takes up to milliseconds
            due = self._start + one.at
            await asyncio.sleep(0)  # also when it is late: the answers need turns
            while (left := due - self._clock()) > 0:  # noqa: ASYNC110 - a timer may be early by its loop's resolution
                await asyncio.sleep(left)
            if len(self._open) >= self._max_in_flight:
                self._seen.given_up = (
                    f"{self._max_in_flight} requests were in flight: the server can't follow, or "
                    f"--max-in-flight is too low"
                )
                return
            outcome = Outcome(
                due=one.at,
                asked_input=one.input_tokens if one.text is None else 0,
                asked_output=one.output_tokens,
                class_name=one.class_name,
            )
            self._seen.outcomes.append(outcome)
            task = asyncio.create_task(self._sender.send(outcome, body, self._start, headers))
            self._open.add(task)
            self._seen.most_in_flight = max(self._seen.most_in_flight, len(self._open))
            task.add_done_callback(self._open.discard)

    @contextlib.asynccontextmanager
    async def _within(self, limit: tuple[float, str] | None) -> AsyncIterator[None]:
        if limit is None:
            yield
            return
        timer = asyncio.get_running_loop().call_later(limit[0], self.give_up, limit[1])
        try:
            yield
        finally:
            timer.cancel()

    @contextlib.asynccontextmanager
    async def _watching_loop(self) -> AsyncIterator[None]:
        async def watch() -> None:
            while True:
                due = self._clock() + _TICK
                await asyncio.sleep(_TICK)
                self._seen.loop_lags.append(max(self._clock() - due, 0.0))

        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
