"""The process of one run: options as JSON on standard input, the result as JSON on standard output.

A run has a process of its own, since the machine's time and chance are replaced for all of it, and
since a crash or an endless loop must end one run only.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import resource
import sys
import time
from pathlib import Path

import msgspec

from tests.chaos.course import Result, run
from tests.chaos.finding import Finding
from tests.chaos.options import Options
from tests.chaos.trace import Trace

EPOCH = 1_700_000_000.0
"""Seconds since 1970 at which a run begins. An engine's start time tells its runs apart, so it must
follow virtual time.
"""
CPU_LIMIT = 120
"""CPU seconds of a run."""
TRACE = "PDPROXY_CHAOS_TRACE"
"""The environment variable that names a file for the trace."""


def main() -> None:
    """Run, and print the result."""
    options = msgspec.json.decode(sys.stdin.buffer.read(), type=Options)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT, CPU_LIMIT + 5))
    _replace(options.seed)
    logging.raiseExceptions = False
    name = os.environ.get(TRACE)
    trace = Trace(Path(name) if name else None)
    begun = time.process_time()
    gc.disable()  # a collection at another place would run finalizers there
    try:
        result = run(options, trace)
    except Exception as error:  # reported as what it is: a defect of the instrument or of the proxy
        result = Result(
            [Finding("the run ends", f"{type(error).__name__}: {error} {_where(error)}")],
            trace.digest,
        )
    result.cpu = time.process_time() - begun
    trace.close()
    sys.stdout.buffer.write(msgspec.json.encode(result))
    sys.stdout.flush()
    os._exit(0)  # what is left of the loop would only be reported


def _replace(seed: int) -> None:
    """Have the process's time and chance follow the virtual loop and the seed."""
    import asyncio

    chance = random.Random(f"{seed}/system")
    os.urandom = chance.randbytes
    random.seed(f"{seed}/library")

    def now() -> float:
        return EPOCH + asyncio.get_event_loop_policy().get_event_loop().time()

    time.time = now


def _where(error: BaseException) -> str:
    trace, found = error.__traceback__, ""
    while trace is not None:
        found = f"at {trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


if __name__ == "__main__":
    main()
