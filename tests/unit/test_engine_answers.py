"""Answers of engines, right and wrong, in all their framings: heard the same however the network
cuts them into reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.fakes.legs import CHUNKED, HEAD, LAST, LIKE, OK, Heard, Outcome, Wire, answered, halves

EARLY = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
HELLO = LIKE + LAST


@dataclass(frozen=True)
class Case:
    """An answer, what is heard of it, and whether its connection is kept."""

    name: str
    data: bytes
    outcome: Outcome


def good(
    name: str, data: bytes, body: bytes = b"hello", *, status: int = 200, kept: bool = True
) -> Case:
    return Case(name, data, (status, body, "whole", kept))


def bad(name: str, data: bytes, body: bytes = b"", *, status: int = 200) -> Case:
    return Case(name, data, (status, body, "failed", False))


def refused(name: str, data: bytes) -> Case:
    return bad(name, data, status=0)


def coded(coding: bytes) -> bytes:
    return HEAD + b"transfer-encoding: " + coding + b"\r\n\r\n"


def broken(name: str, chunks: bytes, body: bytes = b"") -> Case:
    return bad(name, CHUNKED + chunks, body)


FRAMINGS = [
    good("a length", OK, b"ok"),
    good("a length with blanks around it", HEAD + b"content-length: \t 2 \r\n\r\nok", b"ok"),
    good("a length of 0", HEAD + b"content-length: 0\r\n\r\n", b""),
    good("chunks", CHUNKED + HELLO),
    good("no chunk but the last", CHUNKED + LAST, b""),
    good("chunks, written large", HEAD + b"Transfer-Encoding: CHUNKED\r\n\r\n" + HELLO),
    good("chunks twice over", coded(b"chunked, chunked") + HELLO),
    good("a coding and chunks", coded(b"gzip, chunked") + HELLO),
    good("an upper-case size", CHUNKED + b"A\r\n0123456789\r\n" + LAST, b"0123456789"),
    good("leading zeros", CHUNKED + b"0005\r\nhello\r\n000\r\n\r\n"),
    good("many leading zeros", CHUNKED + b"0" * 40 + HELLO),
    good("extensions", CHUNKED + b"5;a=b\r\nhello\r\n0;x\r\n\r\n"),
    good("a quoted extension", CHUNKED + b'5;a="5;\\"x"\r\nhello\r\n' + LAST),
    good("a trailer", CHUNKED + LIKE + b"0\r\nx-sum: 5\r\ny: z\r\n\r\n"),
    good("until the end", HEAD + b"\r\nhello", kept=False),
    good("nothing until the end", HEAD + b"\r\n", b"", kept=False),
    good("until the end, though kept", HEAD + b"connection: keep-alive\r\n\r\nhello", kept=False),
    good("100 before", CONTINUE + OK, b"ok"),
    good("100 and 103 before", CONTINUE + EARLY + b"\r\n" + CHUNKED + HELLO),
    good("103 twice before", (EARLY + b"\r\n") * 2 + OK, b"ok"),
    good("204", b"HTTP/1.1 204 No Content\r\n\r\n", b"", status=204),
    good("304 with the length of what is not sent",
    b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n", b"", status=304),
    good("205", b"HTTP/1.1 205 Reset Content\r\ncontent-length: 0\r\n\r\n", b"", status=205),
    good("an error", b"HTTP/1.1 503 Busy\r\ncontent-length: 5\r\n\r\nhello", status=503),
    good("no reason", b"HTTP/1.1 200\r\ncontent-length: 5\r\n\r\nhello"),
    good("a reason of several words",
    b"HTTP/1.1 200 All is well\r\ncontent-length: 5\r\n\r\nhello"),
    good("HTTP/1.0", b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", b"ok", kept=False),
    good("HTTP/1.0, kept",
    b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nok", b"ok"),
    good("HTTP/1.0 until the end", b"HTTP/1.0 200 OK\r\n\r\nhello", kept=False),
    good("close", HEAD + b"connection: close\r\ncontent-length: 5\r\n\r\nhello", kept=False),
    good("close in a list", HEAD + b"connection: x, Close\r\ncontent-length: 5\r\n\r\nhello",
    kept=False),
    good("an offer to upgrade",
    HEAD + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\nok", b"ok"),
    good("empty lines before", b"\r\n\r\n" + OK, b"ok"),
]  # fmt: skip
BEHIND = [
    good("a second answer", OK + OK, b"ok", kept=False),
    good("a second answer in chunks", CHUNKED + HELLO + CHUNKED + HELLO, kept=False),
    good("garbage behind a length", OK + b"garbage", b"ok", kept=False),
    good("garbage behind chunks", CHUNKED + HELLO + b"\x00\x01", kept=False),
    good("a chunk behind chunks", CHUNKED + HELLO + LIKE, kept=False),
    good("a body of a 204", b"HTTP/1.1 204 No\r\ncontent-length: 2\r\n\r\nok", b"", status=204,
    kept=False),
    good("chunks of a 204", b"HTTP/1.1 204 No\r\ntransfer-encoding: chunked\r\n\r\n" + HELLO, b"",
    status=204, kept=False),
    good("a body of a 304", b"HTTP/1.1 304 No\r\ncontent-length: 2\r\n\r\nok", b"", status=304,
    kept=False),
]  # fmt: skip
WRONG = [
    refused("nothing", b""),
    refused("half a head", HEAD + b"content-length: 2\r\n"),
    refused("an interim answer alone", CONTINUE),
    refused("a body of a 103", EARLY + b"content-length: 3\r\n\r\nabc" + OK),
    refused("chunks of a 103", EARLY + b"transfer-encoding: chunked\r\n\r\n" + HELLO + OK),
    refused("another protocol",
    b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" + OK),
    refused("no HTTP", b"\x16\x03\x01 what is this\r\n\r\n"),
    refused("HTTP/3.7", OK.replace(b"/1.1", b"/3.7")),
    refused("a status of letters", OK.replace(b"200", b"2x0")),
    refused("a status below 100", OK.replace(b"200", b"099")),
    refused("a length and chunks",
    HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n" + HELLO),
    refused("chunks and a length",
    HEAD + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n" + HELLO),
    refused("two lengths", HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\nok!"),
    *(
        refused(f"a length of {length!r}", HEAD + b"content-length: " + length + b"\r\n\r\nok")
        for length in (b"+2", b"-2", b"0x2", b"0_2", b"2, 2", b"2 2", b"2;", b"9" * 30)
    ),
    refused("a header that goes on", HEAD + b"x: a\r\n b\r\ncontent-length: 2\r\n\r\nok"),
    refused("a name and a blank", HEAD + b"content-length : 2\r\n\r\nok"),
    refused("bare line feeds", OK.replace(b"\r\n", b"\n")),
    refused("one bare line feed", OK.replace(b"2\r\n", b"2\n")),
    refused("a NUL", HEAD + b"x: a\0b\r\ncontent-length: 2\r\n\r\nok"),
    bad("half a body", HEAD + b"content-length: 5\r\n\r\nhell", b"hell"),
    bad("chunked, but not last", coded(b"chunked, gzip") + HELLO, HELLO),
    bad("a coding alone", coded(b"gzip") + b"hello", b"hello"),
    bad("an unknown coding", coded(b"xchunked") + HELLO, HELLO),
    *(
        broken(f"a size of {size!r}", size + b"\r\nhello\r\n" + LAST)
        for size in (b"", b"+5", b"-5", b"0x5", b"0_5", b" 5", b"5 ", b"5\t", b"\x0b5", b"5 ;a=b",
        b"5,", b"\xb55", b"g")
    ),
    broken("a size beyond 64 bits", b"1" + b"0" * 16 + b"\r\nhello"),
    broken("bare line feeds in chunks", b"5\nhello\n0\n\n"),
    broken("a bare line feed behind a payload", b"5\r\nhello\n" + LAST, b"hello"),
    broken("a bare carriage return behind a payload", b"5\r\nhello\r" + LAST, b"hello"),
    broken("a bare line feed in an extension", b"5;a\nhello\r\n" + LAST),
    broken("a carriage return in an extension", b"5;a\rb\r\nhello\r\n" + LAST),
    broken("a NUL in an extension", b"5;\0\r\nhello\r\n" + LAST),
    broken("a payload longer than its size", b"3\r\nhello\r\n" + LAST, b"hel"),
    broken("a payload shorter than its size", b"6\r\nhello\r\n" + LAST, b"hello\r"),
    broken("half a size", b"5"),
    broken("half a payload", b"5\r\nhel", b"hel"),
    broken("no last chunk", LIKE, b"hello"),
    broken("half the last chunk", LIKE + b"0\r\n", b"hello"),
    broken("a trailer that goes on", LIKE + b"0\r\nx: y\r\n z\r\n\r\n", b"hello"),
    broken("a length in a trailer", LIKE + b"0\r\ncontent-length: 5\r\n\r\n", b"hello"),
]  # fmt: skip
KEPT = [case for case in FRAMINGS if case.outcome[3]]
SECONDS = [
    good("a length", HEAD + b"content-length: 20\r\n\r\n" + LIKE + LIKE, LIKE + LIKE),
    good("chunks", CHUNKED + HELLO),
    good("until the end", HEAD + b"\r\n" + LIKE + LAST, LIKE + LAST, kept=False),
    good("204", b"HTTP/1.1 204 No Content\r\n\r\n", b"", status=204),
]


def named(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", [*FRAMINGS, *BEHIND, *WRONG], ids=named)
async def test_an_answer_at_every_cut(case: Case) -> None:
    """In one read, in any two, and byte by byte, an answer is the same, and its connection kept or
    not.
    """
    assert answered([case.data]) == case.outcome
    for reads in halves(case.data):
        assert answered(reads) == case.outcome, reads


@pytest.mark.parametrize("second", SECONDS, ids=named)
async def test_no_answer_leaves_a_trace_in_the_next(second: Case) -> None:
    """Whatever an answer was like, the next one on its connection is read by its own head, at every
    cut.
    """
    for first in KEPT:
        for reads in ([second.data], *halves(second.data)):
            assert answered(reads, [first.data]) == second.outcome, (first.name, reads)


# -- reads that look like chunks

LENGTH_20 = HEAD + b"content-length: 20\r\n\r\n"
LOOKALIKES: dict[str, tuple[list[bytes], Outcome]] = {
    "they are": ([CHUNKED, LIKE, LIKE, LAST], (200, b"hellohello", "whole", True)),
    "two in a read": ([CHUNKED, LIKE + LIKE, LIKE + LAST], (200, b"hello" * 3, "whole", True)),
    "behind the head in its read": ([CHUNKED + LIKE, LIKE, LAST], (200, b"hellohello", "whole",
    True)),
    "inside a chunk": ([CHUNKED, b"1e\r\n", LIKE, LIKE, LIKE, b"\r\n", LAST], (200, LIKE * 3,
    "whole", True)),
    "the end of a chunk": ([CHUNKED, b"f\r\nabcde", LIKE, b"\r\n", LIKE, LAST], (200,
    b"abcde" + LIKE + b"hello", "whole", True)),
    "behind a size's carriage return": ([CHUNKED, b"a\r", b"\n", LIKE, b"\r\n", LAST], (200, LIKE,
    "whole", True)),
    "behind half a size": ([CHUNKED, b"1", LIKE, b"x" * 14, b"\r\n", LAST], (200,
    b"hello\r\n" + b"x" * 14, "whole", True)),
    "behind zeros of a size": ([CHUNKED, b"00", LIKE, LAST], (200, b"hello", "whole", True)),
    "behind an extension's sign": ([CHUNKED, b"a;x=", LIKE, b"abc\r\n", LAST], (200,
    b"hello\r\nabc", "whole", True)),
    "between a payload and its end": ([CHUNKED, b"5\r\nworld", LIKE, LAST], (200, b"world",
    "failed", False)),
    "in the middle of a payload's end": ([CHUNKED, b"5\r\nworld\r", LIKE, LAST], (200, b"world",
    "failed", False)),
    "behind a late end": ([CHUNKED, b"5\r\nworld", b"\r\n", LIKE, LAST], (200, b"worldhello",
    "whole", True)),
    "behind a late end in two": ([CHUNKED, b"5\r\nworld", b"\r", b"\n", LIKE, LAST], (200,
    b"worldhello", "whole", True)),
    "in a body with a length": ([LENGTH_20, LIKE, LIKE], (200, LIKE * 2, "whole", True)),
    "behind a body with a length": ([LENGTH_20, LIKE, LIKE, LIKE], (200, LIKE * 2, "whole", False)),
    "in a body without a frame": ([HEAD + b"\r\n", LIKE, LAST, LIKE], (200, LIKE + LAST + LIKE,
    "whole", False)),
    "where chunked is not last": ([coded(b"chunked, gzip"), LIKE, LAST], (200, LIKE + LAST,
    "failed", False)),
    "before a head": ([LIKE, CHUNKED, LAST], (0, b"", "failed", False)),
    "in a header": ([HEAD + b"x: ", LIKE, b"\r\n", LAST], (0, b"", "failed", False)),
    "behind a header": ([HEAD + b"transfer-encoding: chunked\r\n", LIKE, b"\r\n", LAST], (0, b"",
    "failed", False)),
    "behind an interim answer": ([EARLY + b"transfer-encoding: chunked\r\n\r\n", LIKE, LAST], (0,
    b"", "failed", False)),
    "behind a 204": ([b"HTTP/1.1 204 No\r\ntransfer-encoding: chunked\r\n\r\n", LIKE, LAST], (204,
    b"", "whole", False)),
    "in trailers": ([CHUNKED, LIKE, b"0\r\n", LIKE, b"\r\n"], (200, b"hello", "failed", False)),
    "in a trailer": ([CHUNKED, LIKE, b"0\r\nx: ", LIKE, b"\r\n"], (200, b"hello", "failed", False)),
    "behind the last": ([CHUNKED, LAST, LIKE], (200, b"", "whole", False)),
    "behind the last, in its read": ([CHUNKED, LIKE, LAST + LIKE], (200, b"hello", "whole", False)),
    "last chunks that are payload": ([CHUNKED, b"a\r\n", LAST, LAST, b"\r\n", LAST], (200, LAST * 2,
    "whole", True)),
    "the last in parts": ([CHUNKED, LIKE, b"0", b"\r\n", b"\r\n"], (200, b"hello", "whole", True)),
    "the last with zeros": ([CHUNKED, LIKE, b"00\r\n\r\n"], (200, b"hello", "whole", True)),
    "the last with a trailer": ([CHUNKED, LIKE, b"0\r\n", b"a: b\r\n", b"\r\n"], (200, b"hello",
    "whole", True)),
    "then no last": ([CHUNKED, LIKE, LIKE], (200, b"hellohello", "failed", False)),
    "then garbage": ([CHUNKED, LIKE, b"\x00"], (200, b"hello", "failed", False)),
    "then another answer": ([CHUNKED, LIKE, OK], (200, b"hello", "failed", False)),
    "line ends as payload": ([CHUNKED, b"7\r\nhello\r\n\r\n", b"2\r\n\r\n\r\n", LAST], (200,
    b"hello\r\n\r\n", "whole", True)),
    "more digits": ([CHUNKED, b"10\r\n" + b"x" * 16 + b"\r\n", LAST], (200, b"x" * 16, "whole",
    True)),
    "much": ([CHUNKED, b"40000\r\n" + LIKE * 26214 + b"1234\r\n", LIKE, LAST], (200,
    LIKE * 26214 + b"1234hello", "whole", True)),
}  # fmt: skip
ALMOST = [
    b"4\r\nhello\r\n", b"6\r\nhello\r\n", b"5\r\nhello\n\n", b"5\r\nhello\r\r", b"5\r\nhello\n\r",
    b"5\r\nhelloxx",
    b"5\n\nhello\r\n",
    b"5\r\rhello\r\n", b"5xxhello\r\n", b"+5\r\nhello\r\n", b"-5\r\nhello\r\n", b" 5\r\nhello\r\n",
    b"5 \r\nhello\r\n",
    b"0x5\r\nhello\r\n", b"0_5\r\nhello\r\n", b"5_\r\nhello\r\n", b"\xb5\r\nhello\r\n",
    b"\r\nhello\r\n", b"g\r\nhello\r\n",
    b"5\r\nhello\r\n\r\n", b"1" + b"0" * 15 + b"5\r\nhello\r\n", b"5\x00\r\nhello\r\n",
    b"5;\r\nhello\r\n",
]  # fmt: skip


@pytest.mark.parametrize("name", LOOKALIKES)
async def test_reads_that_look_like_chunks(name: str) -> None:
    """What a read is depends on those before it, and not on its looks; in one piece the answer is
    the same.
    """
    reads, outcome = LOOKALIKES[name]
    assert answered(reads) == outcome
    assert answered([b"".join(reads)]) == outcome
    assert answered(reads, [CHUNKED, LIKE, LAST]) == outcome
    assert answered(reads, [LENGTH_20, LIKE, LIKE]) == outcome


@pytest.mark.parametrize("read", ALMOST, ids=repr)
@pytest.mark.parametrize(
    "before",
    [[CHUNKED], [CHUNKED, LIKE], [CHUNKED + LIKE]],
    ids=["first", "second", "behind a head"],
)
async def test_reads_that_are_almost_a_chunk(before: list[bytes], read: bytes) -> None:
    """No leniency, wherever such a read stands: nothing behind the mistake is heard."""
    status, body, ending, kept = answered([*before, read, LAST])
    assert (status, ending, kept) == (200, "failed", False)
    assert body == answered([b"".join([*before, read, LAST])])[1]


@pytest.mark.parametrize("at", [1, 2, 3])
async def test_a_leg_that_is_closed_while_it_hears(at: int) -> None:
    """A sink that gives up in the middle of its data hears nothing more, neither of that read nor
    of later ones.
    """
    wire = Wire()
    heard = Heard(lambda: leg.close() if len(heard.parts) == at else None)
    leg = wire.connection.send(b"x", heard)
    for read in (CHUNKED, LIKE, LIKE, LIKE + LAST):
        if not wire.transport.closing:
            wire.connection.data_received(read)
    wire.leave()
    assert (heard.body, heard.ending) == (b"hello" * at, None)
    assert (wire.freed, wire.lost, wire.transport.closing) == (0, 1, True)


async def test_a_trailer_is_no_header_of_an_answer() -> None:
    """What stands behind the body is not added to the headers that were given out."""
    heard = Wire().ask(Heard(), [CHUNKED, LIKE, b"0\r\ncontent-type: text/html\r\n\r\n"])
    assert heard.ending == "whole"
    assert heard.given == heard.headers == [(b"transfer-encoding", b"chunked")]
