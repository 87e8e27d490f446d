"""The client's end of a stream that another engine goes on with: its events become those of the
client's stream.
"""

from __future__ import annotations

from pdproxy.kit.errors import EngineError
from pdproxy.serving.stream.begun_writer import BegunWriter
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.transfer.chat_chunks import NotACompletionError
from pdproxy.transfer.continued_events import ContinuedEvents


class ContinuedWriter(BegunWriter):
    """Writes the events of a continuation."""

    def __init__(self, output: ResponseWriter, events: ContinuedEvents) -> None:
        super().__init__(output)
        self._events = events
        self.is_broken = False
        """Whether something was not written, because it was no completion."""

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
