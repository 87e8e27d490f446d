"""Processes that hold keys leave no core dump, and show their memory to no other process of their
user.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdproxy.kit import core_dumps, pool_process
from tests.fakes.client import Client, request
from tests.fakes.forked import COMMAND, start
from tests.fakes.ports import free_port
from tests.fakes.served_workers import ENVIRONMENT
from tests.fakes.world import LONG, until

_PR_GET_DUMPABLE = 3
_PR_SET_DUMPABLE = 4
LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (4096, 4096))"


def in_child(step: str) -> str:
    """What a child process that has done a step says of itself: its limit on core dumps, and its
    flag.
    """
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            # another test of this process may have forbidden core dumps here
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
            resource.setrlimit(
                resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
            )
            {
                "nothing": lambda: None,
                "forbid": core_dumps.forbid,
                "reader": lambda: pool_process._set_limits(1 << 40),
            }[step]()
            said = (
                resource.getrlimit(resource.RLIMIT_CORE),
                ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0),
            )
            os.write(writing, repr(said).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        found = answer.read()
    os.waitpid(pid, 0)
    return found


@pytest.mark.parametrize("step", ["forbid", "reader"])
def test_what_is_forbidden(step: str) -> None:
    """Core dumps by the limit, those that the system hands to a program by the flag; the flag also
    keeps debuggers out.
    """
    assert in_child("nothing").endswith("1)")
    assert in_child(step) == "((0, 0), 0)"


@asynccontextmanager
async def serving(workers: int, *, allowed: bool) -> AsyncIterator[list[int]]:
    """The process ids of a proxy: the process that was started, and its children."""
    environment = {**ENVIRONMENT, "PDPROXY_OBSERVE__CORE_DUMPS": str(allowed).lower()}
    port, nobody = free_port(), free_port()
    words = [
        "serve",
        "--port",
        str(port),
        "--workers",
        str(workers),
        "--aggregated",
        f"127.0.0.1:{nobody}",
    ]
    process = start(f"{LIMITED}; {COMMAND}", words, environment, asyncio.subprocess.DEVNULL)
    try:

        async def ready() -> bool:
            with contextlib.suppress(OSError):
                client = await Client.connect(port)
                client.send(request("GET", "/health", b""))
                with contextlib.suppress(asyncio.IncompleteReadError):
                    return (await client.answer()).status == 200
            return False

        async with asyncio.timeout(LONG):
            while not await ready():
                await asyncio.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        # with several, the scheduler process as well
        await until(lambda: workers == 1 or len(children.read_text().split()) == workers + 1)
        yield [process.pid, *map(int, children.read_text().split())]
    finally:
        process.kill()
        await process.wait()


def limit(pid: int) -> list[str]:
    """The limit on a process's core dumps, now and at most."""
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return next(line.split()[4:6] for line in lines if line.startswith("Max core file size"))


@pytest.mark.parametrize(("workers", "allowed"), [(1, False), (2, False), (2, True)])
async def test_each_process_of_a_proxy(workers: int, allowed: bool) -> None:
    """The supervisor, the scheduler process and each worker; all of them as they were started where
    a setting allows it.
    """
    async with serving(workers, allowed=allowed) as pids:
        assert len(pids) == (1 if workers == 1 else 4)
        assert [limit(pid) for pid in pids] == [["4096", "4096"] if allowed else ["0", "0"]] * len(
            pids
        )
