"""The interface for answers whose writes wait for the client. `response_writer` has the one whose
writes never wait.
"""

from __future__ import annotations

from typing import Protocol

from pdproxy.kit.errors import PdproxyError
from pdproxy.serving.access.clients import Client
from pdproxy.upstream.connection import Headers


class AsyncResponseWriter(Protocol):
    """The client's end. An answer is either `whole`, or `begin`, `write`..., `finish`.

    Each call waits until the client can take more, and raises ClientLeftError if that takes too
    long.
    """

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a complete answer."""

    async def begin(self, headers: Headers) -> None:
        """Send the status 200 and the headers of a stream."""

    async def write(self, data: bytes) -> None:
        """Send stream bytes."""

    async def finish(self) -> None:
        """End the stream."""

    @property
    def client(self) -> Client:
        """The client whose request it is."""

    @property
    def begun(self) -> bool:
        """Whether anything was sent."""

    @property
    def gone(self) -> bool:
        """Whether the client has left."""

    @property
    def ended_by(self) -> PdproxyError | None:
        """Why the request is ended although its client is there; None if it is not."""
