"""The real proxy in a process of its own, in front of fake engines, with a standard error that the
test chooses.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import textwrap
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

from pdproxy.workers.scheduler_process import PROCESS_NAME
from tests.fakes.books import Books
from tests.fakes.client import Answer, exchange, request
from tests.fakes.engine import FakeEngine
from tests.fakes.forked import Forked, start
from tests.fakes.ports import free_port
from tests.fakes.samples import read, total
from tests.fakes.several import WORKERS

PATIENCE = 180.0
SERVE = textwrap.dedent(
    """
    import os
    import sys
    from functools import partial
    from pdproxy.observe import logs
    from pdproxy.workers import scheduler_link, supervisor
    from pdproxy.settings.listen import Listen
    from pdproxy.settings.health import Probes
    from pdproxy.settings.keys import Auth
    from pdproxy.settings.schema import Deadlines, Observe, Settings
    from pdproxy.settings.engines import ConfiguredEngine
    from pdproxy.settings.pools import Pool
    from pdproxy.settings.tracing import Tracing
    port, prefill, decode, log_format, max_bytes, workers, interval, linger, collector = sys.argv[1:]
    supervisor.SupervisorTimes = partial(supervisor.SupervisorTimes, pauses=(0.0,))
    if "PDPROXY_TEST_KILLS" not in os.environ:
        scheduler_link.PATIENCE = 60.0  # however slow this machine is
    if int(workers) > 1:
        from pdproxy.workers.parent import run
    else:
        from pdproxy.app.server import run
    logs.LineWriter = partial(logs.LineWriter, max_bytes=int(max_bytes))
    nodes = (ConfiguredEngine(url=prefill, role="prefill"), ConfiguredEngine(url=decode, role="decode"))
    sys.exit(run(Settings(
        listen=Listen(port=int(port), workers=int(workers), linger=float(linger)),
        pools=(Pool(nodes=nodes),),
        deadlines=Deadlines(drain=5),
        probes=Probes(interval=float(interval)),
        # Without core dumps only root could see which files it has open.
        observe=Observe(
            log_format=log_format,
            core_dumps=True,
            tracing=Tracing(endpoint=collector or None, sample_ratio=1.0),
        ),
    )))
    """  # noqa: E501
)


def longest_wait(log: Path) -> float:
    """Return for how many seconds requests have waited for a scheduler process at most, as workers
    have logged it.
    """
    return max(map(float, re.findall(r"chosen again, ([0-9.]+) s", log.read_text())), default=0.0)


class Served:
    """A running proxy."""

    def __init__(
        self, process: asyncio.subprocess.Process | Forked, port: int, engines: Sequence[FakeEngine]
    ) -> None:
        self.process = process
        self.port = port
        self.prefill, self.decode = engines
        self.books = engines[0].books

    def workers(self) -> list[int]:
        """The process ids of its workers, in no order."""
        return [pid for pid, name in self._children() if name != PROCESS_NAME]

    def scheduler(self) -> int | None:
        """The process id of its scheduler process, None if there is none at present."""
        return next((pid for pid, name in self._children() if name == PROCESS_NAME), None)

    def _children(self) -> list[tuple[int, str]]:
        """Its processes that have taken a name, and the names."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        found = []
        for pid in map(int, children.split()):
            with contextlib.suppress(OSError):  # it has ended
                found.append((pid, Path(f"/proc/{pid}/comm").read_text().rstrip("\n")))
        return [(pid, name) for pid, name in found if name.startswith("pdproxy-")]

    def connected(self, port: int, *, is_theirs: bool) -> list[int]:
        """The processes with open connections where the port is theirs, or the other side's."""
        return self._connected([port], 1 if is_theirs else 2)[port]

    def serve(self, ports: Collection[int]) -> dict[int, int]:
        """By the ports of clients: the processes that have their connections."""
        return {port: pid for port, (pid,) in self._connected(ports, 2).items()}

    def _connected(self, ports: Collection[int], end: int) -> dict[int, list[int]]:
        """The processes with open connections that have these ports. `end`: the number of the
        port's column in the system's table.
        """
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        by_link = {
            f"socket:[{row[9]}]": int(row[end].split(":")[1], 16) for row in rows if row[3] == "01"
        }
        found: dict[int, list[int]] = {port: [] for port in ports}
        for pid, _ in self._children():
            theirs = set()
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    theirs.add(by_link.get(os.readlink(f"/proc/{pid}/fd/{fd}")))
            for port in theirs & found.keys():
                assert port is not None
                found[port].append(pid)
        return found

    def serves_client(self) -> int:
        """The worker that has the only client's connection."""
        (found,) = self.connected(self.port, is_theirs=True)
        return found

    async def ask(self, method: str, path: str, body: object = b"") -> Answer:
        """One request on a connection of its own."""
        return await exchange(self.port, request(method, path, body))

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name with these labels on the metrics page; 0 where there
        is none.
        """
        page = (await self.ask("GET", "/metrics")).body.decode()
        return total(read(page, name), name, labels)

    def memory(self) -> int:
        """What it has in memory now, in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024


@asynccontextmanager
async def served(
    stderr: int | IO[bytes] | None,
    *,
    log_format: str = "text",
    max_bytes: int = 4 << 20,
    workers: int = WORKERS,
    interval: float = 2.0,
    facts: Mapping[str, Any] | None = None,
    linger: float = 0.0,
    port: int | None = None,
    collector: str = "",
) -> AsyncIterator[Served]:
    """Run one until the block ends. `max_bytes`: of lines that wait to be written; `stderr` None:
    it is closed.

    `interval`: seconds between probes; `facts`: of both engines, where they differ from the usual
    ones; `linger`: after SIGTERM; `port`: None: a free one; `collector`: the URL of one that gets
    all traces, "" for no traces.
    """
    books = Books()
    engines = [FakeEngine(role, books, **(facts or {})) for role in ("prefill", "decode")]
    for engine in engines:
        await engine.listen()
    port = port or free_port()
    given = [
        str(port),
        *(one.url for one in engines),
        log_format,
        str(max_bytes),
        str(workers),
        str(interval),
    ]
    given += [str(linger), collector]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process: asyncio.subprocess.Process | Forked
    if stderr is None:
        closed = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", SERVE]
        process = await asyncio.create_subprocess_exec(*closed, *given, env=env)
    else:
        process = start(SERVE, given, env, stderr)
    made = Served(process, port, engines)
    try:
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(OSError):
                    answer = await made.ask("GET", "/ready")
                    if answer.status == 200 and b'"degraded"' not in answer.body:
                        break
                assert process.returncode is None
                await asyncio.sleep(0.05)
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        for engine in engines:
            engine.stop()
