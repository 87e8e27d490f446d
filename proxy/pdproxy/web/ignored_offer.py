"""Offers to change the protocol (`Upgrade: h2c`, for one), which are ignored: the request is served
as HTTP/1.1 (RFC 9110, 7.8).

The parser takes an offer as accepted: it stops behind the head, and leaves all bytes behind it to
the other protocol. So another parser goes on there. It gets a head with the same framing first, of
which nobody hears.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.server import ServerState

from pdproxy.web.client_connection import ClientConnection

_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class OfferIgnoringConnection(ClientConnection):
    """A connection that stays with HTTP/1.1."""

    __slots__ = ("_offer",)

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._offer: bytes | None = None
        """A head that says where the body ends, from an offer on until the parser has stopped
        there.
        """

    def note_offer(self) -> None:
        """Note how the body is framed: the head is complete, and the parser stops behind it.

        Raises:
            HttpParserError: it is framed in no way that HTTP has. The parser does not look at that
                where it stops.
        """
        if self.parser.get_method() != b"CONNECT":
            lines = b"".join([b"%b: %b\r\n" % line for line in self.headers if line[0] in _FRAMING])
            head = b"POST / HTTP/1.1\r\n%b\r\n" % lines
            httptools.HttpRequestParser(None).feed_data(head)
            self._offer = head

    def ignore_offer(self) -> None:
        """Read what follows the head as if there had been no offer."""
        head, self._offer = self._offer, None
        assert head is not None
        self.parser = httptools.HttpRequestParser(_BehindHead(self))
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self.parser.feed_data(head)


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
