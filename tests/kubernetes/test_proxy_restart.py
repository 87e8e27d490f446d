"""Proxies in pods that are replaced behind a Service, which learns late that a pod is ending."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.client import Answer, Client
from tests.fakes.kubernetes_api import KubernetesApi
from tests.fakes.ports import free_port
from tests.fakes.world import COMPLETIONS, completion
from tests.kubernetes.deployments import Deployment, ended, ends, is_ready, owners
from tests.kubernetes.fleet import EXPECTED, NODES, TOKENS, template, until_settled
from tests.kubernetes.kinds import POD
from tests.kubernetes.kubelet import Kubelet, addresses
from tests.kubernetes.objects import FakeApi, Objects

LATE = 0.5
"""Seconds until each machine sends new connections to no pod that is ending."""
CLIENTS = 12
FAST: Any = {"decode-step-s": "0.02", "transfer-latency-s": "0.001"}


class Service:
    """A Service's address: each connection goes to one of its pods, as kube-proxy does it."""

    def __init__(self, pods: Objects, app: str, port: int) -> None:
        self._pods, self._app, self._port = pods, app, port
        self._places: list[str] = []
        self._turns = itertools.count()
        self._piped: set[asyncio.Task[None]] = set()

    async def follow(self) -> None:
        """Follow the pods, until cancelled."""
        loop, known = asyncio.get_running_loop(), list[str]()
        while True:
            places = [
                pod["status"]["podIP"]
                for pod in await self._pods.list()
                if self._app in owners(pod) and is_ready(pod) and not ends(pod)
            ]
            if places != known:
                loop.call_later(LATE, setattr, self, "_places", places)
                known = places
            await asyncio.sleep(0.05)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what comes on a connection."""
        try:
            place = self._places[next(self._turns) % len(self._places)]
            to = await asyncio.open_connection(place, self._port)
        except (OSError, ZeroDivisionError):
            writer.transport.abort()
            return
        await asyncio.gather(_pass_on(reader, to[1]), _pass_on(to[0], writer))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


def _template(settings: Path, port: int, version: str) -> Any:
    container = {
        "name": "proxy",
        "command": ["pdproxy", "serve", "--config", str(settings), "--host", "$(POD_IP)"],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "VERSION", "value": version},
        ],
        "readinessProbe": {
            "httpGet": {"path": "/ready/proxy", "port": port},
            "periodSeconds": 0.2,
            "timeoutSeconds": 2,
        },
    }
    return {
        "metadata": {"labels": {}},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 60},
    }


def _settings(port: int, engines: Mapping[str, str], linger: float) -> str:
    nodes = [{"url": f"http://{host}:{port}", "role": role} for role, host in engines.items()]
    listen = {"port": port, "linger": linger}
    return json.dumps({"listen": listen, "pools": [{"connector": "nixl", "nodes": nodes}]})


async def _ask(seen: Counter[str], over: asyncio.Event, place: str, port: int, number: int) -> None:
    """Ask again and again: on one connection for as long as the proxy keeps it, or on a new one
    each time; streams, or whole answers.
    """
    keeps, streams = number % 2 == 0, number % 4 < 2
    client: Client | None = None
    while not over.is_set():
        try:
            if client is None:
                client = Client(*await asyncio.open_connection(place, port))
            client.post(COMPLETIONS, completion(stream=streams, max_tokens=TOKENS))
            answer = await client.answer()
        except (OSError, EOFError) as error:
            seen[repr(error)] += 1
            answer = Answer()
        else:
            right = answer.status == 200 and answer.ended and answer.text == EXPECTED
            seen["right" if right else f"{answer.status} {answer.body[-200:]!r}"] += 1
        if not keeps or not answer.ended or answer.header("connection") == "close":
            if client is not None:
                client.close()
            client = None
        await asyncio.sleep(0.02)


async def _replace(folder: Path, linger: float) -> Counter[str]:
    """Replace two proxies while clients ask. Return how their requests have ended."""
    api, port, hosts, seen = FakeApi(KubernetesApi()), free_port(), addresses(), Counter[str]()
    pods = api.of(POD)
    over, place, settings = asyncio.Event(), next(hosts), folder / "pdproxy.yaml"
    async with AsyncExitStack() as stack:
        kubelet = await stack.enter_async_context(Kubelet(api, NODES[0], hosts, folder))
        engines = [
            Deployment(
                pods, role, 1, template(role, port, [], hook=False, **FAST), [kubelet.node], 0
            )
            for role in ("prefill", "decode")
        ]
        proxies = Deployment(pods, "proxy", 2, _template(settings, port, ""), [kubelet.node], LATE)
        service = Service(pods, "proxy", port)
        tasks = [asyncio.create_task(one.run()) for one in engines]
        stack.push_async_callback(ended, tasks)
        await until_settled(*engines)
        found = {min(owners(pod)): pod["status"]["podIP"] for pod in await pods.list()}
        settings.write_text(_settings(port, found, linger))
        tasks += [asyncio.create_task(proxies.run()), asyncio.create_task(service.follow())]
        await until_settled(proxies)
        await asyncio.sleep(2 * LATE)
        server = await asyncio.start_server(service.connected, place, port)
        stack.callback(server.close)
        clients = [
            asyncio.create_task(_ask(seen, over, place, port, number)) for number in range(CLIENTS)
        ]
        stack.push_async_callback(ended, clients)
        proxies.template = _template(settings, port, "2")
        await until_settled(proxies)
        await asyncio.sleep(2 * LATE)
        over.set()
        await asyncio.gather(*clients)
    return seen


@pytest.mark.timeout(300)
async def test_a_rolling_restart_behind_a_service_costs_no_connection(tmp_path: Path) -> None:
    """The proxies take connections for longer than machines need to learn of their end; without
    that, connections are refused.
    """
    seen = await _replace(tmp_path, linger=4 * LATE)
    assert set(seen) == {"right"}, seen


@pytest.mark.timeout(300)
async def test_without_the_time_connections_are_lost(tmp_path: Path) -> None:
    """What the test before would see."""
    seen = await _replace(tmp_path, linger=0.0)
    assert set(seen) > {"right"}, seen
