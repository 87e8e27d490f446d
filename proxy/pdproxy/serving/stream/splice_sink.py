"""Rewrites an answer between the decode leg and its relay, if the client gets another answer than
the engine sends.

Owns the bytes of an event that is not whole yet. Errors, comments and the end mark are not changed.
Data that can't be rewritten fails the relay, like any other invalid data of an engine.
"""

from __future__ import annotations

from pdproxy.kit.errors import EngineError
from pdproxy.serving.stream.relay import Relay
from pdproxy.serving.stream.whole_events import limit_to_events, whole_events
from pdproxy.transfer.chat_chunks import NotACompletionError
from pdproxy.transfer.splice import Splice
from pdproxy.upstream.connection import Headers, Sink
from pdproxy.wire import sse

_JSON_TYPE = (b"content-type", b"application/json")
_STREAM_TYPE = (b"content-type", b"text/event-stream; charset=utf-8")


class SpliceSink(Sink):
    """The sink of a leg whose answer is rewritten on its way to a relay."""

    def __init__(self, relay: Relay, splice: Splice) -> None:
        self._relay = relay
        self._splice = splice
        self._status = 0
        self._is_stream = False
        self._share = relay.budget.share()

    def head(self, status: int, headers: Headers) -> None:
        """See `Sink`."""
        content_type = next((value for name, value in headers if name == b"content-type"), b"")
        self._status = status
        self._is_stream = status == 200 and content_type.startswith(b"text/event-stream")
        if self._is_stream:
            limit_to_events(self._share)
        self._relay.head(status, headers)

    def data(self, chunk: bytes) -> None:
        """See `Sink`."""
        if not self._is_stream:
            self._share.add(chunk)
            return
        if batch := whole_events(self._share, chunk):
            self._events(batch.removesuffix(sse.END))

    def end(self) -> None:
        """See `Sink`."""
        if not self._is_stream:
            body = self._share.take()
            if self._status == 200:
                try:
                    body = self._splice.whole(body)
                except NotACompletionError as error:
                    self._relay.failed(
                        EngineError(f"the engine answered 200 with an invalid completion: {error}")
                    )
                    return
            try:
                if body:
                    self._relay.data(body)
            except EngineError as error:
                self._relay.failed(error)
                return
        self._relay.end()

    def failed(self, error: EngineError) -> None:
        """See `Sink`."""
        self._relay.failed(error)

    def _events(self, batch: bytes) -> None:
        passed: list[bytes] = []
        for event in batch.split(sse.END):
            compact = sse.compact(event) if sse.is_spaced(event) else event
            lines = sse.data_lines(compact)
            if not lines or sse.is_done(lines[0]) or sse.is_error(compact):
                passed.append(event + sse.END)
                continue
            try:
                passed += [
                    sse.data(payload) for payload in self._splice.events(sse.payload(compact))
                ]
            except NotACompletionError as error:
                self._relay.failed(
                    EngineError(f"the engine sent an invalid completion event: {error}")
                )
                return
        self._relay.data(b"".join(passed))


def answer_finished(relay: Relay, splice: Splice, body: bytes, *, stream: bool) -> None:
    """Send the prefill engine's whole answer, whose first token was its last, to `relay`.

    Raises:
        EngineError: it is not a completion.
    """
    try:
        if stream:
            events = [sse.data(payload) for payload in splice.finished_events(body)]
            relay.head(200, [_STREAM_TYPE])
            relay.data(b"".join(events) + sse.DONE + sse.END)
        else:
            whole = splice.finished_whole(body)
            relay.head(200, [_JSON_TYPE])
            relay.data(whole)
            relay.end()
    except NotACompletionError as error:
        raise EngineError(f"the prefill's answer is not a completion: {error}") from None
