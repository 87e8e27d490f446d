"""Free ports for tests that must know one before anybody listens on it, or that close one and
expect nobody behind it.
"""

import itertools
import random
import socket
from collections.abc import Iterator

LOWEST, HIGHEST = 12_000, 32_000  # below those that the system gives to connections
BLOCK = 500
"""Ports that belong to one process of tests: workers and whole runs beside each other never try the
same one.
"""


def _bound(port: int, *, reuse: bool) -> socket.socket | None:
    one = socket.socket()
    try:
        if reuse:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", port))
    except OSError:
        one.close()
        return None
    return one


def _block() -> tuple[int, socket.socket]:
    """Take a block that no other process has: whoever listens on its first port owns it, until the
    process ends.
    """
    firsts = list(range(LOWEST, HIGHEST, BLOCK))
    random.shuffle(firsts)
    for first in firsts:
        if (owner := _bound(first, reuse=False)) is not None:
            owner.listen()
            return first, owner
    raise AssertionError("every block of ports is taken")


def _ports() -> Iterator[int]:
    first, owner = _block()
    with owner:
        yield from itertools.cycle(range(first + 1, first + BLOCK))


_PORTS = _ports()


def free_port() -> int:
    """Return a port that nobody listens on, and that no other test is given for a long time."""
    for port in itertools.islice(_PORTS, BLOCK):
        if (one := _bound(port, reuse=True)) is not None:
            one.close()
            return port
    raise AssertionError("no port is free")
