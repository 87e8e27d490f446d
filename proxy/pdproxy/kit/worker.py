"""A worker process, as it is inside: it reads a question and data from its standard input, and writes the answer to its output.

Owns the frames that pass between `kit.workers` and a worker, and the bounds that a worker sets itself before its first question.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable

QUESTION = struct.Struct(">IQ")
"""Before a question: its bytes, and those of the data that follow it."""
ANSWER = struct.Struct(">?Q")
"""Before an answer: whether there was memory for it, and its bytes."""
NICE = 10
"""How far a worker stands back behind the process that serves."""


def work(answer: Callable[[bytes, bytes], bytes]) -> None:
    """Answer questions until standard input ends. The first argument of the command line bounds the memory, in bytes."""
    _bound(int(sys.argv[1]))
    take, give = sys.stdin.buffer, sys.stdout.buffer
    while len(head := take.read(QUESTION.size)) == QUESTION.size:
        sizes = QUESTION.unpack(head)
        try:
            question, data = (take.read(size) for size in sizes)
            if len(data) < sizes[1]:
                return
            found, enough = answer(question, data), True
        except MemoryError:
            found, enough = b"", False
        give.write(ANSWER.pack(enough, len(found)))
        give.write(found)
        give.flush()
        if not enough:
            return  # what was in the way of the data is still there, and some of the data may not have been read
        question = data = found = b""


def _bound(memory: int) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the process that started this one, which closes the input
    os.nice(NICE)
    for kind, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # lower bounds are in force already
            resource.setrlimit(kind, (most, most))
