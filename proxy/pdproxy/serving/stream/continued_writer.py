"""The client's end of a stream that another engine goes on with: its events become those of the client's stream."""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.kit.errors import EngineError
from pdproxy.serving.access.clients import Client
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.transfer.chat_chunks import NotACompletionError
from pdproxy.transfer.continued_events import ContinuedEvents
from pdproxy.upstream.connection import Headers


class ContinuedWriter:
    """A `ResponseWriter` in front of the one that the stream has begun on. Its owner ends the stream there."""

    begun = True

    def __init__(self, output: ResponseWriter, events: ContinuedEvents) -> None:
        self._output = output
        self._events = events
        self.is_broken = False
        """Whether something was not written, because it was no completion."""

    def __repr__(self) -> str:
        return f"<ContinuedWriter to {self._output!r}>"

    @property
    def client(self) -> Client:
        """The client whose request it is."""
        return self._output.client

    @property
    def gone(self) -> bool:
        """Whether the client has left."""
        return self._output.gone

    @property
    def paused(self) -> bool:
        """Whether the client reads more slowly than we write."""
        return self._output.paused

    def on_pressure(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Have `pause` and `resume` called when the client stops and continues to read."""
        self._output.on_pressure(pause, resume)

    def write(self, data: bytes) -> None:
        """Send whole events.

        Raises:
            EngineError: the engine has sent something else than a completion.
        """
        try:
            data = self._events.batch(data)
        except NotACompletionError as error:
            self.is_broken = True
            raise EngineError(f"the engine sent an invalid completion event: {error}") from None
        self._output.write(data)

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
