"""The operator before a real API server: killed at any moment, two of them, the API away, and
another manager of the same objects.
"""

# Run by `.ci/full kubernetes`. Pods are ready at once: what runs in them is tested elsewhere.

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from pdproxy_operator import definitions
from pdproxy_operator.names import APPLIED, MANAGER
from pdproxy_operator.resources import API_VERSION
from tests.fakes.ports import free_port
from tests.kubernetes.build import ensure
from tests.kubernetes.cluster import DEFINITIONS, Cluster
from tests.kubernetes.deployments import Controllers
from tests.kubernetes.kinds import KINDS, POD, Front, front_of
from tests.kubernetes.objects import RealApi

pytestmark = pytest.mark.timeout(1800)
KILLS = int(os.environ.get("PDPROXY_TEST_KILLS", "50"))
OWN = f"/apis/{API_VERSION}/namespaces/default"
OLD, NEW = "vllm/vllm-openai:v0.32.0", "vllm/vllm-openai:v0.33.0"
_SHORT = (
    "import sys; from pdproxy_operator import lease, work; work.LONGEST_PAUSE = {pause}; "
    "lease.DURATION, lease.RENEW_WITHIN = 40, 30; "  # this machine may be busy
    "from pdproxy.cli.main import main; sys.exit(main(sys.argv[1:]))"
)
Object = dict[str, Any]


class World:
    """An API server with controllers, and operators in processes of their own."""

    def __init__(self, cluster: Cluster, front: Front, folder: Path) -> None:
        self.cluster, self.front = cluster, front
        self.pause = 2.0
        """The operator's longest pause after failures."""
        self._folder = folder
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": front.url}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {}}],
            "current-context": "c",
        }
        (folder / "kubeconfig").write_text(yaml.safe_dump(config))

    # what a user does

    async def put(self, kind: str, name: str, **spec: Any) -> None:
        """Have a resource with this spec."""
        thing = {
            "apiVersion": API_VERSION,
            "kind": kind,
            "metadata": {"name": name, "labels": {"model": "m"}},
            "spec": spec,
        }
        plural = "pdruntimes" if kind == "PDRuntime" else "pdproxies"
        try:
            await self.cluster.ask("POST", f"{OWN}/{plural}", thing)
        except aiohttp.ClientError:  # it is there
            await self.cluster.ask("PATCH", f"{OWN}/{plural}/{name}", {"spec": spec})

    async def engines(self, image: str, prefill: int, decode: int) -> None:
        """Have so many engines of an image, and proxies."""
        for name, count in (("prefill", prefill), ("decode", decode)):
            common = {"role": name, "model": {"name": "org/m"}, "image": image}
            await self.put("PDRuntime", name, **common, replicas=count)
        selector = {"matchLabels": {"model": "m"}}
        await self.put("PDProxy", "main", runtimeSelector=selector, image="pdproxy:1")

    # what there is

    async def objects(self) -> dict[tuple[str, str], Object]:
        """Return all objects but pods, Events and Leases, with what their users have made."""
        found = await self.front.objects()
        for plural in definitions.NAMES:
            listed = await self.cluster.ask("GET", f"{OWN}/{plural}")
            found |= {(one["kind"], one["metadata"]["name"]): one for one in listed["items"]}
        left_out = ("Pod", "Event", "Lease", "Secret")
        return {key: one for key, one in found.items() if key[0] not in left_out}

    async def shown(self) -> dict[tuple[str, str], Object]:
        """Return them without what chance and time say."""
        found = copy.deepcopy(await self.objects())
        for one in found.values():
            meta = one["metadata"]
            for key in ("uid", "resourceVersion", "generation", "creationTimestamp"):
                meta.pop(key, None)
            meta.pop("managedFields", None)
            for owner in meta.get("ownerReferences", ()):
                owner.pop("uid")
            meta.get("annotations", {}).pop(APPLIED, None)
            status = one.get("status", {})
            status.pop("observedGeneration", None)
            # nobody answers at /metrics here, and when the operator knows that is chance
            status["conditions"] = [
                (each["type"], each["status"], each["reason"])
                for each in status.get("conditions", ())
                if each["status"] != "Unknown" and one["kind"].startswith("PD")
            ]
        return found

    async def until(self, holds: Callable[[], Awaitable[bool]], seconds: float = 120) -> None:
        """Wait until something holds."""
        async with asyncio.timeout(seconds):
            while not await holds():
                await asyncio.sleep(0.2)

    async def ready(self, image: str, prefill: int, decode: int) -> bool:
        """Return whether there are just these engines, and all are ready."""
        engines = [
            (one["spec"], one.get("status", {}).get("readyReplicas", 0))
            for (kind, name), one in (await self.objects()).items()
            if kind == "Deployment" and name != "main"
        ]
        found = [
            (spec["template"]["spec"]["containers"][0]["image"], spec["replicas"], ready)
            for spec, ready in engines
        ]
        return sorted(found) == sorted([(image, prefill, prefill), (image, decode, decode)])

    async def lease(self) -> str:
        """Return who holds the Lease, "": nobody."""
        found = await self.front.objects()
        one = found.get(("Lease", MANAGER))
        return "" if one is None else one["spec"]["holderIdentity"]

    # operators

    @asynccontextmanager
    async def operator(
        self, *more: str, name: str = "operator"
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """Have one run until it is killed at the end."""
        port = free_port()
        config = str(self._folder / "kubeconfig")
        with (self._folder / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _SHORT.format(pause=self.pause), "operator"),
                *("--kubeconfig", config, "--listen", f"127.0.0.1:{port}", *more),
                env={**os.environ, "POD_NAME": name},
                stdout=log,
                stderr=log,
            )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def log(self, name: str = "operator") -> str:
        """Return what operators of this name have logged."""
        return (self._folder / f"{name}.log").read_text()


async def _kubelet(api: RealApi) -> None:
    """Have all pods be ready at once, and gone when they are deleted."""
    pods = api.of(POD)
    while True:
        for one in await pods.list():
            if one["metadata"].get("deletionTimestamp"):
                await pods.remove(one)
            elif "status" not in one:
                conditions = [
                    {"type": name, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
                    for name in ("PodScheduled", "Ready")
                ]
                status = {"phase": "Running", "podIP": "127.0.0.1", "conditions": conditions}
                await pods.set_status(one, status)
        await asyncio.sleep(0.1)


async def _always(run: Callable[[], Awaitable[None]]) -> None:
    """Run again what fails while the server is away."""
    while True:
        with contextlib.suppress(aiohttp.ClientError, ConnectionError, KeyError):
            await run()
        await asyncio.sleep(0.2)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    folder = tmp_path / "cluster"
    folder.mkdir()
    cluster = Cluster(await asyncio.to_thread(ensure), folder)
    async with cluster.running(), front_of(cluster) as front:
        for one in yaml.safe_load_all(definitions.text()):
            await cluster.ask("POST", DEFINITIONS, one)
        paths = [f"{kind.there}/{kind.plural}" for kind in KINDS]
        for path in [*paths, *(f"{OWN}/{name}" for name in definitions.NAMES)]:
            await _served(cluster, path)
        api = RealApi(cluster)
        controllers = Controllers(api, ["127.0.0.1"], pace=100.0)
        tasks = [
            asyncio.create_task(_always(controllers.run)),
            asyncio.create_task(_always(lambda: _kubelet(api))),
        ]
        try:
            yield World(cluster, front, tmp_path)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _served(cluster: Cluster, path: str) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                await cluster.ask("GET", path)
                return
            await asyncio.sleep(0.1)


async def test_an_operator_that_is_killed_converges(world: World) -> None:
    """During changes, at random moments, to the objects of one that nobody has killed."""
    await world.engines(NEW, 2, 3)
    async with world.operator():
        await world.until(lambda: world.ready(NEW, 2, 3))

        async def says_so() -> bool:
            status = (await world.shown())["PDProxy", "main"].get("status", {})
            return ("Progressing", "False", "UpToDate") in status.get("conditions", ())

        await world.until(says_so)
        await asyncio.sleep(5)
        wanted = await world.shown()
    assert len(wanted) > 15
    chance = random.Random(KILLS)
    kills = 0
    while kills < KILLS:
        images, counts = (OLD, NEW), range(1, 4)
        await world.engines(chance.choice(images), chance.choice(counts), chance.choice(counts))
        async with world.operator() as process:
            await asyncio.sleep(chance.uniform(1.0, 4.0))
            assert process.returncode is None, world.log()[-2000:]
            kills += 1
    print(f"{kills} kills, {world.log().count('PDProxy default/main')} lines of failures")
    await world.engines(NEW, 2, 3)
    async with world.operator():

        async def same() -> bool:
            return await world.shown() == wanted

        with contextlib.suppress(TimeoutError):
            await world.until(same)
    found = await world.shown()
    for key in found.keys() | wanted.keys():
        assert found.get(key) == wanted.get(key), key


async def test_others_may_have_fields_and_nothing_is_written_in_a_calm_minute(
    world: World,
) -> None:
    await world.engines(OLD, 1, 1)
    async with world.operator():
        await world.until(lambda: world.ready(OLD, 1, 1))
        await asyncio.sleep(5)
        service = next(kind for kind in KINDS if kind.kind == "Service")
        path = f"{service.there}/namespaces/default/{service.plural}/main"
        theirs = {
            "metadata": {"annotations": {"of/others": "stays"}},
            "spec": {"externalTrafficPolicy": "Local", "selector": {"taken": "by others"}},
        }
        await world.cluster.ask("PATCH", f"{path}?fieldManager=others", theirs)
        await world.cluster.ask("PATCH", path, {"spec": {"type": "NodePort"}})

        async def is_back() -> bool:
            found = await world.cluster.ask("GET", path)
            return bool(found["spec"]["type"] == "ClusterIP")

        await world.until(is_back)
        found = await world.cluster.ask("GET", path)
        assert found["metadata"]["annotations"]["of/others"] == "stays"
        assert found["spec"]["externalTrafficPolicy"] == "Local"
        assert found["spec"]["selector"]["taken"] == "by others"
        managers = {one["manager"] for one in found["metadata"]["managedFields"]}
        assert {MANAGER, "others"} <= managers
        await asyncio.sleep(20)  # it knows by now that no proxy answers
        before = {
            key: one["metadata"]["resourceVersion"] for key, one in (await world.objects()).items()
        }
        await asyncio.sleep(60)
        after = {
            key: one["metadata"]["resourceVersion"] for key, one in (await world.objects()).items()
        }
        assert after == before


async def test_of_two_operators_one_acts_and_the_other_takes_over(world: World) -> None:
    await world.engines(OLD, 1, 1)
    async with world.operator("--leader-elect", name="first") as first:

        async def leads() -> bool:
            return (await world.lease()).startswith("first-")

        await world.until(leads)
        async with world.operator("--leader-elect", name="second") as second:
            await world.until(lambda: world.ready(OLD, 1, 1))

            async def waits() -> bool:
                return "acts: this operator waits" in world.log("second")

            await world.until(waits)
            await asyncio.sleep(20)
            assert await leads(), "it renews"
            first.kill()
            await world.engines(NEW, 2, 2)

            async def takes_over() -> bool:
                return (await world.lease()).startswith("second-")

            await world.until(takes_over)
            await world.until(lambda: world.ready(NEW, 2, 2))
            assert second.returncode is None


async def test_the_api_is_away_for_longer_than_every_pause(world: World) -> None:
    await world.engines(OLD, 1, 1)
    async with world.operator() as process:
        await world.until(lambda: world.ready(OLD, 1, 1))
        await world.engines(NEW, 2, 2)
        await world.cluster.kill("server")
        await asyncio.sleep(60)  # the informers' longest pause is 30 s, the queue's is 2 s here
        await world.cluster.start_server()
        await world.until(lambda: world.ready(NEW, 2, 2), 180)
        assert process.returncode is None
        assert "Traceback" not in world.log()
