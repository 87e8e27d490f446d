"""Free ports for tests that must know one before anybody listens on it, or that close one and expect nobody behind it."""

import itertools
import os
import random
import socket

LOWEST, HIGHEST = 12_000, 32_000  # below those that the system gives to connections
WORKERS = 8


def _range() -> tuple[int, int]:
    """This worker's own ports: those of the others would be just as free a moment ago."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
    size = (HIGHEST - LOWEST) // WORKERS
    return LOWEST + worker * size, size


def _ports() -> "itertools.cycle[int]":
    first, size = _range()
    begin = random.randrange(size)  # runs beside each other, a second one of the same worker's name too
    return itertools.cycle(first + (begin + at) % size for at in range(size))


_PORTS = _ports()


def free_port() -> int:
    """A port that nobody listens on, and that no other test is given for a long time."""
    for port in _PORTS:
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
