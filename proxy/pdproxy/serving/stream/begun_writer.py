"""A client's end of a stream that has begun, for what changes events on their way to it."""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.kit.errors import PdproxyError
from pdproxy.serving.access.clients import Client
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.upstream.connection import Headers


class BegunWriter:
    """A `ResponseWriter` in front of the one that a stream has begun on, whose owner ends it there.
    Subclasses write.
    """

    begun = True

    def __init__(self, output: ResponseWriter) -> None:
        self._output = output

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self._output!r}>"

    @property
    def client(self) -> Client:
        """The client whose request it is."""
        return self._output.client

    @property
    def gone(self) -> bool:
        """Whether the client has left."""
        return self._output.gone

    @property
    def ended_by(self) -> PdproxyError | None:
        """Why the request is ended although its client is there."""
        return self._output.ended_by

    @property
    def paused(self) -> bool:
        """Whether the client reads more slowly than we write."""
        return self._output.paused

    def on_pressure(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Have `pause` and `resume` called when the client stops and continues to read."""
        self._output.on_pressure(pause, resume)

    def chunk_writer(self) -> None:
        """Return None: each event is another one for the client."""
        return

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Never called: the stream has begun."""
        raise RuntimeError("a stream that has begun cannot be answered whole")

    def begin(self, headers: Headers) -> None:
        """Do nothing: the stream has begun."""

    def drop_body(self) -> None:
        """Do nothing: the body was dropped when the stream began."""

    def finish(self) -> None:
        """Do nothing: the owner ends the stream."""

    def break_off(self) -> None:
        """Do nothing: the owner breaks the stream off."""
