"""Makes an answer whose writes never wait one whose writes wait for the client."""

from __future__ import annotations

import asyncio

from pdproxy.kit.errors import ClientLeftError, PdproxyError
from pdproxy.serving.access.clients import Client
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.upstream.connection import Headers


class WaitingWriter:
    """An `AsyncResponseWriter` on a `ResponseWriter`. The connection has the deadline of a client
    that reads too slowly.
    """

    def __init__(self, output: ResponseWriter) -> None:
        self._output = output
        self._readable = asyncio.Event()
        self._readable.set()
        output.on_pressure(self._readable.clear, self._readable.set)

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a complete answer."""
        self._check()
        self._output.whole(status, headers, body)

    async def begin(self, headers: Headers) -> None:
        """Send the status 200 and the headers of a stream."""
        self._check()
        self._output.begin(headers)

    async def write(self, data: bytes) -> None:
        """Send stream bytes; wait while the client reads more slowly than they come."""
        self._check()
        self._output.write(data)
        await self._readable.wait()

    async def finish(self) -> None:
        """End the stream."""
        self._output.finish()

    def _check(self) -> None:
        if self._output.gone:
            raise ClientLeftError("the client closed the connection")

    @property
    def client(self) -> Client:
        """The client whose request it is."""
        return self._output.client

    @property
    def begun(self) -> bool:
        """Whether anything was sent."""
        return self._output.begun

    @property
    def gone(self) -> bool:
        """Whether the client has left."""
        return self._output.gone

    @property
    def ended_by(self) -> PdproxyError | None:
        """Why the request is ended although its client is there."""
        return self._output.ended_by
