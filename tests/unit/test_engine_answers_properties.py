"""Generated answers of engines in generated reads: bytes and their order are right, whatever looks
like a chunk and is none.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.fakes.legs import CHUNKED, HEAD, LAST, LIKE, OK, Heard, Reference, Wire, answered

EVENT = b'data: {"x":1}\n\n'
PIECES = st.one_of(
    st.sampled_from(
        [LIKE, LAST, b"\r\n", b"0\r\n", b"f\r\n" + EVENT + b"\r\n", b"a\r\n", OK, CHUNKED, EVENT]
    ),
    st.binary(min_size=1, max_size=20),
)
"""What payloads are made of: most of it would be something else at another place."""
LINES = st.sampled_from([b"%x", b"%x", b"%x", b"%X", b"00%x", b"%x;a=b", b'%x;a="5"', b"%x;5"])
TRAILERS = st.sampled_from([b"", b"", b"x: y\r\n", b"x: 5\r\ny: 0\r\n"])
SETTINGS = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Made:
    """An answer in parts; a network that joins nothing has each end of a part as the end of a
    read.
    """

    parts: tuple[bytes, ...]
    body: bytes
    kept: bool = True

    @property
    def data(self) -> bytes:
        return b"".join(self.parts)


@st.composite
def chunked(draw: st.DrawFn) -> Made:
    """An answer in chunks: canonical ones whole as a part, and others as a line, the payload's
    pieces and its end.
    """
    parts, body = [CHUNKED], b""
    for pieces in draw(st.lists(st.lists(PIECES, min_size=1, max_size=4), max_size=5)):
        payload, line = b"".join(pieces), draw(LINES)
        body += payload
        if line == b"%x" and draw(st.booleans()):
            parts.append(b"%x\r\n%b\r\n" % (len(payload), payload))
        else:
            parts += [line % len(payload) + b"\r\n", *pieces, b"\r\n"]
    parts += [draw(st.sampled_from([b"0\r\n", b"0;5\r\n", b"00\r\n"])), draw(TRAILERS) + b"\r\n"]
    return Made(tuple(parts), body)


@st.composite
def framed(draw: st.DrawFn) -> Made:
    """An answer with a length, or until the end."""
    pieces = draw(st.lists(PIECES, min_size=1, max_size=5))
    body = b"".join(pieces)
    kept = draw(st.booleans())
    head = HEAD + (b"content-length: %d\r\n" % len(body) if kept else b"") + b"\r\n"
    return Made((head, *pieces), body, kept)


ANSWERS = st.one_of(chunked(), chunked(), framed())


@st.composite
def reads_of(draw: st.DrawFn, parts: tuple[bytes, ...]) -> list[bytes]:
    """Parts as reads, where some ends are joined and some cuts are anywhere."""
    data = b"".join(parts)
    ends = list(accumulate(map(len, parts)))
    joined = draw(st.sets(st.sampled_from(ends), max_size=len(ends) // 2))
    cuts = draw(st.lists(st.integers(0, len(data)), max_size=3))
    return split(data, sorted({0, len(data), *cuts, *(end for end in ends if end not in joined)}))


def split(data: bytes, bounds: list[int]) -> list[bytes]:
    return [data[one:two] for one, two in pairwise(bounds)]


ANSWERS_IN_READS = ANSWERS.flatmap(lambda made: st.tuples(st.just(made), reads_of(made.parts)))


@SETTINGS
@given(st.lists(ANSWERS_IN_READS, min_size=1, max_size=3))
def test_answers_on_one_connection(answers: list[tuple[Made, list[bytes]]]) -> None:
    """One after the other, each is heard whole, byte for byte, with as many calls as reads at most,
    until one ends it.
    """

    async def check() -> None:
        wire = Wire()
        for made, reads in answers:
            heard = wire.ask(Heard(), reads)
            if not made.kept:
                wire.leave()
            assert (heard.body, heard.ending) == (made.body, "whole")
            if not made.kept:
                return
            assert wire.connection.usable
        assert wire.freed == len(answers)

    asyncio.run(check())


@SETTINGS
@given(st.data())
def test_answers_with_a_mistake(data: st.DataObject) -> None:
    """A byte that is changed, lost or too much is seen as the parser alone sees it, in any reads:
    nothing is guessed.
    """
    made = data.draw(ANSWERS)
    number = data.draw(st.integers(1, len(made.parts) - 1))
    part = made.parts[number]
    at = data.draw(st.one_of(st.integers(0, 4), st.integers(0, max(len(part) - 1, 0)))) % max(
        len(part), 1
    )
    new = data.draw(
        st.sampled_from(
            [
                b"",
                b"\r",
                b"\n",
                b"\r\n",
                b" ",
                b"+",
                b"_",
                b"0",
                b"5",
                b"A",
                b";",
                b"x",
                b"\x00",
                LIKE,
            ]
        )
    )
    drop = data.draw(st.integers(0, 1))
    parts = (*made.parts[:number], part[:at] + new + part[at + drop :], *made.parts[number + 1 :])
    same(b"".join(parts), data.draw(reads_of(parts)))


def same(data: bytes, reads: list[bytes]) -> None:
    """Assert that an answer is heard as the parser alone hears it in one piece."""
    reference = Reference(data)

    async def check() -> None:
        status, body, ending, _ = answered(reads)
        assert (status, body, ending) == (reference.status, reference.body, reference.ending)

    asyncio.run(check())


@SETTINGS
@given(
    st.lists(
        st.sampled_from(
            [LIKE, LAST, b"5", b"\r", b"\n", b"\r\n", b"0", b"1", b"a", b"hello", b";", b"x: "]
        ),
        max_size=9,
    )
)
@example([b"1", LIKE, LIKE, b"\r\n", LAST])
@example([b"a\r\n", LIKE, b"\r\n", LAST])
@example([LIKE, b"0", b"\r\n", b"\r\n"])
def test_any_order_of_what_looks_right(reads: list[bytes]) -> None:
    """Reads that could stand at many places: what they are is decided by the parser's state
    alone.
    """
    same(CHUNKED + b"".join(reads), [CHUNKED, *reads])


@pytest.mark.parametrize("size", [1, 9, 10, 15, 16, 255, 256, 4095, 4096, 65535, 65536])
@pytest.mark.parametrize("style", [b"%x", b"%X", b"0%x", b"%x;a"])
async def test_sizes_of_chunks(style: bytes, size: int) -> None:
    """Chunks of every number of digits, each in its own read, cut behind its line, before its end,
    and two at once.
    """
    payload = (LIKE * (size // 10 + 1))[:size]
    line = style % size + b"\r\n"
    whole = line + payload + b"\r\n"
    reads = [
        CHUNKED,
        whole,
        line,
        payload,
        b"\r\n",
        whole[:-1],
        whole[-1:],
        whole[:-2],
        whole[-2:],
        whole + whole,
        LAST,
    ]
    assert answered(reads) == (200, payload * 6, "whole", True)
