"""Whole proxies that follow 256 pods of a real API server have their engines, and no others."""

# 20 changes a second for five minutes, while connections are cut at random, and the server is
# killed twice: after each calm of two seconds the engines are the pods'.
#
# Run by `.ci/full kubernetes`. No engine answers: only who is a member is asked, of the admin API.
# PDPROXY_TEST_ROUNDS: how many calms, 60 if it is not set.

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from pdproxy.fleet.entries import engine_id
from tests.fakes.books import Books
from tests.fakes.engine import FakeEngine
from tests.fakes.served_workers import Run, serving
from tests.kubernetes.build import ensure
from tests.kubernetes.cluster import Cluster
from tests.proxy.test_workers_admin import states
from tests.unit.test_informer import kubeconfig

pytestmark = pytest.mark.timeout(1800)

ROUNDS = int(os.environ.get("PDPROXY_TEST_ROUNDS", "60"))
PODS, CHANGES, CALM = 256, 60, 2.0
"""Pods at once; changes in the three seconds before each calm; its seconds."""
WARM = 10
"""Rounds until memory is looked at for the first time."""
GROWTH = 10 << 20
"""Bytes by which the memory of all processes of a proxy may grow from then on."""
LATENCIES = 50
"""Pods that are deleted one by one at the end."""
FINALIZER = "pdproxy.dev/test"
URL = "pods://default:8000/app=vllm"


def address(number: int) -> str:
    """The address of a pod: nobody listens there."""
    return f"127.{1 + number // 62500}.{number // 250 % 250}.{1 + number % 250}"


class Pods:
    """The pods that there are. Each has another address."""

    def __init__(self, cluster: Cluster, chance: random.Random) -> None:
        self._cluster = cluster
        self._chance = chance
        self._number = 0
        self.urls: dict[str, str] = {}
        """Those that are to be engines, by the names of pods."""
        self._new: set[str] = set()
        """Those that are ready only since the last calm."""
        self._leaving: list[str] = []

    def calm(self) -> None:
        """All that was changed is known."""
        self._new.clear()

    async def make(self) -> None:
        """One more that is ready."""
        name, ip = f"p{self._number}", address(self._number)
        self._number += 1
        role = "prefill" if self._number % 3 == 0 else "decode"
        await self._cluster.put(
            name,
            metadata={
                "labels": {"app": "vllm", "pdproxy.dev/role": role},
                "finalizers": [FINALIZER],
            },
            status=_status(ip, ready=True),
        )
        self.urls[name] = f"http://{ip}:8000"
        self._new.add(name)

    async def leave(self, name: str | None = None) -> str:
        """One is being deleted: it stays for a while. Return its URL."""
        name = name or self._chance.choice([*self.urls])
        url = self.urls.pop(name)
        self._new.discard(name)
        self._leaving.append(name)
        await self._cluster.delete(name)
        return url

    async def change(self) -> None:
        """Change one of them, or how many there are."""
        what = self._chance.random()
        if self._leaving and what < 0.25:
            name = self._leaving.pop(0)
            await self._cluster.patch(name, metadata={"finalizers": None})
        elif what < 0.5:
            await (self.make() if len(self.urls) < PODS else self.leave())
        else:
            name = self._chance.choice([*self.urls])
            if what < 0.75 and name not in self._new:  # a probe fails, or works again
                ip = self.urls[name].removeprefix("http://").removesuffix(":8000")
                await self._cluster.patch(name, status=_status(ip, ready=what < 0.6))
            else:
                note = {"annotations": {"note": str(what)}}
                await self._cluster.patch(name, metadata=note)


def _status(ip: str, *, ready: bool) -> dict[str, object]:
    condition = {"type": "Ready", "status": str(ready)}
    return {"phase": "Running", "podIP": ip, "conditions": [condition]}


def memory(run: Run) -> int:
    """The bytes of all processes of a proxy."""
    family = {run.proxy.process.pid}
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(text.rpartition(")")[2].split()[1])
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    pages = 0
    for pid in family:
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * os.sysconf("SC_PAGE_SIZE")


async def engines(run: Run) -> set[str]:
    """The members that do not leave."""
    shown = states((await run.ask("GET", "/engines")).json)
    return {url for url, state in shown.items() if state != "draining"}


async def test_engines_are_the_pods_whatever_is_cut(tmp_path: Path) -> None:
    chance = random.Random(11)
    cluster = Cluster(await asyncio.to_thread(ensure), tmp_path)
    path = kubeconfig(tmp_path, cluster)  # type: ignore[arg-type]

    def settings(workers: int, port: int, admin: int) -> str:
        return (
            f"listen: {{port: {port}, workers: {workers}, admin: '127.0.0.1:{admin}'}}\n"
            f"kubernetes: {{kubeconfig: '{path}', silence: 20, relist: 60}}\n"
            "deadlines: {drain: 5, engine_drain: 5}\nprobes: {interval: 60}\npools:\n"
            f"- connector: nixl\n  nodes:\n  - {{url: '{URL}', role: by_label}}\n"
        )

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(cluster.running())
        pods = Pods(cluster, chance)
        for _ in range(0, PODS, 16):
            await asyncio.gather(*(pods.make() for _ in range(16)))
        runs = []
        for workers in (1, 3):
            folder = tmp_path / str(workers)
            folder.mkdir()
            made = serving(
                folder,
                [],
                lambda port, admin, workers=workers: settings(workers, port, admin),  # type: ignore[misc]
                shown=[FakeEngine(role, Books()) for role in ("prefill", "decode")],
                state="not_ready",
            )
            runs.append(await stack.enter_async_context(made))
        cutting = asyncio.create_task(_cut(cluster, chance))
        at_first = [0] * len(runs)
        for number in range(ROUNDS):
            if number in (ROUNDS // 3, 2 * ROUNDS // 3):
                await cluster.kill("server")
                await cluster.start_server()
            began = time.monotonic()
            for done in range(CHANGES):
                await pods.change()
                left = began + 3.0 * done / CHANGES - time.monotonic()
                await asyncio.sleep(max(0.0, left))
            await asyncio.sleep(CALM)
            wanted = set(pods.urls.values())
            for run in runs:
                assert await engines(run) == wanted, f"round {number}"
            pods.calm()
            if number == min(WARM, ROUNDS - 1):
                at_first = [memory(run) for run in runs]
        cutting.cancel()
        grown = [memory(run) - before for run, before in zip(runs, at_first, strict=True)]
        for workers, run, growth in zip((1, 3), runs, grown, strict=True):
            page = (await run.proxy.ask("GET", "/metrics")).body.decode()
            counted = [
                line
                for line in page.splitlines()
                if line.startswith(("pdproxy_kubernetes_events", "pdproxy_kubernetes_lists"))
            ]
            print(f"\n{workers} workers: {ROUNDS} calms equal, memory {growth / 2**20:+.1f} MiB")
            print("\n".join(counted))
        times = [await _left(runs[0], pods) for _ in range(LATENCIES)]
        cuts = statistics.quantiles(times, n=100)
        print(f"deleted until draining: p50 {1e3 * cuts[49]:.0f} ms, p99 {1e3 * cuts[98]:.0f} ms")
        assert all(growth < GROWTH for growth in grown)


async def _cut(cluster: Cluster, chance: random.Random) -> None:
    while True:
        await asyncio.sleep(3 * chance.random())
        cluster.cut()


async def _left(run: Run, pods: Pods) -> float:
    """Delete a pod. Return the seconds until its engine is drained or gone."""
    name = next(iter(pods.urls))
    path = f"/engines/{engine_id(pods.urls[name])}"
    began = time.monotonic()
    await pods.leave(name)
    while True:
        answer = await run.ask("GET", path)
        if answer.status == 404 or answer.json["state"] == "draining":
            return time.monotonic() - began
        await asyncio.sleep(0.002)
