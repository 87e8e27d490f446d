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
import shutil
import signal
import tempfile
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.fakes.client import Client, request
from tests.fakes.forked import Forked, command
from tests.kubernetes.kinds import POD, SECRET
from tests.kubernetes.objects import Api, Object
from tests.kubernetes.volumes import Volumes

LOOK = 0.05
"""Seconds between two lists of the pods."""
LAST = 2.0
"""Seconds from SIGTERM to SIGKILL at least, even if the preStop hook has taken all of the grace
period.
"""
AGAIN = 10.0
"""Seconds from a container's end to its next start."""


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
    pods' output. `env`: variables of all containers beside their own. `pace`: how many times faster
    than the pods say it probes, and starts containers again.
    """

    def __init__(
        self,
        api: Api,
        node: str,
        hosts: Iterator[str],
        logs: Path,
        env: Mapping[str, str] | None = None,
        pace: float = 1.0,
    ) -> None:
        self._api = api
        self._pods = api.of(POD)
        self.node = node
        self._hosts = hosts
        self._logs = logs
        self._env = {"PATH": os.environ["PATH"], **(env or {})}
        self._pace = pace
        self._folder = Path(tempfile.mkdtemp(prefix="pods-"))  # a short path: sockets are there
        self._seen: dict[str, Object] = {}
        """All pods of the machine, by their uids, as listed last."""
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._processes: dict[str, Forked] = {}
        self._task: asyncio.Task[None] | None = None
        self._ended: dict[str, int] = {}
        """By uids, the exit codes of pods whose container has ended by itself last."""
        self._conditions: dict[tuple[str, str], tuple[str, str]] = {}
        """By uids and types, the status of conditions, and since when."""
        self.codes: dict[str, int] = {}
        """By the names of pods, the exit codes of their preStop hooks."""
        self.ran: dict[str, Object] = {}
        """By their addresses, all pods that it has run."""

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
        shutil.rmtree(self._folder)
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

    def _is_ending(self, uid: str) -> bool:
        return "deletionTimestamp" in self._seen[uid]["metadata"]

    async def _live(self, uid: str) -> None:
        """Run one pod, from its process's start to the end of its object."""
        pod, host = self._seen[uid], next(self._hosts)
        self.ran[host] = pod
        (container,) = pod["spec"]["containers"]
        volumes = Volumes(self._api, pod, self._folder / uid)
        while (missing := await volumes.missing()) is not None and not self._is_ending(uid):
            await self._say(uid, host, waiting=("ContainerCreating", f"no {missing}"))
            await asyncio.sleep(LOOK)
        env = {
            **self._env,
            "PDPROXY_LISTEN__HOST": host,  # as the image has it, but for the address
            **await self._variables(container, pod, host),
        }
        env = {name: volumes.here(value) for name, value in env.items()}
        starts = 0
        while not self._is_ending(uid):
            await self._start(uid, container, host, env, volumes)
            starts += 1
            await self._watch(uid, container, host, volumes, starts)
            if not self._is_ending(uid):
                self._ended[uid] = await self._processes[uid].wait()
                waiting = ("CrashLoopBackOff", f"its process has ended {starts} times")
                await self._say(uid, host, waiting=waiting, starts=starts)
                await self._sleep(uid, AGAIN / self._pace)
        await self._end(uid, container, env, volumes)

    async def _start(
        self,
        uid: str,
        container: Mapping[str, Any],
        host: str,
        env: Mapping[str, str],
        volumes: Volumes,
    ) -> None:
        words = _command(container)
        own = (word.replace("0.0.0.0", host) for word in words)
        program, *arguments = (volumes.here(_expanded(word, env)) for word in own)
        assert program == "pdproxy"
        name = self._seen[uid]["metadata"]["name"]
        with (self._logs / f"{name}.log").open("ab") as log:
            self._processes[uid] = command(*arguments, env=env, stderr=log)

    async def _watch(
        self, uid: str, container: Mapping[str, Any], host: str, volumes: Volumes, starts: int
    ) -> None:
        """Say whether a container is ready, until its process has ended or its pod is to end."""
        process = self._processes[uid]
        startup, readiness = container.get("startupProbe"), container["readinessProbe"]
        said: tuple[bool, bool] | None = None
        failures, is_ready = 0, False
        while not self._is_ending(uid) and process.returncode is None:
            probe = startup or readiness
            if await _answers(probe, container, host):
                if startup is not None:
                    startup = None
                    continue
                failures, is_ready = 0, True
            else:
                failures += 1
                is_ready = is_ready and failures < probe.get("failureThreshold", 3)
            if said != (now := (is_ready, startup is None)):
                await self._say(uid, host, is_ready=now[0], is_started=now[1], starts=starts)
                said = now
            await volumes.missing()  # other contents of ConfigMaps
            await self._sleep(uid, probe["periodSeconds"] / self._pace)

    async def _sleep(self, uid: str, seconds: float) -> None:
        """Sleep, until the pod is to end at most."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end and not self._is_ending(uid):
            await asyncio.sleep(min(LOOK, seconds))

    async def _say(
        self,
        uid: str,
        host: str,
        *,
        is_ready: bool = False,
        is_started: bool = False,
        waiting: tuple[str, str] | None = None,
        starts: int = 0,
    ) -> None:
        """Write the pod's status. `is_started`: whether the startup probe was answered; `waiting`:
        why its container does not run, and a message.
        """
        pod = self._seen[uid]
        state: dict[str, Any] = {"running": {}}
        if waiting is not None:
            state = {"waiting": {"reason": waiting[0], "message": waiting[1]}}
        (container,) = pod["spec"]["containers"]
        of_container = {
            "name": container["name"],
            "ready": is_ready,
            "started": is_started,
            "restartCount": max(0, starts - 1),
            "state": state,
        }
        if (code := self._ended.get(uid)) is not None:
            of_container["lastState"] = {"terminated": {"exitCode": code, "reason": "Error"}}
        conditions = [{"type": "PodScheduled", "status": "True"}, ready_condition(is_ready)]
        status = {
            "phase": "Running" if starts else "Pending",
            "conditions": [self._since(uid, one) for one in conditions],
            "containerStatuses": [of_container],
        }
        if starts:
            status |= {"podIP": host, "podIPs": [{"ip": host}]}
        await self._pods.set_status(pod, status)

    def _since(self, uid: str, condition: dict[str, str]) -> dict[str, str]:
        """Return a condition with the time since which it is so."""
        key = (uid, condition["type"])
        status, _ = self._conditions.get(key, ("", ""))
        if status != condition["status"]:
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            self._conditions[key] = (condition["status"], now)
        return {**condition, "lastTransitionTime": self._conditions[key][1]}

    async def _end(
        self,
        uid: str,
        container: Mapping[str, Any],
        env: Mapping[str, str],
        volumes: Volumes,
    ) -> None:
        loop, pod = asyncio.get_running_loop(), self._seen[uid]
        process = self._processes.get(uid)
        end = loop.time() + pod["spec"]["terminationGracePeriodSeconds"]
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        if process is not None:
            if hook is not None and process.returncode is None:
                words = [volumes.here(_expanded(word, env)) for word in hook]
                name = pod["metadata"]["name"]
                self.codes[name] = await self._hooked(name, words, env, end - loop.time())
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

    async def _variables(
        self, container: Mapping[str, Any], pod: Object, host: str
    ) -> dict[str, str]:
        """The environment of a container at an address."""
        metadata = pod["metadata"]
        fields = {
            "status.podIP": host,
            "metadata.name": metadata["name"],
            "metadata.namespace": metadata["namespace"],
            "metadata.uid": metadata["uid"],
        }
        found: dict[str, str] = {}
        for one in container.get("env", ()):
            source = one.get("valueFrom", {})
            if "fieldRef" in source:
                value = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                value = await self._secret(**source["secretKeyRef"])
            else:
                value = one["value"]
            found[one["name"]] = _expanded(value, found)
        return found

    async def _secret(self, name: str, key: str) -> str:
        (found,) = [
            one for one in await self._api.of(SECRET).list() if one["metadata"]["name"] == name
        ]
        return b64decode(found["data"][key]).decode()


def _command(container: Mapping[str, Any]) -> list[str]:
    """The words of a container's process. The image begins with `pdproxy`."""
    return [*container.get("command", ["pdproxy"]), *container.get("args", ())]


def _expanded(text: str, env: Mapping[str, str]) -> str:
    """A text with the values of variables in place of `$(NAME)`."""
    for name, value in env.items():
        text = text.replace(f"$({name})", value)
    return text


async def _answers(probe: Mapping[str, Any], container: Mapping[str, Any], host: str) -> bool:
    """Whether a probe is answered with 200. Its port is a number, or the name of one."""
    ports = {one.get("name"): one["containerPort"] for one in container.get("ports", ())}
    port = probe["httpGet"]["port"]
    with contextlib.suppress(OSError, EOFError, TimeoutError):
        async with asyncio.timeout(probe["timeoutSeconds"]):
            client = Client(*await asyncio.open_connection(host, ports.get(port, port)))
            try:
                client.send(request("GET", probe["httpGet"]["path"], b""))
                return (await client.answer()).status == 200
            finally:
                client.close()
    return False
