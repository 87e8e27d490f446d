"""Puts the client's request id back into an answer whose leg had an id of its own.

Owns the bytes that may be the beginning of that id. It is 32 random hex digits or more, which the
answer's text can't contain.
"""

from __future__ import annotations

from pdproxy.kit.errors import EngineError
from pdproxy.upstream.connection import ForwardRead, Headers, Leg, Sink


class RenamedReads:
    """Such a leg for its relay, if both ids have the same length: then whole chunks keep their
    framing on the fast path.
    """

    def __init__(self, leg: Leg, named: str, shown: str) -> None:
        self._leg = leg
        self._named = named.encode("ascii")
        self._shown = shown.encode("ascii")

    def pause(self) -> None:
        """See `Leg`."""
        self._leg.pause()

    def resume(self) -> None:
        """See `Leg`."""
        self._leg.resume()

    def offer_reads(self, forward: ForwardRead) -> None:
        """See `Leg`."""
        named, shown = self._named, self._shown
        self._leg.offer_reads(lambda read: forward(read.replace(named, shown)))


class IdSink(Sink):
    """The sink of such a leg: passes everything on to `sink`, with `shown` in place of `named`.
    Both are ASCII.
    """

    def __init__(self, sink: Sink, named: str, shown: str) -> None:
        self._sink = sink
        self._named = named.encode("ascii")
        self._shown = shown.encode("ascii")
        self._kept = b""

    def head(self, status: int, headers: Headers) -> None:
        """See `Sink`."""
        named, shown = self._named, self._shown
        self._sink.head(status, [(name, value.replace(named, shown)) for name, value in headers])

    def data(self, chunk: bytes) -> None:
        """See `Sink`."""
        if self._kept:
            chunk, self._kept = self._kept + chunk, b""
        chunk = chunk.replace(self._named, self._shown)
        if not chunk.endswith((b"\n", b"}")) and (kept := self._beginning(chunk)):
            chunk, self._kept = chunk[:-kept], chunk[-kept:]
        if chunk:
            self._sink.data(chunk)

    def end(self) -> None:
        """See `Sink`."""
        if self._kept:
            kept, self._kept = self._kept, b""
            try:
                self._sink.data(kept)
            except EngineError as error:
                self._sink.failed(error)
                return
        self._sink.end()

    def failed(self, error: EngineError) -> None:
        """See `Sink`."""
        self._sink.failed(error)

    def _beginning(self, chunk: bytes) -> int:
        """Return how many bytes at a chunk's end are the beginning of the id."""
        longest = min(len(self._named) - 1, len(chunk))
        return next(
            (count for count in range(longest, 0, -1) if chunk.endswith(self._named[:count])), 0
        )
