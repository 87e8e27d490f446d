"""The rights of the operator's chart are those that the operator uses: no request is without its
right, and no right is without a request.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from pdproxy_operator import lease, pages, work
from pdproxy_operator.figures import EngineFigures, Figures
from pdproxy_operator.kinds import WRITTEN
from tests.chart.test_operator import RIGHTS
from tests.fakes.kubernetes_api import KubernetesApi
from tests.fakes.world import until
from tests.operator.cluster import NAMESPACE, Cluster, cluster
from tests.operator.resources import proxy, runtime

_PATH = re.compile(
    r"/apis?/((?P<group>[a-z0-9.-]+)/)?v[0-9a-z]+(/namespaces/[^/]+)?/(?P<kind>[a-z]+)"
    r"(/(?P<name>[^/]+)(/(?P<part>[a-z]+))?)?"
)
_BY_METHOD = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def asked(api: KubernetesApi) -> dict[str, tuple[str, ...]]:
    """The verbs that were asked for, by group and resource."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for (method, path), (_, query) in zip(api.requests, api.asked, strict=True):
        match = _PATH.fullmatch(path)
        if match is None:  # which kinds there are: everybody may ask that
            continue
        verb = _BY_METHOD.get(method) or ("get" if match["name"] else "list")
        part = f"/{match['part']}" if match["part"] else ""
        resource = f"{match['group'] or ''}/{match['kind']}{part}"
        found[resource].add("watch" if "watch" in query else verb)
        if verb == "patch" and not part and match["kind"] != "pods":
            found[resource].add("create")  # by which server-side apply makes an object
    return {resource: tuple(sorted(verbs)) for resource, verbs in found.items()}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "EVERY", 0.1)
    monkeypatch.setattr(lease, "EVERY", 0.1)
    monkeypatch.setattr(work, "FIRST_PAUSE", 0.05)


def orphan(of: Cluster, plural: str) -> None:
    """Make an object that is the PDProxy's, and that it does not want."""
    uid = of.of("pdproxies")["pdproxy"]["metadata"]["uid"]
    labels = {"app.kubernetes.io/managed-by": "pdproxy-operator", "pdproxy.dev/proxy": "pdproxy"}
    owners = [{"uid": uid, "controller": True}]
    metadata = {"labels": labels, "ownerReferences": owners}
    spec = {"template": {"metadata": {"labels": {}}, "spec": {"containers": [{"image": "x"}]}}}
    of.api.put("unwanted", NAMESPACE, plural, metadata=metadata, spec={"replicas": 0, **spec})


async def test_they_are_those_that_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = {"parentRefs": [{"name": "g"}], "hostnames": []}
    two = {"groupSize": 2, "tensorParallelSize": 2}
    scaled = {"minReplicas": 2, "maxReplicas": 3}
    async with cluster(tmp_path) as some:

        def figures(*_: object) -> Figures:
            known = {name: EngineFigures("", "", 1, 1, work=3) for name in some.of("pods")}
            return Figures(1, 1, engines=known)

        monkeypatch.setattr(pages.Pages, "figures", figures)
        some.put(
            runtime("p", "prefill", **two),
            runtime("d", "decode", replicas=2),
            runtime("a", "aggregated", autoscaling=scaled),
            proxy(route=route, monitor={"labels": {}}),
        )
        async with some.operating(leader_elect=True):
            await until(lambda: len(some.of("deployments")) == 3)
            await until(lambda: some.of("podmonitors") and some.of("httproutes"))
            await until(lambda: some.of("pdruntimes")["a"]["spec"]["replicas"] == 2)
            for kind in WRITTEN:
                orphan(some, kind.plural)
            await until(lambda: not any("unwanted" in some.of(kind.plural) for kind in WRITTEN))
            # no group any more, and another revision
            some.put(runtime("p", "prefill"), runtime("d", "decode", image="new"))
            await until(lambda: not some.of("leaderworkersets"))
            await until(lambda: some.of("events"))
        found = asked(some.api)
    leases = {"coordination.k8s.io/leases": ("create", "get", "update")}
    assert found == {**RIGHTS, **leases}
