"""Several proxies at one port that share nothing: what workers are compared with, to see what
sharing costs.

Usage: apart.py COUNT OPTIONS...

OPTIONS are those of `pdproxy serve`. Each process accepts a part of the connections, as workers do,
and knows nothing of the others. Two processes with half of a load each cost more than one with all
of it, whatever they share: each wakes up as often for fewer events, and the machine's caches hold
two of everything.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial

from pdproxy.app import listening
from pdproxy.cli.main import main as pdproxy


def main() -> int:
    """Fork the processes, pass SIGTERM on, and return the largest exit code."""
    count, arguments = int(sys.argv[1]), sys.argv[2:]
    listening.listen = partial(listening.listen, together=True)
    pids: list[int] = []
    for _ in range(count):
        pid = os.fork()
        if not pid:
            os._exit(pdproxy(["serve", *arguments]))
        pids.append(pid)

    def pass_on(number: int, _: object) -> None:
        for pid in pids:
            os.kill(pid, number)

    signal.signal(signal.SIGTERM, pass_on)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


if __name__ == "__main__":
    sys.exit(main())
