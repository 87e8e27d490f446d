"""A real API server takes the definitions of PDRuntime and PDProxy, fills in their defaults, and
refuses what can't work with a sentence; kubectl applies, scales, awaits, explains and shows them.
"""

# Run by `.ci/full kubernetes`.

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml

from pdproxy_operator import definitions
from pdproxy_operator.resources import API_VERSION, Proxy, Runtime
from tests.chart.programs import program
from tests.kubernetes.build import ensure
from tests.kubernetes.cluster import DEFINITIONS, Cluster
from tests.kubernetes.kinds import Front, front_of
from tests.operator.sets import SETS

pytestmark = pytest.mark.timeout(600)
COLLECTION = f"/apis/{API_VERSION}/namespaces/default"
CASES = yaml.safe_load(Path(__file__).with_name("operator_resources.yaml").read_text())
RUNTIMES, PROXIES = "pdruntime.pdproxy.dev", "pdproxy.pdproxy.dev"
"""How kubectl writes names of objects."""
PLURALS = {"PDRuntime": "pdruntimes", "PDProxy": "pdproxies"}
UNCHECKED = "some validation rules were not checked"
"""What an API server adds where an object has not even the form of its definition."""


def resource(kind: str, name: str = "one", spec: dict[str, Any] | None = None) -> dict[str, Any]:
    """A resource of the file's base, with other fields of its spec."""
    fields = {**CASES["base"][kind], **(spec or {})}
    given = {key: value for key, value in fields.items() if value is not None}
    metadata = {"name": name}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": given}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    folder = tmp_path / "cluster"
    folder.mkdir()
    made = Cluster(await asyncio.to_thread(ensure), folder)
    async with made.running():
        for one in yaml.safe_load_all(definitions.text()):
            await made.ask("POST", DEFINITIONS, one)
        for name in definitions.NAMES:
            await _served(made, f"{COLLECTION}/{name}")
        yield made


async def _served(cluster: Cluster, path: str) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                await cluster.ask("GET", path)
                return
            await asyncio.sleep(0.1)


async def refusal(cluster: Cluster, method: str, path: str, thing: Any) -> list[tuple[str, str]]:
    """What is wrong with which field, as the API server says it; nothing, if it takes all."""
    try:
        await cluster.ask(method, f"{path}?fieldValidation=Strict&dryRun=All", thing)
    except aiohttp.ClientError as error:
        status = json.loads(str(error).partition(" ")[2])
        causes = status.get("details", {}).get("causes") or [status]
        found = [(one.get("field", "").replace("<nil>", ""), one["message"]) for one in causes]
        return [(field, message) for field, message in found if UNCHECKED not in message]
    return []


async def test_good_resources_are_taken_and_filled_in(cluster: Cluster) -> None:
    for what, case in CASES["good"].items():
        path = f"{COLLECTION}/{PLURALS[case['kind']]}"
        thing = resource(**case)
        stored = await cluster.ask("POST", f"{path}?fieldValidation=Strict", thing)
        read: Any = msgspec.convert(stored, Runtime if case["kind"] == "PDRuntime" else Proxy)
        assert read.metadata.generation == 1, what
        await cluster.ask("DELETE", f"{path}/{thing['metadata']['name']}")


async def test_what_the_operators_other_tests_read_is_taken(cluster: Cluster) -> None:
    for name, resources in SETS.items():
        for kind, ones in (("PDRuntime", resources.runtimes), ("PDProxy", resources.proxies)):
            for one in ones:
                thing = resource(kind, one.metadata.name, msgspec.to_builtins(one.spec))
                said = await refusal(cluster, "POST", f"{COLLECTION}/{PLURALS[kind]}", thing)
                assert said == [], (name, thing)


async def test_bad_resources_are_refused_with_a_sentence(cluster: Cluster) -> None:
    wrong = []
    for case in CASES["bad"]:
        field, message = case.pop("at", ""), case.pop("says")
        thing = resource(**case)
        said = await refusal(cluster, "POST", f"{COLLECTION}/{PLURALS[case['kind']]}", thing)
        # before the sentence is what was given, and how the API server calls the mistake
        if [(field, True)] != [(at, f": {says}".endswith(f": {message}")) for at, says in said]:
            wrong.append((case, said))
    assert wrong == []


async def test_a_role_stays(cluster: Cluster) -> None:
    path = f"{COLLECTION}/pdruntimes"
    stored = await cluster.ask("POST", path, resource("PDRuntime"))
    stored["spec"]["role"] = "decode"
    ((field, message),) = await refusal(cluster, "PUT", f"{path}/one", stored)
    assert field == "spec.role"
    assert message.endswith(": role can not be changed: make another PDRuntime")


class Kubectl:
    """kubectl before a front of the API server."""

    def __init__(self, front: Front, folder: Path) -> None:
        cache = str(folder / "cache")
        self._words = [str(program("kubectl")), "--server", front.url, "--cache-dir", cache]

    async def __call__(self, *words: str, given: str = "", fails: bool = False) -> str:
        """Return what it prints; with `fails`, what it says of its failure."""
        done = await asyncio.to_thread(
            subprocess.run,
            [*self._words, *words],
            input=given,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode != 0) is fails, (words, done.stdout, done.stderr)
        return done.stderr if fails else done.stdout


async def say(cluster: Cluster, path: str, type_: str, **more: Any) -> None:
    """Write a status as the operator does."""
    condition = {"type": type_, "status": "True", "reason": "Enough", "message": "All are ready."}
    condition["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    status = {"status": {"conditions": [condition], **more}}
    await cluster.ask("PATCH", f"{COLLECTION}/{path}/status", status)


async def test_kubectl(cluster: Cluster, tmp_path: Path) -> None:
    async with front_of(cluster) as front:
        await _used(Kubectl(front, tmp_path), cluster)


async def _used(kubectl: Kubectl, cluster: Cluster) -> None:
    # the definitions again, as `pdproxy operator crds | kubectl apply -f -` does
    said = await kubectl("apply", "--server-side", "-f", "-", given=definitions.text())
    assert said.count("serverside-applied") == 2
    await kubectl("wait", "--for=condition=Established", "crd/pdruntimes.pdproxy.dev")

    scaled = resource("PDRuntime", "two", {"autoscaling": {"maxReplicas": 4}})
    things = [resource("PDRuntime"), resource("PDProxy"), scaled]
    said = await kubectl("apply", "-f", "-", given=yaml.safe_dump_all(things))
    assert said.count("created") == 3
    said = await kubectl("apply", "-f", "-", given=yaml.safe_dump_all(things))
    assert said.count("unchanged") == 3
    bad = yaml.safe_dump(resource("PDRuntime", spec={"args": ["-tp=2"]}))
    assert "use tensorParallelSize" in await kubectl("apply", "-f", "-", given=bad, fails=True)

    await kubectl("scale", "pdrt/one", "--replicas=3")
    assert await kubectl("get", "pdrt", "one", "-o", "jsonpath={.spec.replicas}") == "3"
    said = await kubectl("scale", "pdrt/two", "--replicas=0", fails=True)
    assert "autoscaling never goes to zero" in said

    waiting = asyncio.create_task(kubectl("wait", "--for=condition=Available", "pdrt/one"))
    await asyncio.sleep(1)
    assert not waiting.done()
    numbers = {"replicas": 3, "readyReplicas": 2, "drainingReplicas": 1, "selector": "a=b"}
    await say(cluster, "pdruntimes/one", "Available", revision="r1", **numbers)
    assert "condition met" in await waiting
    await say(cluster, "pdproxies/one", "PairsComplete", readyReplicas=2, url="http://one.default")

    rows = columns(await kubectl("get", "pdrt", "one", "-o", "wide"))
    assert rows[0][:7] == ["NAME", "ROLE", "MODEL", "DESIRED", "READY", "DRAINING", "AVAILABLE"]
    assert rows[1][:7] == ["one", "prefill", "org/model", "3", "2", "1", "True"]
    assert rows[1][-1] == "All are ready."
    rows = columns(await kubectl("get", "pdp"))
    assert rows[0] == ["NAME", "DESIRED", "READY", "AVAILABLE", "PAIRS", "CONFIG", "URL", "AGE"]
    shown = dict(zip(rows[0], rows[1], strict=False))
    assert (shown["DESIRED"], shown["READY"]) == ("2", "2")
    assert "http://one.default" in rows[1]

    said = await kubectl("explain", "pdruntime.spec.drain.seconds")
    assert "Seconds for which an engine that is to end waits" in said
    assert "connector is shared, kv_connector" in await kubectl("explain", "pdrt.spec")
    assert "prefill and decode engines in" in await kubectl("explain", "pdp.spec.rollout")

    # a category with the name of a kind would make this get, and delete, objects of both kinds
    assert (await kubectl("get", "pdproxy", "one", "-o", "name")).split() == [f"{PROXIES}/one"]
    said = await kubectl("get", "pd", "-o", "name")
    assert said.split() == [f"{RUNTIMES}/one", f"{RUNTIMES}/two", f"{PROXIES}/one"]
    await kubectl("delete", "pdproxy", "--all")
    assert (await kubectl("get", "pd", "-o", "name")).split() == said.split()[:2]


def columns(table: str) -> list[list[str]]:
    """The rows of what kubectl prints: columns are three blanks apart."""
    return [
        [cell for cell in map(str.strip, line.split("   ")) if cell] for line in table.splitlines()
    ]
