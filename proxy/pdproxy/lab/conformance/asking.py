"""Questions over HTTP: asked in the ordinary way, or by a client that leaves. Each has a deadline, and a connection of its own.

Owns one aiohttp session. What goes wrong is an answer, too.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp

from pdproxy.lab.check.engines import Miss
from pdproxy.lab.conformance.answers import BrokenError, Said, Stream, whole
from pdproxy.lab.conformance.questions import Question


@dataclass(frozen=True, slots=True)
class Place:
    """Somebody who speaks the OpenAI API, and what is needed to be heard there."""

    url: str
    key: str | None = None
    tls: ssl.SSLContext | None = None


class Client:
    """Asks. `timeout` in seconds bounds each question."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, place: Place, question: Question) -> Said | Miss:
        """Return the answer, or why there is none."""
        begun = time.monotonic()
        try:
            async with self._post(place, question) as answer:
                if answer.status != 200:
                    text = " ".join((await answer.text(errors="replace")).split())
                    return Miss(f"answered {answer.status}: {text[:200]}", answer.status)
                said = await _streamed(answer) if question.shape.stream else whole(await answer.read())
        except TimeoutError:
            return Miss(f"no answer in {self._timeout:g} s", silent=True)
        except BrokenError as error:
            return Miss(str(error), 200)
        except (aiohttp.ClientError, OSError) as error:
            return Miss(f"{type(error).__name__}: {error}")
        said.seconds = time.monotonic() - begun
        return said

    async def leave_when(
        self, place: Place, question: Question, moment: Callable[[], Awaitable[bool]]
    ) -> Said | Miss | None:
        """Ask, and close the connection at a moment. Return None if it came and nothing had been answered by then.

        `moment` returns whether it has come; with False the question is given up, too.
        """
        asking = asyncio.ensure_future(self.ask(place, question))
        try:
            if await moment() and not asking.done():
                return None
            return asking.result() if asking.done() else Miss("the moment to leave did not come")
        finally:
            asking.cancel()
            await asyncio.wait({asking})

    async def leave_in_stream(self, place: Place, question: Question) -> Miss | None:
        """Ask for a stream, and close the connection at its first output. Return None if there was any."""
        stream = Stream()
        try:
            async with self._post(place, question) as answer:
                if answer.status != 200:
                    return Miss(f"answered {answer.status}", answer.status)
                async for line in answer.content:
                    if stream.line(line):
                        answer.close()
                        return None
        except TimeoutError:
            return Miss(f"no answer in {self._timeout:g} s", silent=True)
        except BrokenError as error:
            return Miss(str(error), 200)
        except (aiohttp.ClientError, OSError) as error:
            return Miss(f"{type(error).__name__}: {error}")
        return Miss("its stream had no output", 200)

    async def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()

    def _post(self, place: Place, question: Question) -> aiohttp.client._RequestContextManager:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._timeout),
                connector=aiohttp.TCPConnector(force_close=True, limit=0),
                trust_env=False,
                read_bufsize=1 << 20,
            )
        headers = {"content-type": "application/json", "x-request-id": question.request_id}
        if place.key is not None:
            headers["authorization"] = f"Bearer {place.key}"
        return self._session.post(
            place.url + question.shape.route.value,
            data=question.body,
            headers=headers,
            allow_redirects=False,
            ssl=True if place.tls is None else place.tls,
        )


async def _streamed(answer: aiohttp.ClientResponse) -> Said:
    stream = Stream()
    async for line in answer.content:
        stream.line(line)
    return stream.end()
