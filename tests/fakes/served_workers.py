"""`pdproxy serve` with two workers, as processes, in front of fake engines; and its admin API."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fakes.admin import BASE, Api
from tests.fakes.client import Answer, Client
from tests.fakes.engine import FakeEngine
from tests.fakes.forked import start
from tests.fakes.ports import free_port
from tests.fakes.process import PATIENCE, Served
from tests.fakes.samples import read, total
from tests.fakes.world import COMPLETIONS, TEXT, completion, until

SERVE = textwrap.dedent(
    """
    import sys
    from functools import partial
    from pdproxy.cli.main import main
    from pdproxy.workers import supervisor
    supervisor.SupervisorTimes = partial(supervisor.SupervisorTimes, pauses=(0.0,))
    sys.exit(main(["serve", "--config", sys.argv[1]]))
    """
)
"""The command, but that a worker which has ended is started again at once, however often: tests
kill some again and again.
"""
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PDPROXY_")}
ENVIRONMENT["PDPROXY_LISTEN__LINGER"] = "0"
# or only root could see which files a process has open
ENVIRONMENT["PDPROXY_OBSERVE__CORE_DUMPS"] = "true"


@dataclass
class Run:
    """A running proxy, its admin API, and the engines that it does not know."""

    proxy: Served
    api: Api
    config: Path
    spare: Sequence[FakeEngine] = ()

    async def all_say(self, path: str, holds: Callable[[Any], bool]) -> Any:
        """Wait until this holds for eight answers in a row. Return the last one."""
        good, found = 0, None
        async with asyncio.timeout(PATIENCE):
            while good < 8:
                answer = await self.ask("GET", path)
                found = answer.json
                good = good + 1 if answer.status == 200 and holds(found) else 0
                await asyncio.sleep(0.02)
        return found

    async def ask(self, method: str, path: str, body: object = b"") -> Answer:
        """One request. A connection that a killed process had taken is made again."""
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    return await self.api.ask(method, BASE + path, body)
                except (OSError, EOFError):
                    await asyncio.sleep(0.02)

    async def kill(self, pid: int) -> None:
        """Kill a worker, and wait for its successor."""
        os.kill(pid, signal.SIGKILL)
        await until(
            lambda: pid not in self.proxy.workers() and len(self.proxy.workers()) == 2, PATIENCE
        )
        await self.whole()

    async def kill_scheduler(self) -> None:
        """Kill the scheduler process, and wait for its successor."""
        killed = self.proxy.scheduler()
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        await until(lambda: self.proxy.scheduler() not in (None, killed), PATIENCE)
        await self.whole()

    async def clients(self, count: int) -> dict[int, list[Client]]:
        """Connect so many clients. Return them by their workers."""
        clients = await asyncio.gather(*[Client.connect(self.proxy.port) for _ in range(count)])
        await asyncio.gather(*map(served, clients))  # else some may wait for their workers
        ports = [one.writer.get_extra_info("sockname")[1] for one in clients]
        workers = self.proxy.serve(ports)
        found: dict[int, list[Client]] = {pid: [] for pid in self.proxy.workers()}
        for client, port in zip(clients, ports, strict=True):
            found[workers[port]].append(client)
        return found

    async def leases(self, wanted: int) -> None:
        """Wait until this is what the scheduler process has leased, and what workers have."""
        names = "pdproxy_scheduler_leases", "pdproxy_node_inflight"
        async with asyncio.timeout(PATIENCE):
            while True:
                page = (await self.proxy.ask("GET", "/metrics")).body.decode()
                if [total(read(page, name), name, {}) for name in names] == [wanted] * 2:
                    return
                await asyncio.sleep(0.02)

    async def whole(self) -> None:
        """Wait until both workers and the scheduler process serve."""
        async with asyncio.timeout(PATIENCE):
            while (
                await self.proxy.metric("pdproxy_workers") != 2
                or await self.proxy.metric("pdproxy_scheduler") != 1
                or len(self.proxy.workers()) != 2
            ):
                await asyncio.sleep(0.05)


async def served(client: Client) -> None:
    """Ask for a completion, which must be right."""
    client.post(COMPLETIONS, completion())
    answer = await client.answer()
    assert (answer.status, answer.text) == (200, TEXT), answer.body


@asynccontextmanager
async def serving(
    tmp_path: Path,
    engines: Sequence[FakeEngine],
    settings: Callable[[int, int], str],
    shown: Sequence[FakeEngine] | None = None,
    spare: Sequence[FakeEngine] = (),
    code: str = SERVE,
    state: str = "ok",
) -> AsyncIterator[Run]:
    """Run it until the block ends; it must end with 0 then. `settings`: its file, from its port and
    that of its admin API.

    `engines`: all that are to listen. `shown`: a prefill and a decode engine for `Served`, the
    first two of them if it is None; `spare`: those that the proxy does not know; `code`: what the
    process runs; `state`: what `/ready` says at first.
    """
    for engine in engines:
        await engine.listen()
    port, admin, path = free_port(), free_port(), tmp_path / "pdproxy.yaml"
    path.write_text(settings(port, admin))
    with (tmp_path / "log").open("wb") as log:
        process = start(code, [str(path)], ENVIRONMENT, log)
        run = Run(
            Served(process, port, engines[:2] if shown is None else shown), Api(admin), path, spare
        )
        try:
            async with asyncio.timeout(PATIENCE):
                while True:
                    try:
                        if (await run.proxy.ask("GET", "/ready")).json["state"] == state:
                            break
                    except OSError:
                        assert process.returncode is None, (tmp_path / "log").read_text()
                    await asyncio.sleep(0.05)
            yield run
            process.terminate()
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            for engine in engines:
                engine.stop()


def nodes(engines: Sequence[FakeEngine]) -> str:
    """Return these engines as the nodes of a pool in a file of settings."""
    return "  nodes:\n" + "".join(
        f"  - {{url: '{one.url}', role: {one.role}}}\n" for one in engines
    )
