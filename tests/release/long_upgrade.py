"""Two versions of pdproxy in front of the same engines: the newer one takes over under load, an
engine ends by the handles of both, and the older one takes over again; nothing fails.
"""

# PDPROXY_TEST_BEFORE names a git revision of the older version. Else it is the newest release
# before this commit. Where there is none, it is some 100 commits before: one whose files have no
# marks of a merge.

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.chaos.answers import Answer, read_answer, told
from tests.chaos.oracle import Body, bodies, streams
from tests.fakes.ports import free_port
from tests.reference.markdown import ROOT

NOW, BEFORE = "now", "before"
CLIENTS = 24
MODEL = "sim"
PATIENCE = 60.0
BETWEEN = 3.0
"""Seconds of load between two changes."""
NO_TAGS = range(100, 150)
"""How many commits before: the first of these that can be run."""


def git(*arguments: str) -> str:
    line = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()


def older() -> str:
    """The revision of the older version."""
    if named := os.environ.get("PDPROXY_TEST_BEFORE"):
        return named
    with suppress(subprocess.CalledProcessError):
        return git("describe", "--tags", "--match", "v*", "--abbrev=0", "HEAD^")
    marked = ["git", "-C", str(ROOT), "grep", "-qE", "^={7}$"]
    return next(
        revision
        for revision in (f"HEAD~{back}" for back in NO_TAGS)
        if subprocess.run([*marked, revision, "--", "proxy/*.py"], check=False).returncode == 1
    )


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where the packages of each version are. They run with the same dependencies."""
    folder = tmp_path_factory.mktemp("before")
    revision = git("rev-parse", older())
    assert revision != git("rev-parse", "HEAD")
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", revision, "proxy", "configs"],
        check=True,
        capture_output=True,
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    print(f"\nbefore: {git('log', '-1', '--format=%h of %cs', revision)}")
    return {NOW: ROOT / "proxy", BEFORE: folder / "proxy"}


@contextmanager
def running(tree: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    # An older version may not know a variable of the tests.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PDPROXY_")}
    environment = own | {"PYTHONPATH": str(tree)}
    line = [sys.executable, "-m", "pdproxy", *arguments]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, cwd="/", env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def asked(port: int, path: str, body: Body | None = None) -> Answer:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = Answer()
    try:
        writer.write(
            f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
            if body is None
            else body.request("upgrade", keep=False)
        )
        async with asyncio.timeout(PATIENCE):
            await read_answer(reader, answer)
    finally:
        writer.transport.abort()
    assert answer.complete
    return answer


async def status(port: int, path: str) -> int:
    try:
        return (await asked(port, path)).status
    except (OSError, EOFError):
        return 0


async def until(port: int, path: str, wanted: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while await status(port, path) != wanted:
            await asyncio.sleep(0.05)


class Balancer:
    """Knows which proxies are ready, as a balancer does: it asks each of them all the time."""

    def __init__(self) -> None:
        self.ready: dict[int, bool] = {}

    async def look(self) -> None:
        while True:
            for port in [*self.ready]:
                self.ready[port] = await status(port, "/ready/proxy") == 200
            await asyncio.sleep(0.1)

    def one(self) -> int:
        return random.choice([port for port, is_ready in self.ready.items() if is_ready])


async def client(balancer: Balancer, asks: list[Body], done: Counter[str]) -> None:
    while True:
        body = random.choice(asks)
        answer = told(await asked(balancer.one(), body.path, body))
        assert answer == body.right, f"{body.fields}: {answer}"
        done["answers"] += 1
        await asyncio.sleep(random.uniform(0, 0.1))


class Engines:
    """Simulated engines, and the settings file that both versions read."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.ports = {name: (free_port(), free_port()) for name in ("p0", "p1", "d0", "d1")}
        self.write([*self.ports])

    def write(self, names: list[str]) -> None:
        roles = {"p": "prefill", "d": "decode"}
        nodes = [
            {"url": f"http://127.0.0.1:{self.ports[name][0]}", "role": roles[name[0]]}
            for name in names
        ]
        settings = {"listen": {"linger": 2.0}, "pools": [{"name": "all", "nodes": nodes}]}
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(settings))
        new.replace(self.file)

    async def start(self, stack: ExitStack, tree: Path) -> dict[str, subprocess.Popen[bytes]]:
        started = {}
        for name, (port, admin) in self.ports.items():
            role = "prefill" if name[0] == "p" else "decode"
            own = ("--role", role, "--port", str(port), "--admin-port", str(admin))
            usual = ("--model", MODEL, "--eos-every", "0", "--profile", "h200-8b")
            started[name] = stack.enter_context(running(tree, "sim", *own, *usual))
        for port, _ in self.ports.values():
            await until(port, "/health", 200)
        return started

    async def handles(self) -> list[str]:
        found = []
        for name, (_, admin) in self.ports.items():
            with suppress(OSError):
                state = json.loads((await asked(admin, "/state")).body)
                found += [f"{name}: {handle}" for handle in state["handles"]]
        return found


class Proxies:
    """The proxies of both versions, as long as they run."""

    def __init__(
        self, trees: dict[str, Path], file: Path, balancer: Balancer, stack: ExitStack
    ) -> None:
        self.trees, self.file, self.balancer, self.stack = trees, file, balancer, stack
        self.serving: dict[str, tuple[int, subprocess.Popen[bytes]]] = {}

    async def start(self, version: str) -> None:
        port = free_port()
        serve = ("serve", "--config", str(self.file), "--port", str(port), "--log-level", "error")
        process = self.stack.enter_context(running(self.trees[version], *serve))
        await until(port, "/ready", 200)
        self.serving[version] = port, process
        self.balancer.ready[port] = True

    async def end(self, version: str) -> None:
        """As Kubernetes and systemd end a process."""
        port, process = self.serving.pop(version)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, PATIENCE) == 0
        del self.balancer.ready[port]


async def test_a_version_takes_over_from_another_and_gives_back(
    trees: dict[str, Path], tmp_path: Path
) -> None:
    engines, balancer = Engines(tmp_path / "pdproxy.yaml"), Balancer()
    done = Counter[str]()
    asks = [*bodies(7, MODEL), *streams(7, MODEL, 8)]
    with ExitStack() as stack:
        started = await engines.start(stack, trees[NOW])
        for body in asks:  # each engine serves whole, too
            body.right = told(await asked(engines.ports["d0"][0], body.path, body))
        proxies = Proxies(trees, engines.file, balancer, stack)
        async with asyncio.TaskGroup() as group:
            await proxies.start(BEFORE)
            running_tasks = [group.create_task(balancer.look())]
            running_tasks += [
                group.create_task(client(balancer, asks, done)) for _ in range(CLIENTS)
            ]
            await asyncio.sleep(BETWEEN)
            await proxies.start(NOW)
            await asyncio.sleep(BETWEEN)
            # an engine ends once neither version has a request or a handle of it
            engines.write(["p1", "d0", "d1"])
            ended = engines.ports["p0"][0]
            for port, _ in proxies.serving.values():
                await until(port, f"/drained?engine=127.0.0.1:{ended}", 200)
            started["p0"].kill()
            await proxies.end(BEFORE)
            await asyncio.sleep(BETWEEN)
            await proxies.start(BEFORE)
            await proxies.end(NOW)
            await asyncio.sleep(BETWEEN)
            for task in running_tasks:
                task.cancel()
        async with asyncio.timeout(PATIENCE):
            while await engines.handles():
                await asyncio.sleep(0.1)
    print(f"{done['answers']} answers, all right, in an upgrade and back")
    assert done["answers"] > 100
