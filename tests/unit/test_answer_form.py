"""A whole answer of a known form reaches its sink as if the parser had read it, and every other
answer is the parser's.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.kit.errors import EngineError
from pdproxy.upstream.answer_form import AnswerForm
from pdproxy.upstream.connection import EngineConnection, Headers
from tests.fakes.legs import Heard
from tests.fuzz.ingress import Transport

LEARNED = (
    b"HTTP/1.1 200 OK\r\nDate: Sat, 28 Nov 2026 10:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-length: 2\r\n"
    b"content-type: application/json\r\nx-request-id: a\r\n\r\n{}"
)
LIKE = (
    LEARNED.replace(b"10:00:00", b"10:00:01")
    .replace(b"length: 2", b"length: 5")
    .replace(b"-id: a", b"-id: b")[:-2]
    + b'{"":1'
)


async def heard_of(form: AnswerForm, *reads: bytes) -> tuple[Heard, bool, list[EngineConnection]]:
    """Return what the sink of a request heard of reads, whether the connection closed, and who was
    freed.
    """
    freed: list[EngineConnection] = []
    transport, heard = Transport(), Heard()
    connection = EngineConnection("engine", freed.append, lambda _: None, form)
    connection.connection_made(transport)
    connection.send(b"", heard)
    for read in reads:
        connection.data_received(read)
    return heard, transport.closing, freed


async def learned() -> AnswerForm:
    """Return the form of an answer that the parser has read."""
    form = AnswerForm()
    await heard_of(form, LEARNED)
    assert form.whole(LEARNED) is not None
    return form


async def equal(*reads: bytes) -> None:
    """Check that reads are heard as by a connection that knows no form."""
    known, unknown = await heard_of(await learned(), *reads), await heard_of(AnswerForm(), *reads)
    one, other = known[0], unknown[0]
    assert (one.status, one.headers, one.body, one.ending) == (
        other.status,
        other.headers,
        other.body,
        other.ending,
    )
    assert (known[1], len(known[2])) == (unknown[1], len(unknown[2]))


async def test_an_answer_of_the_form_is_heard_as_the_parser_reads_it() -> None:
    form = await learned()
    assert form.whole(LIKE) is not None, "else the parser is compared with itself"
    await equal(LIKE)


OTHERS = {
    "another status": LIKE.replace(b"200 OK", b"201 OK"),
    "another version": LIKE.replace(b"HTTP/1.1", b"HTTP/1.0"),
    "another fixed value": LIKE.replace(b"uvicorn", b"unicorn"),
    "a header more": LIKE.replace(b"server:", b"connection: close\r\nserver:"),
    "a header less": LIKE.replace(b"server: uvicorn\r\n", b""),
    "another length": LIKE.replace(b"length: 5", b"length: 4"),
    "a longer body": LIKE + b"x",
    "a shorter body": LIKE[:-1],
    "two answers": LIKE + LIKE,
    "no digits": LIKE.replace(b"length: 5", b"length: 5x"),
    "a negative length": LIKE.replace(b"length: 5", b"length: -5"),
    "two lengths": LIKE.replace(b"length: 5", b"length: 5\r\ncontent-length: 4"),
    "lines that end with LF": LIKE.replace(b"\r\n", b"\n"),
    "a folded line": LIKE.replace(b"server: ", b"server:\r\n "),
    "a control character": LIKE.replace(b"-id: b", b"-id: b\x00"),
    "an interim answer before": b"HTTP/1.1 100 Continue\r\n\r\n" + LIKE,
    "another engine's framing": LIKE.replace(b"content-length: 5", b"transfer-encoding: chunked"),
}


@pytest.mark.parametrize("answer", OTHERS.values(), ids=OTHERS)
async def test_what_is_not_of_the_form_is_the_parsers(answer: bytes) -> None:
    assert (await learned()).whole(answer) is None
    await equal(answer)


async def test_a_header_that_differs_in_each_answer_makes_no_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To compile one takes as long as to serve a request. One that stays is learned, too."""
    form, compiled = await learned(), list[bytes]()

    def noted(pattern: bytes) -> re.Pattern[bytes]:
        compiled.append(pattern)
        return re.compile(pattern)

    own = SimpleNamespace(compile=noted, escape=re.escape)
    monkeypatch.setattr("pdproxy.upstream.answer_form.re", own)
    for number in range(20):
        await heard_of(form, LIKE.replace(b"uvicorn", b"uvicorn\r\nload: %d" % number))
    assert not compiled
    other = LIKE.replace(b"uvicorn", b"another")
    for _ in range(3):
        await heard_of(form, other)
    assert len(compiled) == 1
    assert form.whole(other) is not None


@pytest.mark.parametrize("at", [1, 20, 60, len(LIKE) - 6, len(LIKE) - 1])
async def test_an_answer_of_two_reads_is_the_parsers(at: int) -> None:
    await equal(LIKE[:at], LIKE[at:])


@given(data=st.data())
async def test_an_answer_with_changed_bytes_is_heard_as_without_a_form(data: st.DataObject) -> None:
    answer = bytearray(LIKE)
    for _ in range(data.draw(st.integers(1, 3))):
        answer[data.draw(st.integers(0, len(answer) - 1))] = data.draw(st.integers(0, 255))
    await equal(bytes(answer))


@pytest.mark.parametrize(
    "answer",
    [
        LEARNED.replace(b"\r\nserver", b"\r\nConnection: close\r\nserver"),
        LEARNED.replace(b"content-length: 2", b"content-length: 2\r\ncontent-length: 2"),
        LEARNED.replace(b"server: uvicorn", b"server: uvicorn\r\nserver: other"),
        LEARNED.replace(b"server: uvicorn", b"server: " + b"x" * 3000),
        LEARNED.replace(b"200 OK", b"404 Not Found"),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    ],
)
async def test_an_answer_that_is_no_plain_one_is_not_learned(answer: bytes) -> None:
    form = AnswerForm()
    await heard_of(form, answer)
    assert form.whole(answer) is None


async def test_a_sink_that_refuses_an_answer_gets_its_own_error() -> None:
    class Refusing(Heard):
        def head(self, status: int, headers: Headers) -> None:
            raise EngineError("too large")

    transport, heard = Transport(), Refusing()
    connection = EngineConnection("engine", lambda _: None, lambda _: None, await learned())
    connection.connection_made(transport)
    connection.send(b"", heard)
    connection.data_received(LIKE)
    assert str(heard.error) == "too large"
    assert transport.closing
