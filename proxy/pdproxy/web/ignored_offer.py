"""Offers to change the protocol (`Upgrade: h2c`, for one), which are ignored: the request is served as HTTP/1.1 (RFC 9110, 7.8).

The parser takes an offer as accepted: it stops behind the head, and leaves all bytes behind it to the other protocol. So another
parser goes on there. It gets a head with the same framing first, of which nobody hears.
"""

from __future__ import annotations

import sys
from typing import Any

import httptools

from pdproxy.web.client_connection import ClientConnection

_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class OfferIgnoringConnection(ClientConnection):
    """A connection that stays with HTTP/1.1."""

    __slots__ = ("_offer", "_stopped_at")

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._offer: bytes | None = None
        """The lines of the head that say where the body ends, from an offer on until the parser has stopped there."""
        self._stopped_at: int | None = None
        """Where in the bytes that were read the parser has stopped."""

    def note_offer(self) -> None:
        """Note how the body is framed: the head is complete, and the parser stops behind it."""
        if self.parser.get_method() != b"CONNECT":
            self._offer = b"".join([b"%b: %b\r\n" % line for line in self.headers if line[0] in _FRAMING])

    def has_stopped(self) -> bool:
        """Note where the parser has stopped, while its exception is handled. Return whether reading goes on there."""
        if self._offer is None or self._discarding:
            return False
        self._stopped_at = sys.exception().args[0]  # type: ignore[union-attr]
        self._discarding = True  # for the rest of uvicorn's method
        return True

    def ignore_offer(self, data: bytes) -> None:
        """Read the body, and what follows, as if there had been no offer."""
        at, lines = self._stopped_at, self._offer
        assert lines is not None
        self._stopped_at = self._offer = None
        self._discarding = False
        self.parser = httptools.HttpRequestParser(_BehindHead(self))
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % lines)
        self.data_received(data[at:])


class _BehindHead:
    """Passes on what a parser calls, but for its first head."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._is_behind = False
        self.on_body = connection.on_body
        self.on_message_complete = connection.on_message_complete

    def on_message_begin(self) -> None:
        if self._is_behind:
            self._connection.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._is_behind:
            self._connection.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_behind:
            self._connection.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_behind:
            self._connection.on_headers_complete()
        self._is_behind = True
