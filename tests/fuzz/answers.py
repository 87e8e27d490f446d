"""What must hold for any bytes that an engine answers with, on the wire and as JSON, however they
are cut into reads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import h11

from pdproxy.kit.errors import EngineError, EngineRefusedError
from pdproxy.transfer.contract import NO_DISPATCH, Handle
from pdproxy.transfer.nixl import handle
from pdproxy.transfer.refusal import release_body
from pdproxy.upstream.connection import EngineConnection, Headers
from pdproxy.wire.chunks import whole_chunks
from pdproxy.wire.engine import error_of, prefill_answer, usage_of
from pdproxy.wire.errors import error_body
from pdproxy.wire.request import parse
from pdproxy.wire.route import Route
from tests.fuzz.ingress import Transport


class Sink:
    """Writes down what it hears, and that it hears it in order."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.ending: str | None = None

    def head(self, status: int, headers: Headers) -> None:
        assert self.ending is None
        assert not self.status, "two heads"
        self.status = status

    def data(self, chunk: bytes) -> None:
        assert self.ending is None
        assert self.status, "a body before its head"
        assert chunk
        self.body += chunk

    def take(self, read: bytes) -> bool:
        """Take what is one whole chunk, past the parser."""
        payloads, rest = whole_chunks(read)
        if len(payloads) != 1 or rest != len(read):
            return False
        self.data(payloads[0])
        return True

    def end(self) -> None:
        assert self.ending is None
        assert self.status, "an end without a head"
        self.ending = "whole"

    def failed(self, error: EngineError) -> None:
        assert self.ending is None
        assert isinstance(error, EngineError)
        self.ending = "failed"


def _answered(pieces: Sequence[bytes]) -> Sink:
    freed: list[EngineConnection] = []
    lost: list[EngineConnection] = []
    connection = EngineConnection("engine", freed.append, lost.append)
    transport, sink = Transport(), Sink()
    connection.connection_made(transport)
    leg = connection.send(b"GET / HTTP/1.1\r\n\r\n", sink)
    leg.offer_reads(sink.take)
    for piece in pieces:
        if piece and not transport.closing:
            connection.data_received(piece)
    connection.connection_lost(None)
    assert sink.ending is not None, "nobody said that it is over"
    assert len(lost) == 1
    assert len(freed) <= 1
    return sink


async def check_answer(data: bytes, cuts: Sequence[int]) -> None:
    """Assert that an answer is heard once, in order, with one end, whatever the cuts, and as
    another parser reads it.
    """
    bounds = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    whole = _answered([data])
    cut = _answered([data[one:two] for one, two in pairwise(bounds)])
    assert whole.status == cut.status
    if whole.ending == cut.ending == "whole":
        assert whole.body == cut.body
    expected = _by_h11(data)
    if expected is not None and whole.ending == "whole":
        assert (whole.status, whole.body) == expected


def _by_h11(data: bytes) -> tuple[int, bytes] | None:
    """Status and body, None where another parser finds the answer wrong or not whole."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    connection.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    connection.receive_data(b"")
    status, body = 0, b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return status, body
            elif not isinstance(event, h11.InformationalResponse):
                return None
    except (h11.ProtocolError, RuntimeError):
        return None


def check_engine_json(data: bytes) -> None:
    """Assert that what is no answer is none, and that what is passed on is JSON."""
    usage_of(data)
    detail = error_of(data)
    body = error_body(EngineRefusedError("refused", status=400, body=data))
    if detail is None:
        json.loads(body)
    else:
        assert b"\n" not in body if b"\n" in data else body == data
    answer = prefill_answer(data)
    if answer is None:
        return
    found = handle(parse(Route.COMPLETIONS, b'{"prompt":"x"}'), answer, NO_DISPATCH)
    assert isinstance(found, Handle | str)
    if isinstance(found, Handle):
        released = release_body("x", found)
        assert released is not None
        assert b'"max_tokens":0' in released
