"""One connection to an engine without a socket: a test decides what each read brings, and sees what
the sink hears of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httptools

from pdproxy.kit.errors import EngineError
from pdproxy.upstream.connection import EngineConnection, Headers
from tests.fuzz.ingress import Transport

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
OK = HEAD + b"content-length: 2\r\n\r\nok"
LIKE = b"5\r\nhello\r\n"
"""Ten bytes that are a chunk, or only look like one."""


class Heard:
    """Writes down what a sink hears, and holds it to its promises: a head, then data that is not
    empty, then one end.
    """

    def __init__(self, on_data: Callable[[], None] = lambda: None) -> None:
        self.status = 0
        self.headers: Headers = []
        self.given: Headers = []
        self.parts: list[bytes] = []
        self.ending: str | None = None
        self.error: EngineError | None = None
        self._on_data = on_data

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def head(self, status: int, headers: Headers) -> None:
        assert (self.status, self.ending) == (0, None), "a second head, or one behind the end"
        self.status, self.given, self.headers = status, headers, list(headers)

    def data(self, chunk: bytes) -> None:
        assert self.status, "a body before its head"
        assert self.ending is None, "data behind the end"
        assert chunk, "empty data"
        self.parts.append(bytes(chunk))
        self._on_data()

    def end(self) -> None:
        assert self.status, "an end without a head"
        assert self.ending is None, "a second end"
        self.ending = "whole"

    def failed(self, error: EngineError) -> None:
        assert self.ending is None, "a second end"
        self.ending, self.error = "failed", error


@dataclass
class Wire:
    """A connection, and how often it said that it is free and that it is lost."""

    freed: int = 0
    lost: int = 0
    transport: Transport = field(default_factory=Transport)

    def __post_init__(self) -> None:
        self.connection = EngineConnection("engine", self._free, self._lost)
        self.connection.connection_made(self.transport)

    def _free(self, _: EngineConnection) -> None:
        self.freed += 1

    def _lost(self, _: EngineConnection) -> None:
        self.lost += 1

    def ask(self, heard: Heard, reads: Sequence[bytes]) -> Heard:
        """Send a request and read so, as far as the connection wants to read."""
        self.connection.send(b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n", heard)
        for read in reads:
            before = len(heard.parts)
            if read and not self.transport.closing:
                self.connection.data_received(read)
            assert len(heard.parts) - before <= 1, "the sink is called once a read"
        return heard

    def leave(self) -> None:
        """Have the engine close, if it was not closed here."""
        self.connection.connection_lost(None)


Outcome = tuple[int, bytes, str | None, bool]
"""Status, body, ending, and whether the connection may carry another request."""


def answered(reads: Sequence[bytes], *before: Sequence[bytes]) -> Outcome:
    """What is heard of an answer that comes in these reads and is followed by the end of the
    connection.
    """
    wire = Wire()
    for earlier in before:
        assert wire.ask(Heard(), earlier).ending == "whole"
        assert wire.connection.usable, "the answer before leaves a connection that can be used"
    heard = wire.ask(Heard(), reads)
    kept = wire.connection.usable
    wire.leave()
    assert wire.lost == 1
    return heard.status, heard.body, heard.ending, kept


def halves(data: bytes) -> list[list[bytes]]:
    """All ways to cut bytes into two reads, and into reads of a byte."""
    return [[data[:at], data[at:]] for at in range(1, len(data))] + [
        [bytes([byte]) for byte in data]
    ]


class Reference:
    """The parser alone, fed with the whole answer: what any cuts must come to."""

    def __init__(self, data: bytes) -> None:
        self.status, self.body, self.whole = 0, b"", False
        self._framed = False
        self._parser = httptools.HttpResponseParser(self)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.ending = "whole" if self.whole else "failed"
        else:
            until_eof = self.status and not self._framed
            self.ending = "whole" if self.whole or until_eof else "failed"

    def on_message_begin(self) -> None:
        if self.whole:
            raise ValueError("a second answer")
        self._framed = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._framed |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.body += body if self.status else b""

    def on_message_complete(self) -> None:
        self.whole = self.status > 0
