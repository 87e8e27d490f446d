"""Sends requests over HTTP, as a client that waits for its answer or as one that leaves. Each has a
deadline and a connection.

Owns one aiohttp session. A failure is a result, too.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp

from pdproxy.check.engines import NoAnswer
from pdproxy_lab.conformance.answers import InvalidAnswerError, SeenAnswer, Stream, read_whole
from pdproxy_lab.conformance.requests import Request


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server with the OpenAI API, and what it needs of clients."""

    url: str
    key: str | None = None
    tls: ssl.SSLContext | None = None


class ApiClient:
    """Sends requests. `timeout` in seconds bounds each one."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    async def send(self, place: Endpoint, request: Request) -> SeenAnswer | NoAnswer:
        """Return the answer, or why there is none."""
        begun = time.monotonic()
        try:
            async with self._post(place, request) as answer:
                if answer.status != 200:
                    text = " ".join((await answer.text(errors="replace")).split())
                    return NoAnswer(f"answered {answer.status}: {text[:200]}", answer.status)
                answered = (
                    await _streamed(answer)
                    if request.shape.stream
                    else read_whole(await answer.read())
                )
        except TimeoutError:
            return NoAnswer(f"no answer in {self._timeout:g} s", silent=True)
        except InvalidAnswerError as error:
            return NoAnswer(str(error), 200)
        except (aiohttp.ClientError, OSError) as error:
            return NoAnswer(f"{type(error).__name__}: {error}")
        answered.seconds = time.monotonic() - begun
        return answered

    async def leave_when(
        self, place: Endpoint, request: Request, moment: Callable[[], Awaitable[bool]]
    ) -> SeenAnswer | NoAnswer | None:
        """Send, and close the connection at a moment. Return None if the moment came before the
        answer.

        `moment` returns whether the moment has come; with False the request is cancelled, too.
        """
        sending = asyncio.ensure_future(self.send(place, request))
        try:
            if await moment() and not sending.done():
                return None
            return (
                sending.result() if sending.done() else NoAnswer("the moment to leave did not come")
            )
        finally:
            sending.cancel()
            await asyncio.wait({sending})

    async def leave_in_stream(self, place: Endpoint, request: Request) -> NoAnswer | None:
        """Send a request for a stream, and close the connection at its first output. Return None if
        there was output.
        """
        stream = Stream()
        try:
            async with self._post(place, request) as answer:
                if answer.status != 200:
                    return NoAnswer(f"answered {answer.status}", answer.status)
                async for line in answer.content:
                    if stream.line(line):
                        answer.close()
                        return None
        except TimeoutError:
            return NoAnswer(f"no answer in {self._timeout:g} s", silent=True)
        except InvalidAnswerError as error:
            return NoAnswer(str(error), 200)
        except (aiohttp.ClientError, OSError) as error:
            return NoAnswer(f"{type(error).__name__}: {error}")
        return NoAnswer("its stream had no output", 200)

    async def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()

    def _post(self, place: Endpoint, request: Request) -> aiohttp.client._RequestContextManager:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._timeout),
                connector=aiohttp.TCPConnector(force_close=True, limit=0),
                trust_env=False,
                read_bufsize=1 << 20,
            )
        headers = {"content-type": "application/json", "x-request-id": request.request_id}
        if place.key is not None:
            headers["authorization"] = f"Bearer {place.key}"
        return self._session.post(
            place.url + request.shape.route.path,
            data=request.body,
            headers=headers,
            allow_redirects=False,
            ssl=True if place.tls is None else place.tls,
        )


async def _streamed(answer: aiohttp.ClientResponse) -> SeenAnswer:
    stream = Stream()
    async for line in answer.content:
        stream.line(line)
    return stream.end()
