"""Inside a process process: it reads questions with data from its standard input, and writes
answers to its standard output.

Owns the frames between `kit.process_pool` and a process, and the limits that a process sets for
itself before its first question.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable

from pdproxy.kit import core_dumps

QUESTION = struct.Struct(">IQ")
"""Before a question: its size and that of the data behind it, in bytes."""
ANSWER = struct.Struct(">?Q")
"""Before an answer: whether there was memory for it, and its size in bytes."""
NICE = 10
"""Added to the niceness of a process, so that the serving process runs first."""


def work(answer: Callable[[bytes, bytes], bytes]) -> None:
    """Answer questions until standard input ends. The first argument of the command line limits the
    memory, in bytes.
    """
    _set_limits(int(sys.argv[1]))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while len(head := source.read(QUESTION.size)) == QUESTION.size:
        sizes = QUESTION.unpack(head)
        try:
            question, data = (source.read(size) for size in sizes)
            if len(data) < sizes[1]:
                return
            found, enough = answer(question, data), True
        except MemoryError:
            found, enough = b"", False
        sink.write(ANSWER.pack(enough, len(found)))
        sink.write(found)
        sink.flush()
        if not enough:
            return  # the memory is not free yet, and the rest of the data may still be in the input
        question = data = found = b""


def _set_limits(memory: int) -> None:
    # Ctrl-C is for the parent process, which closes the input
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICE)
    with contextlib.suppress(ValueError, OSError):  # a lower limit applies already
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    core_dumps.forbid()
