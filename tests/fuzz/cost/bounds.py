"""What each path may cost, and why: the one table of bounds for the search and for the test."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Bound:
    """What a path may cost, beside what the input itself takes.

    `ns`: nanoseconds of CPU time per byte in the event loop's thread. `ms`: milliseconds of one
    turn, at any size. `memory`: bytes per byte, beside `free`. `steps`: lines of Python and calls
    into C per byte, beside `FREE_STEPS`, for the test, which looks at no clock. `made`: bytes that
    are written for others (log lines), at any size. Times are those of the nominal machine
    (`measure.NOMINAL_NS`).
    """

    ns: float
    ms: float
    memory: float
    steps: float
    why: str
    made: int = 4 * KIB
    free: int = 2 * MIB
    """Bytes of memory that any input may take: what is built at the first use, and buffers of one
    read.
    """


FREE_STEPS = 4_000
"""Steps that any input may take: those of the event loop and of building a connection among
them.
"""

# The target: beside a hostile client, a turn of the loop takes under 100 ms in 99 of 100 cases, and
# memory stays under 300 MB beside the buffered bodies, of which an idle proxy takes 90 MB.
BODY = Bound(
    ns=70, ms=50, memory=3, steps=0.2, free=4 * MIB,
    why="a turn takes half of the target, so that two may meet; 64 MiB three times over fit "
        "between 90 and 300 MB; up to 72 KiB "
    "are read at once, whatever they hold, in 4 ms and 4 MiB; a chat of messages of 30 bytes has "
    "0.15 steps per byte",
)  # fmt: skip
PASSED = Bound(
    ns=70,
    ms=50,
    memory=3,
    steps=0.2,
    free=4 * MIB,
    why="as a generating body; what is written anew is one of the three",
)
FORM = Bound(
    ns=20,
    ms=10,
    memory=3,
    steps=0.2,
    why="a file is searched in slices of 128 KiB, 11 ns per byte at worst, and not copied; the "
    "fields besides it, 256 KiB, are copied three times",
)
READER = Bound(
    ns=120, ms=8000, memory=5, steps=2, free=150 * MIB,
    why="a body of 64 MiB is read in the 10 s of `deadlines.read_body`; a reader process may "
        "have six times the largest body, "
    "the body itself among them, and 256 MiB, of which the interpreter takes some 50 and the "
    "items of one body up to 100",
)  # fmt: skip
LOG = Bound(
    ns=70, ms=50, memory=3, steps=0.2, made=4 * KIB, free=4 * MIB,
    why="4 KiB hold every field of a line at its longest that somebody would want to read; the "
        "rest as a body",
)  # fmt: skip
INGRESS = Bound(
    ns=150, ms=50, memory=1.5, steps=5,
    why="a chunk of a byte costs the parser's callback and its room (27 steps, 0.3 us) in 6 "
        "bytes, until 65,536 of them are "
    "refused; two reads of 256,000 bytes fit into 100 ms; a body is kept once, in a buffer that "
    "grows by an eighth",
)  # fmt: skip
STREAM = Bound(
    ns=60, ms=40, memory=4.5, steps=1.5, free=8 * MIB,
    why="a plain event of 180 bytes costs 5 us, one of 130 that is looked at by itself 190 "
        "steps, a chunk of a byte 5 steps in "
    "6 bytes; a read of 256,000 bytes leaves room for another in 100 ms; a large event is kept, "
    "joined, "
    "split and passed on; a line of up to 256 KiB is copied 6 times",
)  # fmt: skip
ANSWER = Bound(
    ns=60, ms=20, memory=2.2, steps=0.9, free=8 * MIB,
    why="as a stream; an answer is kept in one buffer and then, for a moment, as a whole, too; a "
        "head of 256 KiB takes 25 bytes "
    "per byte",
)  # fmt: skip
ENGINE_JSON = Bound(
    ns=12,
    ms=50,
    memory=3,
    steps=0.05,
    why="as long as bodies may be (logprobs), and read in one turn",
)
MERGED = Bound(
    ns=24,
    ms=50,
    memory=7,
    steps=0.1,
    why="two answers, their parts, and the one that is made of them",
)
METRICS = Bound(
    ns=150, ms=20, memory=3, steps=0.05,
    why="a page of 60 KB may be lines that are read to its end, and is then too large; an "
        "engine's has a dozen of them, and a "
    "byte of it costs 10 ns: 200 engines' pages, read every 5 s, are 3 % of a core",
)  # fmt: skip
NOTICE = Bound(
    ns=40,
    ms=50,
    memory=3,
    steps=0.1,
    why="1 MiB is read in one turn, and may take half of the target",
)
