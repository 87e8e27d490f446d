"""The interface for answers whose writes never wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pdproxy.kit.errors import PdproxyError
from pdproxy.serving.access.clients import Client
from pdproxy.upstream.connection import Headers


class ResponseWriter(Protocol):
    """The client's end. An answer is either `whole`, or `begin`, `write`..., then `finish` or
    `break_off`.

    Calls after the client has left do nothing.
    """

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a complete answer."""

    def begin(self, headers: Headers) -> None:
        """Send the status 200 and the headers of a stream."""

    def write(self, data: bytes) -> None:
        """Send stream bytes."""

    def chunk_writer(self) -> Callable[[bytes], None] | None:
        """Return what sends stream bytes that are framed as one HTTP chunk already; None if chunks
        can't be sent.
        """

    def finish(self) -> None:
        """End the stream. The connection takes the next request."""

    def break_off(self) -> None:
        """Close the connection in the middle of the stream, so that the client sees it fail."""

    def drop_body(self) -> None:
        """Release the request's body: no engine needs it any more."""

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

    @property
    def paused(self) -> bool:
        """Whether the client reads more slowly than we write."""

    def on_pressure(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Have `pause` and `resume` called when the client stops and continues to read."""
