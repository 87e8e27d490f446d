"""A small kubelet: pods are objects of an API server, and their processes run on this machine, each
pod at a loopback address of its own.

It does around the end of a pod what Kubernetes' own does: the preStop hook, SIGTERM, SIGKILL after
the grace period, and only then the object is deleted. A pod has one container. `pdproxy` is the
only program.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from tests.fakes.client import Client, request
from tests.fakes.forked import Forked, command

Pod = Mapping[str, Any]
"""An object of the API, as JSON has it."""
LOOK = 0.05
"""Seconds between two lists of the pods."""
LAST = 2.0
"""Seconds from SIGTERM to SIGKILL at least, even if the preStop hook has taken all of the grace
period.
"""


class Pods(Protocol):
    """The API server's collection of pods, as a kubelet uses it."""

    async def list(self) -> list[Pod]:
        """Return all pods."""

    async def set_status(self, pod: Pod, status: Mapping[str, Any]) -> None:
        """Write a pod's status. A pod that is gone is left alone."""

    async def remove(self, pod: Pod) -> None:
        """Delete the object of a pod that has ended."""


def addresses() -> Iterator[str]:
    """Loopback addresses that no other run of tests is likely to have."""
    second = random.Random().randrange(16, 250)
    return (f"127.{second}.{number // 250}.{number % 250 + 1}" for number in itertools.count(1))


def ready_condition(is_ready: bool | None) -> dict[str, str]:
    """The condition Ready. None: nobody knows, since the kubelet is silent."""
    status = "Unknown" if is_ready is None else "True" if is_ready else "False"
    return {"type": "Ready", "status": status}


class Kubelet:
    """The kubelet of one machine, for the pods whose `nodeName` is `node`. `logs`: a folder for the
    pods' output.
    """

    def __init__(self, pods: Pods, node: str, hosts: Iterator[str], logs: Path) -> None:
        self._pods = pods
        self.node = node
        self._hosts = hosts
        self._logs = logs
        self._seen: dict[str, Pod] = {}
        """All pods of the machine, by their uids, as listed last."""
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._processes: dict[str, Forked] = {}
        self._task: asyncio.Task[None] | None = None
        self.codes: dict[str, int] = {}
        """By the names of pods, the exit codes of their preStop hooks."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name=f"kubelet {self.node}")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._task is not None
        tasks = [self._task, *self._lives.values()]
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        for one in ended:
            if isinstance(one, Exception):
                raise one

    def look(self) -> None:
        """Fail if it has failed."""
        for task in [self._task, *self._lives.values()]:
            if task is not None and task.done() and not task.cancelled():
                task.result()

    def go_silent(self) -> None:
        """Be a machine whose power is gone, but for its kernel: nothing answers, nothing is said to
        the API server.
        """
        assert self._task is not None
        for task in [self._task, *self._lives.values()]:
            task.cancel()
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGSTOP)

    async def _run(self) -> None:
        while True:
            pods = [pod for pod in await self._pods.list() if pod["spec"]["nodeName"] == self.node]
            self._seen = {pod["metadata"]["uid"]: pod for pod in pods}
            for uid, pod in self._seen.items():
                if uid not in self._lives:
                    self._lives[uid] = asyncio.create_task(
                        self._live(uid), name=f"pod {pod['metadata']['name']}"
                    )
            for uid in self._lives.keys() - self._seen.keys():  # its object was deleted by force
                self._lives.pop(uid).cancel()
                self._kill(uid)
            await asyncio.sleep(LOOK)

    def _kill(self, uid: str) -> None:
        if (process := self._processes.get(uid)) is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def _live(self, uid: str) -> None:
        """Run one pod, from its process's start to the end of its object."""
        pod, host = self._seen[uid], next(self._hosts)
        name, (container,) = pod["metadata"]["name"], pod["spec"]["containers"]
        env = {**_variables(container, host), "PATH": os.environ["PATH"]}
        program, *words = (_expanded(word, env) for word in container["command"])
        assert program == "pdproxy"
        with (self._logs / f"{name}.log").open("wb") as log:
            process = self._processes[uid] = command(*words, env=env, stderr=log)
        before: bool | None = None
        while "deletionTimestamp" not in self._seen[uid]["metadata"]:
            runs = process.returncode is None
            is_ready = runs and await _answers(container["readinessProbe"], host)
            if is_ready is not before:
                status = {
                    "phase": "Running" if runs else "Failed",
                    "podIP": host,
                    "podIPs": [{"ip": host}],
                    "conditions": [ready_condition(is_ready)],
                }
                await self._pods.set_status(self._seen[uid], status)
                before = is_ready
            await asyncio.sleep(container["readinessProbe"]["periodSeconds"])
        await self._end(uid, process, container, env)

    async def _end(
        self, uid: str, process: Forked, container: Mapping[str, Any], env: Mapping[str, str]
    ) -> None:
        loop, pod = asyncio.get_running_loop(), self._seen[uid]
        end = loop.time() + pod["spec"]["terminationGracePeriodSeconds"]
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        if hook is not None and process.returncode is None:
            name = pod["metadata"]["name"]
            self.codes[name] = await self._hooked(name, hook, env, end - loop.time())
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(LAST, end - loop.time())):
                await process.wait()
        self._kill(uid)
        await process.wait()
        del self._processes[uid]
        await self._pods.remove(pod)

    async def _hooked(
        self, name: str, hook: Sequence[str], env: Mapping[str, str], seconds: float
    ) -> int:
        """Run a preStop hook for at most so many seconds. Return its exit code."""
        with (self._logs / f"{name}.prestop").open("wb") as log:
            process = await asyncio.create_subprocess_exec(*hook, env=env, stdout=log, stderr=log)
            try:
                async with asyncio.timeout(seconds):
                    return await process.wait()
            except TimeoutError:
                return -1
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()


def _variables(container: Mapping[str, Any], host: str) -> dict[str, str]:
    """The environment of a container at an address."""
    fields = {"status.podIP": host}
    found: dict[str, str] = {}
    for one in container.get("env", ()):
        source = one.get("valueFrom")
        value = fields[source["fieldRef"]["fieldPath"]] if source else one["value"]
        found[one["name"]] = _expanded(value, found)
    return found


def _expanded(text: str, env: Mapping[str, str]) -> str:
    """A text with the values of variables in place of `$(NAME)`."""
    for name, value in env.items():
        text = text.replace(f"$({name})", value)
    return text


async def _answers(probe: Mapping[str, Any], host: str) -> bool:
    """Whether a readiness probe is answered with 200."""
    with contextlib.suppress(OSError, EOFError, TimeoutError):
        async with asyncio.timeout(probe["timeoutSeconds"]):
            client = Client(*await asyncio.open_connection(host, probe["httpGet"]["port"]))
            try:
                client.send(request("GET", probe["httpGet"]["path"], b""))
                return (await client.answer()).status == 200
            finally:
                client.close()
    return False
