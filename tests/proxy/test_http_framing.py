"""Where a request begins and ends: all framings, right and wrong, at both entries, however the
network cuts them into reads.
"""

# The socket, the engines and the service are not real here; the protocol class, uvicorn's own cycle
# and the parser are.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.fakes.legs import halves
from tests.fuzz.ingress import Ingress, Seen

GENERATING, OTHER = b"/v1/completions", b"/other"
"""A path that the data path takes, and one of the application."""
PATHS = [GENERATING, OTHER]
START = b"POST %b HTTP/1.1\r\nhost: x\r\n"
NEXT = b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = START + b"transfer-encoding: chunked\r\n\r\n"
END = b"content-length: 2\r\n\r\n{}"
CHUNKS = b"2\r\n{}\r\n0\r\n\r\n"


@dataclass(frozen=True)
class Case:
    """A request with `%b` for its path, the body that is served, None for a refusal, and whether
    another one may follow.
    """

    name: str
    data: bytes
    body: bytes | None = b"{}"
    kept: bool = True

    def at(self, path: bytes) -> bytes:
        return self.data.replace(b"%b", path) + NEXT

    def holds(self, seen: Seen, path: bytes) -> bool:
        """Tell whether what was seen is what should be."""
        method = self.data[: self.data.index(b" ")].strip()
        served = [] if self.body is None else [(method, path, self.body)]
        served += [(b"GET", b"/next", b"")] if self.kept else []
        statuses = [400] if self.body is None else [200] * len(served)
        return (seen.served, seen.statuses, seen.closed) == (served, statuses, not self.kept)


def headed(
    name: str, header: bytes, body: bytes | None = b"{}", *, kept: bool = True, end: bytes = END
) -> Case:
    return Case(name, START + header + b"\r\n" + end, body, kept)


def coded(coding: bytes, body: bytes | None = None) -> Case:
    header = b"transfer-encoding: " + coding + b"\r\n\r\n"
    return Case(f"a coding of {coding!r}", START + header + CHUNKS, body, body is not None)


def sized(length: bytes, body: bytes | None = None) -> Case:
    return Case(
        f"a length of {length!r}",
        START + b"content-length:" + length + b"\r\n\r\n{}",
        body,
        body is not None,
    )


def chunks(name: str, data: bytes, body: bytes | None = None) -> Case:
    return Case(name, CHUNKED + data, body, body is not None)


OFFER = (
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: "
    b"AAMAAABkAAQAoAAAAAIAAAAA"
)
UNFRAMED = (
    b"transfer-encoding: gzip\r\n\r\n",
    b"transfer-encoding: chunked, gzip\r\n\r\n",
    b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
)
"""The ends of heads behind which nobody can know where the body ends."""
V1_0 = START.replace(b"1.1", b"1.0")
RIGHT = [
    Case("a length", START + END),
    Case("no length", START + b"\r\n", b""),
    Case("a length of 0", START + b"content-length: 0\r\n\r\n", b""),
    sized(b" 2 ", b"{}"),
    sized(b"\t2", b"{}"),
    sized(b"002", b"{}"),
    chunks("a chunk", CHUNKS, b"{}"),
    chunks("many chunks", b"1\r\n{\r\n1\r\n \r\n1\r\n}\r\n0\r\n\r\n", b"{ }"),
    chunks("no chunk but the last", b"0\r\n\r\n", b""),
    chunks("a request as payload", b"%x\r\n%b\r\n0\r\n\r\n" % (len(NEXT), NEXT), NEXT),
    chunks("chunks as payload", b"10\r\n" + CHUNKS + b"1234\r\n0\r\n\r\n", CHUNKS + b"1234"),
    chunks("an upper-case size", b"A\r\n0123456789\r\n0\r\n\r\n", b"0123456789"),
    chunks("leading zeros", b"0" * 40 + b"2\r\n{}\r\n000\r\n\r\n", b"{}"),
    chunks("extensions", b'2;a=b;c\r\n{}\r\n0;x="y;\\"z"\r\n\r\n', b"{}"),
    chunks("trailers", b"2\r\n{}\r\n0\r\nx: y\r\nexpect: 100-continue\r\n\r\n", b"{}"),
    coded(b"CHUNKED", b"{}"),
    coded(b"gzip, chunked", b"{}"),  # the framing is clear; what is in it is no JSON
    Case("empty lines before", b"\r\n\r\n" + START + END),
    headed("Expect", b"expect: 100-Continue"),
    headed("another expectation", b"expect: 200-ok"),
    headed("h2c without a body", OFFER, b"", end=b"\r\n"),
    headed("h2c with a body", OFFER),
    headed("h2c in chunks", OFFER, end=b"transfer-encoding: chunked\r\n\r\n" + CHUNKS),
    headed("h2c that expects", OFFER + b"\r\nexpect: 100-continue"),
    headed(
        "a websocket",
        b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13",
        b"",
        end=b"\r\n",
    ),
    headed("Upgrade without Connection", b"upgrade: h2c"),
    headed("Connection without Upgrade", b"connection: upgrade"),
    headed("bytes beyond ASCII in a value", b"x: \xff"),
]
LAST = [
    headed("close", b"connection: close", kept=False),
    headed("close in a list", b"connection: x, Close", kept=False),
    Case("HTTP/1.0", V1_0 + END, kept=False),
    Case("HTTP/1.0 without a Host", b"POST %b HTTP/1.0\r\n" + END, kept=False),
    Case(
        "HTTP/1.0 that asks for keep-alive", V1_0 + b"connection: keep-alive\r\n" + END, kept=False
    ),
    Case("HTTP/1.0 that expects", V1_0 + b"expect: 100-continue\r\n" + END, kept=False),
    Case("HTTP/1.0 in chunks", V1_0 + b"transfer-encoding: chunked\r\n\r\n" + CHUNKS, kept=False),
    headed("h2c and close", b"connection: upgrade, close\r\nupgrade: h2c", kept=False),
]
"""Served, and what follows is not: neither answered nor taken for a body."""
WRONG = [
    headed("a length and chunks", b"content-length: 5", None, kept=False,
    end=b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n"),
    headed("chunks and a length", b"transfer-encoding: chunked", None, kept=False,
    end=b"content-length: 5\r\n\r\n0\r\n\r\n"),
    headed("two lengths", b"content-length: 3", None, kept=False),
    headed("a length twice", b"content-length: 2", None, kept=False),
    headed("two codings", b"transfer-encoding: chunked", None, kept=False,
    end=b"transfer-encoding: identity\r\n\r\n" + CHUNKS),
    *(sized(length) for length in (b"", b" +2", b" -2", b" 0x2", b" 0_2", b" 2, 2", b" 2 0",
    b" \x0b2", b" " + b"9" * 30)),
    *(coded(coding) for coding in (b"chunked, gzip", b"chunked, chunked", b"gzip", b"identity",
    b"xchunked", b"")),
    coded(b"chunked;x=y"),
    *(coded(coding) for coding in (b'"chunked"', b"\x0bchunked", b"chunked,")),
    *(headed(f"h2c and {end!r}", OFFER, None, kept=False, end=end + CHUNKS) for end in UNFRAMED),
    headed("a header that goes on", b"x: a\r\n b", None, kept=False),
    sized(b"\r\n 2"),
    coded(b"\r\n chunked"),
    headed("a header that goes on from the request line", b" x: y", None, kept=False),
    headed("a length, a blank, a colon", b"content-length : 2", None, kept=False, end=b"\r\n{}"),
    headed("a coding, a blank, a colon", b"transfer-encoding : chunked", None, kept=False,
    end=b"\r\n" + CHUNKS),
    Case("bare line feeds", (START + END).replace(b"\r\n", b"\n"), None, kept=False),
    headed("a bare line feed", b"x: y\nz: a", None, kept=False),
    Case("a bare line feed at the head's end", START + b"content-length: 2\r\n\n{}", None,
    kept=False),
    headed("a bare carriage return", b"x: y\rcontent-length: 2", None, kept=False),
    headed("two carriage returns", b"x: y\r", None, kept=False),
    headed("a NUL in a name", b"x\0y: z", None, kept=False),
    headed("a NUL in a value", b"x: y\0", None, kept=False),
    headed("no name", b": x", None, kept=False),
    headed("no colon", b"abc", None, kept=False),
    Case("a tab in the request line", (START + END).replace(b" HTTP", b"\tHTTP"), None, kept=False),
    Case("HTTP in lower case", (START + END).replace(b"HTTP", b"http"), None, kept=False),
    Case("HTTP/1.2", (START + END).replace(b"1.1", b"1.2"), None, kept=False),
    *(
        chunks(f"a size of {size!r}", size + b"\r\n{}\r\n0\r\n\r\n")
        for size in (b"", b"+2", b"-2", b"0x2", b"0_2", b" 2", b"2 ", b"2\t", b"\x0b2", b"2 ;a=b",
        b"2,", b"g", b"2;", b"2;a=\"")
    ),
    chunks("a size beyond 64 bits", b"1" + b"0" * 15 + b"2\r\n{}\r\n0\r\n\r\n"),
    chunks("bare line feeds in chunks", b"2\n{}\n0\n\n"),
    chunks("a bare line feed behind a payload", b"2\r\n{}\n0\r\n\r\n"),
    chunks("a bare line feed behind the last", b"2\r\n{}\r\n0\r\n\n"),
    chunks("a bare line feed in an extension", b"2;a\n{}\r\n0\r\n\r\n"),
    chunks("a carriage return in an extension", b"2;a\rb\r\n{}\r\n0\r\n\r\n"),
    chunks("a payload longer than its size", b"1\r\n{}\r\n0\r\n\r\n"),
    chunks("a payload shorter than its size", b"3\r\n{}\r\n0\r\n\r\n"),
    chunks("a length in a trailer", b"2\r\n{}\r\n0\r\ncontent-length: 9\r\n\r\n"),
    chunks("a coding in a trailer", b"2\r\n{}\r\n0\r\ntransfer-encoding: chunked\r\n\r\n"),
    chunks("a trailer that goes on", b"2\r\n{}\r\n0\r\nx: y\r\n z\r\n\r\n"),
]  # fmt: skip


def named(case: Case) -> str:
    return case.name


def ways(case: Case, path: bytes, begin: int) -> list[list[bytes]]:
    """Ways to read a request: cut in two at each place from `begin` to the one behind it, and byte
    by byte.
    """
    data = case.at(path)
    cuts = range(begin, len(data) - len(NEXT) + 2)
    return [[data[:at], data[at:]] for at in cuts] + halves(data)[-1:]


async def check(case: Case, path: bytes, reads: Sequence[Sequence[bytes]]) -> None:
    """Assert that all ways to read a request come to the same, down to the bytes that are
    answered.
    """
    ingress = Ingress()
    whole = await ingress.connection([case.at(path)])
    assert case.holds(whole, path), whole
    for pieces in reads:
        seen = await ingress.connection(pieces)
        assert (seen.served, seen.written, seen.closed) == (
            whole.served,
            whole.written,
            whole.closed,
        ), pieces


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", [*RIGHT, *LAST], ids=named)
async def test_a_right_request_at_every_cut(case: Case, path: bytes) -> None:
    """Served once, whole, and the one behind it as itself or not at all."""
    await check(case, path, ways(case, path, 1 if case in (RIGHT[0], LAST[0]) else len(START)))


@pytest.mark.parametrize("case", WRONG, ids=named)
async def test_a_wrong_request_at_every_cut(case: Case) -> None:
    """One 400 and the end of the connection: nothing of it is served, nothing in it or behind it is
    another request.
    """
    await check(case, GENERATING, ways(case, GENERATING, len(START)))
    await check(case, OTHER, ways(case, OTHER, len(case.at(OTHER)))[-1:])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [
        (b"1.1", [], 400),
        (b"1.1", [b"x", b"y"], 400),
        (b"1.1", [b"x", b"x"], 400),
        (b"1.1", [b"a b/@"], 400),
        (b"1.0", [b"x", b"y"], 400),
        (b"1.0", [b"a/"], 400),
        (b"1.0", [], 200),
        (b"1.1", [b""], 200),
        (b"1.1", [b"[::1]:8000"], 200),
        (b"1.1", [b"a-b.example:1"], 200),
    ],
)
async def test_a_request_needs_one_host(
    version: bytes, hosts: list[bytes], status: int, path: bytes
) -> None:
    """Without a Host, with two, or with one that is no host, a request of HTTP/1.1 is a 400."""
    lines = b"".join(b"Host: %b\r\n" % host for host in hosts)
    seen = await Ingress().connection([b"POST %b HTTP/%b\r\n%b%b" % (path, version, lines, END)])
    assert seen.statuses == [status]


# -- several requests, and interim answers


@pytest.mark.parametrize("first", PATHS)
async def test_a_pipeline_in_any_cuts(first: bytes) -> None:
    """Requests of both entries in all framings, sent at once or cut, are answered in order, each by
    its own answer.
    """
    second = OTHER if first == GENERATING else GENERATING
    # the service here streams what is even and answers the rest at once
    odd = b"content-length: 1\r\n\r\n{"
    parts = [
        START % first + END,
        NEXT,
        CHUNKED % second + CHUNKS,
        START % first + odd,
        START % second + END,
        NEXT,
    ]
    ingress, data = Ingress(), b"".join(parts)
    whole = await ingress.connection([data])
    assert [path for _, path, _ in whole.served] == [
        first,
        b"/next",
        second,
        first,
        second,
        b"/next",
    ]
    assert [body for _, _, body in whole.served] == [b"{}", b"", b"{}", b"{", b"{}", b""]
    assert (whole.statuses, whole.closed) == ([200] * 6, False)
    alone = [await ingress.connection([part]) for part in parts]
    assert whole.written == b"".join(seen.written for seen in alone)
    for reads in [parts, *halves(data)[::3], *halves(data)[-1:]]:
        seen = await ingress.connection(reads)
        assert (seen.served, seen.written, seen.closed) == (whole.served, whole.written, False), (
            reads
        )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "wrong",
    [b"garbage\r\n\r\n", CHUNKED % OTHER + b"zz\r\n", NEXT.replace(b"\r\n", b"\n")],
    ids=["1", "2", "3"],
)
async def test_what_is_wrong_behind_others_spoils_none_of_them(path: bytes, wrong: bytes) -> None:
    """In one read or read by read, requests before a wrong one are served and answered."""
    good = [START % path + END, CHUNKED % path + CHUNKS]
    for reads in (
        [b"".join([*good, wrong, NEXT])],
        [*good, wrong, NEXT],
        [good[0], good[1] + wrong + NEXT],
    ):
        seen = await Ingress().connection(reads)
        assert [body for _, _, body in seen.served] == [b"{}", b"{}"]
        assert seen.statuses in ([200, 200], [200, 200, 400])
        assert seen.closed


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("version", "value", "asked"),
    [
        (b"1.1", b"100-continue", True),
        (b"1.1", b"100-CONTINUE", True),
        (b"1.1", b"x", False),
        (b"1.0", b"100-continue", False),
    ],
)
async def test_who_is_asked_to_go_on(
    path: bytes, version: bytes, value: bytes, asked: bool
) -> None:
    """A 100 goes before the answer, once, to those that wait for it and know it: not to a client of
    HTTP/1.0.
    """
    head = b"POST %b HTTP/%b\r\nhost: x\r\nexpect: %b\r\ncontent-length: 2\r\n\r\n" % (
        path,
        version,
        value,
    )
    for reads in ([head, b"{}"], [head + b"{}"], [head, b"{", b"}"], halves(head + b"{}")[-1]):
        seen = await Ingress().connection(reads)
        assert seen.statuses == [200]
        assert (
            seen.written.count(b"HTTP/1.1 100 Continue\r\n\r\n")
            == seen.written.count(b" 100 ")
            == asked
        )
        assert seen.written.startswith(b"HTTP/1.1 100 " if asked else b"HTTP/1.1 200 ")


@pytest.mark.parametrize("path", PATHS)
async def test_who_is_asked_to_go_on_in_a_pipeline(path: bytes) -> None:
    """The 100 comes when the turn of its request has come, between the answers of others."""
    head = START % path + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n"
    for reads in (
        [START % path + END + head, b"{}" + NEXT],
        [START % path + END + head + b"{}" + NEXT],
    ):
        seen = await Ingress().connection(reads)
        assert seen.statuses == [200, 200, 200]
        lines = [line for line in seen.written.split(b"\r\n") if line.startswith(b"HTTP/")]
        assert [line.split(b" ")[1] for line in lines] == [b"200", b"100", b"200", b"200"]
