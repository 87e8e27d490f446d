"""The list and watch of pods before a real API server, which is killed, emptied, compacted, cut off
and held up: whatever happens, the pods are the server's again.
"""

# Run by `.ci/full kubernetes`: the first run builds the API server.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from pdproxy.kit.errors import Wait
from pdproxy.settings.kubernetes import Kubernetes
from pdproxy.upstream.kubernetes import KubernetesApi
from tests.fakes.kubernetes_api import KubernetesApi as Server
from tests.kubernetes.build import ensure
from tests.kubernetes.cluster import DEFINITIONS, Cluster
from tests.unit.test_informer import APP, Follower, kubeconfig

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    folder = tmp_path / "cluster"
    folder.mkdir()
    made = Cluster(await asyncio.to_thread(ensure), folder)
    async with made.running():
        yield made


@asynccontextmanager
async def following(
    cluster: Cluster, user: dict[str, Any] | None = None, **times: float
) -> AsyncIterator[Follower]:
    """Follow its pods. `user`: of the kubeconfig file."""
    path = kubeconfig(cluster.folder, cluster, **(user or {}))  # type: ignore[arg-type]
    made = Follower(Server(), Kubernetes(kubeconfig=path, **times), 0.5)  # type: ignore[arg-type]
    task = asyncio.create_task(made.informer.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def made(cluster: Cluster, count: int) -> list[str]:
    """Make so many pods."""
    names = [f"p{number:04}" for number in range(count)]
    for begin in range(0, count, 20):
        await asyncio.gather(
            *(cluster.put(name, metadata=APP) for name in names[begin : begin + 20])
        )
    return names


async def test_all_pages_of_a_list_and_what_comes_then(cluster: Cluster) -> None:
    names = await made(cluster, 1100)
    await cluster.put("other")
    async with following(cluster) as f:
        await f.has(*names)
        await cluster.delete(names[0])
        await f.has(*names[1:])
        await cluster.patch(names[1], metadata={"labels": {"app": "else"}})
        await f.has(*names[2:])
        assert f.counts.lists == {"start": 1}


async def test_pages_that_the_server_has_compacted_have_a_list_from_the_start(
    cluster: Cluster,
) -> None:
    names = await made(cluster, 600)
    held = 0

    async def hold_up(request: web.Request) -> None:
        nonlocal held
        if "continue" in request.query and not held:
            held += 1
            await cluster.delete(names[0])
            for number in range(12):  # the server compacts what is older than its last look
                await asyncio.sleep(1)
                await cluster.patch(names[1], metadata={"annotations": {"n": str(number)}})

    cluster.before = hold_up
    async with following(cluster) as f:
        await f.has(*names[1:])
        assert held == 1
        assert f.counts.lists == {"expired": 1}


async def test_what_is_deleted_while_a_watch_is_away_is_gone(cluster: Cluster) -> None:
    names = await made(cluster, 40)
    async with following(cluster) as f:
        await f.has(*names)
        for count, name in enumerate(names[:10], 1):
            cluster.cut()
            await cluster.delete(name)
            # Two watches that are cut before they have an event would be two failures in a row.
            await f.has(*names[count:])
        assert f.counts.lists == {"start": 1}


async def test_a_server_that_is_killed_and_begins_again(cluster: Cluster) -> None:
    """What is deleted the moment it answers is gone. Once more with a version that is compacted:
    the server has no event of it, and says so.
    """
    names = await made(cluster, 60)
    async with following(cluster) as f:
        await f.has(*names)
        await cluster.kill("server")
        await asyncio.sleep(3)
        assert f.problem is not None
        assert f.names == {*names}
        await cluster.start_server()
        for name in names[:10]:
            await cluster.delete(name)
        await f.has(*names[10:])
        lists = f.counts.lists.total()
        cluster.hold_up()
        for number in range(10):
            await asyncio.sleep(1)
            await cluster.patch(names[10], metadata={"annotations": {"n": str(number)}})
        await cluster.delete(names[11])
        await cluster.kill("server")
        await cluster.start_server()
        cluster.cut()
        await f.has(names[10], *names[12:])
        print(f"killed twice: lists {dict(f.counts.lists)}, {lists} behind the first time")
        assert f.counts.lists["expired"] + f.counts.lists["failed"] > 0


@pytest.mark.parametrize("told", [True, False])
async def test_a_storage_that_is_lost_begins_with_low_versions(
    told: bool, cluster: Cluster
) -> None:
    """Those who have followed it have versions of the future. Once they are told that the server is
    away, and once they notice nothing of it.
    """
    names = await made(cluster, 40)
    for number in range(100):
        await cluster.patch(names[0], metadata={"annotations": {"n": str(number)}})
    async with following(cluster, relist=25, silence=12) as f:
        await f.has(*names)
        await asyncio.sleep(1)
        if not told:
            cluster.hold_up()
        await cluster.begin_anew()
        await cluster.put("new", metadata=APP)
        await f.has("new")
        print(f"storage lost, {told=}: lists {dict(f.counts.lists)}, waits passed {len(f.passed)}")


async def test_a_connection_that_is_held_up_is_given_up(cluster: Cluster) -> None:
    """No list is needed."""
    names = await made(cluster, 10)
    async with following(cluster, silence=3) as f:
        await f.has(*names)
        await asyncio.sleep(1)
        cluster.hold_up()
        await cluster.delete(names[0])
        await f.has(*names[1:])
        assert f.counts.lists == {"start": 1}
        assert Wait.WATCH in f.passed


async def test_a_token_is_replaced(cluster: Cluster) -> None:
    token = cluster.folder / "token"
    token.write_text("first")
    cluster.tokens = {"first"}
    names = await made(cluster, 3)
    async with following(cluster, {"tokenFile": str(token)}) as f:
        await f.has(*names)
        token.write_text("second")
        cluster.tokens = {"second"}
        cluster.cut()
        await cluster.delete(names[0])
        await f.has(*names[1:])
        assert f.counts.lists == {"start": 1}


async def test_a_client_certificate_is_known_to_the_server(cluster: Cluster) -> None:
    """Its own, without anything between."""
    user = {"client-certificate": "admin.pem", "client-key": "admin.key"}
    path = Path(kubeconfig(cluster.folder, cluster, **user))  # type: ignore[arg-type]
    content = yaml.safe_load(path.read_text())
    place = {"server": cluster.server, "certificate-authority": "ca.pem"}
    content["clusters"][0]["cluster"] = place
    path.write_text(yaml.safe_dump(content))
    connection = KubernetesApi(Kubernetes(kubeconfig=str(path))).connection()
    assert b"pods.core.pdproxy.test" in await connection.get(DEFINITIONS, {})
    await connection.drop()


async def test_bookmarks_come_or_do_not(cluster: Cluster) -> None:
    """Where a server sends none for what does not change, nothing is wrong either."""
    names = await made(cluster, 3)
    async with following(cluster, silence=20) as f:
        await f.has(*names)
        await asyncio.sleep(75)
        print(f"75 s without a change: events {dict(f.counts.events)}, passed {len(f.passed)}")
        assert f.counts.lists == {"start": 1}
        assert f.problem is None
