"""`pdproxy up` as a process, on a machine whose engines are simulated; its load; and what is left
of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from pdproxy_lab.up.state import Folder
from pdproxy_lab.up.system_processes import parse_stat, same_process
from tests.demo.processes import Running, alive, gone, running
from tests.fakes.ports import free_port
from tests.fakes.vllm_box import VllmBox

SERVES = "Ctrl-C ends the proxy and its engines."


class UpBox(VllmBox):
    """A machine on which `up` runs. What it leaves is ended with the test, and is an error there
    unless it is expected.
    """

    def __init__(self, folder: Path, **orders: Any) -> None:
        super().__init__(folder, **orders)
        self.port = free_port()
        self.first_port = free_port()
        # the paths of sockets are bounded
        self.up_folder = Path(tempfile.mkdtemp(prefix="up-"))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def options(self, *more: str) -> list[str]:
        line = ["tiny", "--vllm", str(self.vllm), "--folder", str(self.up_folder)]
        ports = ["--port", str(self.port), "--first-port", str(self.first_port)]
        return [*line, *ports, "--wait", "60", *more]

    @asynccontextmanager
    async def up(self, *more: str, **env: str) -> AsyncIterator[Running]:
        async with running(*self.options(*more), command="up", **self.env, **env) as up:
            yield up

    async def run(self, *more: str, **env: str) -> tuple[int, str, str]:
        """Run one to its end: its exit code, what it printed, and its errors."""
        async with self.up(*more, **env) as up:
            code = await up.ended()
            return code, "\n".join(up.printed), await up.errors()

    async def metrics(self, session: aiohttp.ClientSession) -> str:
        """The proxy's."""
        async with session.get(f"{self.url}/metrics") as answer:
            return await answer.text()

    def pid(self, name: str) -> int | None:
        """The process of an engine, or of the proxy, that has written itself down and runs."""
        stat = Folder(self.up_folder).stat(name)
        written = parse_stat(stat.read_text()) if stat.exists() else None
        return written.pid if written is not None and same_process(written) else None

    async def is_left(self) -> list[str]:
        """What is left: processes, ports, and what says that something runs."""
        await gone([self.child])
        await gone([str(self.up_folder)])
        left = [str(path) for path in self.up_folder.glob("*.s*")]
        for port in (self.port, *range(self.first_port, self.first_port + 12)):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    left.append(f"port {port}")
        return left

    async def remove(self) -> None:
        """End what a failed test has left."""
        for name in [path.stem for path in self.up_folder.glob("*.stat")]:
            if (pid := self.pid(name)) is not None:
                os.kill(pid, signal.SIGKILL)
        for word in (self.child, str(self.up_folder), str(self.vllm.parent)):
            for pid in alive([word]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.up_folder, ignore_errors=True)


@asynccontextmanager
async def machine(folder: Path, **orders: Any) -> AsyncIterator[UpBox]:
    """A machine that is empty at the end."""
    box = UpBox(folder, **orders)
    try:
        yield box
        left = await box.is_left()
        assert not left, left
    finally:
        await box.remove()


class Load:
    """Clients that ask all the time, some of them with streams."""

    def __init__(self, url: str, model: str = "tiny") -> None:
        self.url, self.model = url, model
        self.outcomes: Counter[str] = Counter()
        self._asks = True

    async def until(self, count: int) -> None:
        """Wait until so many more requests have ended."""
        wanted = self.outcomes.total() + count
        while self.outcomes.total() < wanted:
            await asyncio.sleep(0.02)

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        asked = 0
        while self._asks:
            asked += 1
            body = {
                "model": self.model,
                "prompt": f"client {number}, request {asked}: " + "some words " * 40,
                "max_tokens": 32,
                "ignore_eos": True,
                "stream": number % 2 == 0,
            }
            self.outcomes[await self._ask(session, body)] += 1

    async def _ask(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> str:
        try:
            async with session.post(f"{self.url}/v1/completions", json=body) as answer:
                text = await answer.text()
        except aiohttp.ClientError as error:
            return repr(error)
        if answer.status != 200:
            return f"{answer.status}: {text[:200]}"
        if not body["stream"]:
            return "ok" if json.loads(text)["usage"]["completion_tokens"] == 32 else text[:200]
        return "ok" if text.endswith("data: [DONE]\n\n") and '{"error"' not in text else text[-300:]


@asynccontextmanager
async def load(url: str, clients: int = 8, model: str = "tiny") -> AsyncIterator[Load]:
    """Clients until the end of the block; then each of their requests must have been served."""
    found = Load(url, model)
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(found._client(session, number))
        try:
            yield found
        finally:
            found._asks = False
    assert set(found.outcomes) == {"ok"}, found.outcomes
