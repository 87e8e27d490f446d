"""Runs one program and lets nothing of it outlive whoever started it: `guard.py GRACE PROGRAM
[ARGUMENT ...]`.

Leads a session of its own, so that a signal from the terminal reaches only the demo, and everything
the program starts can be killed as one group. When standard input ends (the demo closed it, or is
gone, however it went), the program gets SIGTERM and `GRACE` seconds. Whatever ends it, the whole
group is killed last, this guard with it. Standard library only.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from types import FrameType

_LOOK_EVERY = 0.2


def _stay(number: int, frame: FrameType | None) -> None:
    """Take a signal and go on. A handler, since an ignored signal would be ignored by the program,
    too.
    """


def main() -> None:
    """Run the program to its end, or to ours."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stay)
    grace, command = float(sys.argv[1]), sys.argv[2:]
    try:
        program = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603 - it is what we are for
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return
    while program.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], _LOOK_EVERY)
        if readable and not os.read(sys.stdin.fileno(), 1024):
            program.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(grace)
            break
    else:
        sys.stderr.write(f"{command[0]} exited with {program.returncode}\n")
        sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
