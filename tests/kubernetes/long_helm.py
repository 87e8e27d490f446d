"""Helm installs the chart into a real API server, changes nothing by an upgrade without changes,
has one with changes, goes back, and leaves nothing behind; of the operator's chart it leaves what
users have made.
"""

# Run by `.ci/full kubernetes`. No pod starts: there is no kubelet, and Helm does not wait.

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.chart.render import CHART, OPERATOR, Values, helm, rendered
from tests.kubernetes.build import ensure
from tests.kubernetes.cluster import DEFINITIONS, Cluster
from tests.kubernetes.kinds import KINDS, Front, front_of

pytestmark = pytest.mark.timeout(600)
VALUES: Values = {
    "engineDefaults": {"model": "org/model"},
    "engines": [
        {"name": "prefill", "role": "prefill", "replicas": 2},
        {"name": "decode", "role": "decode", "replicas": 2},
    ],
}
Objects = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    folder = tmp_path / "cluster"
    folder.mkdir()
    made = Cluster(await asyncio.to_thread(ensure), folder)
    async with made.running():
        yield made


@pytest.fixture
async def front(cluster: Cluster) -> AsyncIterator[Front]:
    async with front_of(cluster) as made:
        for kind in KINDS:  # a definition takes a moment
            await _served(cluster, f"{kind.there}/{kind.plural}")
        yield made


async def _served(cluster: Cluster, path: str) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                await cluster.ask("GET", path)
                return
            await asyncio.sleep(0.1)


async def run(front: Front, folder: Path, *words: str, values: Values | None = None) -> str:
    """Run Helm against the front."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": front.url}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "llm"}}],
        "users": [{"name": "u", "user": {}}],
        "current-context": "c",
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(config))
    more = []
    if values is not None:
        (folder / "values.yaml").write_text(yaml.safe_dump(values))
        # the front has no schemas: tests/chart asks Kubernetes' own
        more = ["-f", str(folder / "values.yaml"), "--disable-openapi-validation"]
    given = ["--kubeconfig", str(folder / "kubeconfig"), "--namespace", "llm"]
    return await asyncio.to_thread(helm, *words, *given, *more)


def own(objects: Objects) -> Objects:
    """Return those of the chart: Helm writes down releases in Secrets."""
    return {
        (kind, name): {
            "metadata": {
                key: one["metadata"].get(key) for key in ("labels", "annotations", "generation")
            },
            **{key: value for key, value in one.items() if key != "metadata"},
        }
        for (kind, name), one in objects.items()
        if not name.startswith("sh.helm.release.")
    }


async def test_a_release_lives(front: Front, tmp_path: Path) -> None:
    chart = str(CHART)
    said = await run(front, tmp_path, "install", "pdproxy", chart, values=VALUES)
    assert "curl" in said
    first = own(await front.objects())
    of_chart = {(one["kind"], one["metadata"]["name"]) for one in rendered(VALUES)}
    tests = {key for key in of_chart if key[0] == "Pod"}  # of `helm test`: made when that is run
    assert first.keys() == of_chart - tests

    await run(front, tmp_path, "upgrade", "pdproxy", chart, values=VALUES)
    assert own(await front.objects()) == first, "nothing has changed, not even a generation"

    more = {**VALUES, "replicas": 3, "engines": VALUES["engines"][:1]}
    more["engines"] = [*more["engines"], {"name": "other", "role": "decode", "replicas": 1}]
    await run(front, tmp_path, "upgrade", "pdproxy", chart, values=more)
    second = own(await front.objects())
    assert second["Deployment", "pdproxy"]["spec"]["replicas"] == 3
    assert ("Deployment", "pdproxy-other") in second
    assert ("Deployment", "pdproxy-decode") not in second

    await run(front, tmp_path, "rollback", "pdproxy", "1")
    third = own(await front.objects())
    for objects in (first, third):
        for one in objects.values():
            one["metadata"].pop("generation")
    assert third == first

    await run(front, tmp_path, "uninstall", "pdproxy")
    assert await front.objects() == {}


async def test_what_users_have_made_outlives_the_operators_release(
    front: Front, cluster: Cluster, tmp_path: Path
) -> None:
    name = "pdproxy-operator"
    objects_of_release = {
        (one["kind"], one["metadata"]["name"])
        for one in rendered({}, release=name, chart=OPERATOR)
        if one["kind"] != "CustomResourceDefinition"
    }
    await run(front, tmp_path, "install", name, str(OPERATOR), values={})
    assert own(await front.objects()).keys() == objects_of_release
    path = "/apis/pdproxy.dev/v1alpha1/namespaces/llm/pdruntimes"
    await _served(cluster, path)
    spec = {"role": "decode", "model": {"name": "m"}, "image": "i"}
    runtime = {"apiVersion": "pdproxy.dev/v1alpha1", "kind": "PDRuntime", "spec": spec}
    made = await cluster.ask("POST", path, {**runtime, "metadata": {"name": "one"}})

    first = await generations(cluster)
    await run(front, tmp_path, "upgrade", name, str(OPERATOR), values={})
    assert await generations(cluster) == first

    other = {"definitions": {"install": False}, "watchNamespaces": ["llm"]}
    await run(front, tmp_path, "upgrade", name, str(OPERATOR), values=other)
    assert await generations(cluster) == first
    await run(front, tmp_path, "rollback", name, "1")

    said = await run(front, tmp_path, "uninstall", name)
    assert said.count("[CustomResourceDefinition]") == 2, said
    assert await front.objects() == {}
    assert await generations(cluster) == first
    await run(front, tmp_path, "install", name, str(OPERATOR), values={})
    await run(front, tmp_path, "install", "other", str(OPERATOR), values=other)
    assert await cluster.ask("GET", f"{path}/one") == made


async def generations(cluster: Cluster) -> dict[str, int]:
    """How often each definition of pdproxy's has changed."""
    found = (await cluster.ask("GET", DEFINITIONS))["items"]
    names = {one["metadata"]["name"]: one["metadata"]["generation"] for one in found}
    return {name: number for name, number in names.items() if name.endswith(".pdproxy.dev")}
