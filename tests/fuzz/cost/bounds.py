"""What each path may cost, and why: the one table of bounds for the search and for the test."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Bound:
    """What a path may cost, beside what the input itself takes.

    `ns`: nanoseconds of CPU time per byte in the event loop's thread. `ms`: milliseconds of one turn, at any size.
    `memory`: bytes per byte, beside `FREE`. `steps`: lines of Python and calls into C per byte, beside `FREE_STEPS`, for the
    test, which looks at no clock. `made`: bytes that are written for others (log lines), at any size. Times are those of the
    nominal machine (`measure.NOMINAL_NS`).
    """

    ns: float
    ms: float
    memory: float
    steps: float
    why: str
    made: int = 4 * KIB


FREE = 2 * MIB
"""Bytes of memory that any input may take: what is built at the first use, and buffers of one read."""
FREE_STEPS = 4_000
"""Steps that any input may take: those of the event loop and of building a connection among them."""

# The target: beside a hostile client, a turn of the loop takes under 100 ms in 99 of 100 cases, and memory stays under 300 MB
# beside the buffered bodies, of which an idle proxy takes 90 MB.
BODY = Bound(
    ns=30, ms=50, memory=3, steps=0.2,
    why="a turn takes half of the target, so that two may meet; 64 MiB three times over fit between 90 and 300 MB; a core reads "
    "30 MB/s; a chat of messages of 30 bytes has 0.15 steps per byte",
)  # fmt: skip
PASSED = Bound(ns=30, ms=50, memory=3, steps=0.2, why="as a generating body; what is written anew is one of the three")
LOG = Bound(
    ns=30, ms=50, memory=3, steps=0.2, made=4 * KIB,
    why="4 KiB hold every field of a line at its longest that somebody would want to read; the rest as a body",
)  # fmt: skip
INGRESS = Bound(
    ns=150, ms=50, memory=1.5, steps=1.2,
    why="a chunk of a byte may cost the parser's callback (0.5 us) in 6 bytes; two reads of 256,000 bytes fit into 100 ms; a "
    "body is kept once, in a buffer that grows by an eighth",
)  # fmt: skip
STREAM = Bound(
    ns=60, ms=20, memory=4.5, steps=0.6,
    why="a plain event of 180 bytes costs 5 us; a read of 256,000 bytes leaves room for four others in 100 ms; a large event is "
    "kept, joined, split and passed on",
)  # fmt: skip
ANSWER = Bound(
    ns=60, ms=20, memory=2.2, steps=0.6,
    why="as a stream; an answer is kept in parts and then, for a moment, as a whole, too",
)  # fmt: skip
ENGINE_JSON = Bound(ns=12, ms=50, memory=3, steps=0.05, why="as long as bodies may be (logprobs), and read in one turn")
MERGED = Bound(ns=24, ms=50, memory=7, steps=0.1, why="two answers, their parts, and the one that is made of them")
METRICS = Bound(
    ns=20, ms=20, memory=3, steps=0.05,
    why="a page is 60 KB, and 200 engines' are read every 5 s: 20 ns per byte are 5 % of a core",
)  # fmt: skip
NOTICE = Bound(ns=20, ms=50, memory=3, steps=0.1, why="all that are read in one turn take half of the target")
