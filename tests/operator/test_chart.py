"""The operator makes the same objects as the Helm chart: what differs is named here, with the
reason.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from pdproxy_operator.engine_objects import engine_objects
from pdproxy_operator.pools import pools_of, selected_pools
from pdproxy_operator.proxy_objects import proxy_objects
from pdproxy_operator.resources import Proxy, Runtime
from tests.chart.render import CHART, Objects, of_kind, rendered
from tests.chart.sets import SETS
from tests.operator.resources import proxy, runtime
from tests.release import version

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
NOT_HERE = {
    "pods that are there, of two namespaces": "the operator gives rights in its namespace alone",
    "pods of all namespaces": "the operator gives rights in its namespace alone",
    "an InferencePool": "the operator gives rights for pods alone",
    "an InferencePool of another namespace, with a preset": "as the two before",
    "monitoring of TLS": "a PDProxy with `monitor` has the engines' metrics, too",
    "few who may": "policies of others add to those of the operator: it needs no fields for them",
    "nothing but proxies, with much of their own": "names of accounts and long drains are its own",
}
"""Sets of values that no PDProxy has, each with the reason."""
SAME = [name for name in SETS if name not in NOT_HERE]
RELEASE = (
    *("pdproxy.dev/release", "pdproxy.dev/runtime", "pdproxy.dev/proxy"),
    *("app.kubernetes.io/instance", "app.kubernetes.io/component"),
    *("app.kubernetes.io/managed-by", "pdproxy.dev/revision"),
)
"""Labels that say what something is a part of. A revision is a hash, of other texts here."""


def resources_of(values: Mapping[str, Any]) -> tuple[Proxy, list[Runtime]]:
    """The resources that say what these values of the chart say."""
    values = merged(VALUES, values)
    runtimes = [_runtime(merged(values["engineDefaults"], one)) for one in values["engines"]]
    config = values["config"]
    template: dict[str, Any] = {"spec": {"containers": [{"name": "pdproxy"}]}}
    (container,) = template["spec"]["containers"]
    if secret := values["tls"]["existingSecret"]:
        files = {"certificate": "/etc/pdproxy-tls/tls.crt", "key": "/etc/pdproxy-tls/tls.key"}
        config.setdefault("listen", {})["tls"] = files
        container["volumeMounts"] = [
            {"name": "tls", "mountPath": "/etc/pdproxy-tls", "readOnly": True}
        ]
        volume = {"name": "tls", "secret": {"secretName": secret, "defaultMode": 0o440}}
        template["spec"]["volumes"] = [volume]
    if constraints := values["topologySpreadConstraints"]:
        template["spec"]["topologySpreadConstraints"] = constraints
    more: dict[str, Any] = {
        "config": config,
        "template": template,
        "image": _image(values["image"], version.current()),
    }
    for name in ("clientKeys", "adminKeys", "engineKey"):
        if values[name]["existingSecret"]:
            more[name] = {"name": values[name]["existingSecret"], "key": values[name]["key"]}
    more["resources"] = values["resources"]
    if values["route"]["enabled"]:
        more["route"] = {key: values["route"][key] for key in ("parentRefs", "hostnames")}
    if values["podMonitor"]["enabled"]:
        more["monitor"] = {"labels": values["podMonitor"]["labels"]}
        secret = values["podMonitor"]["authorization"]
        if secret["existingSecret"]:
            key = {"name": secret["existingSecret"], "key": secret["key"]}
            more["monitor"]["authorization"] = key
    return proxy("pdproxy", **more), runtimes


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values over others, as Helm merges them."""
    found = dict(copy.deepcopy(base))
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = merged(found[key], value) if both else value
    return found


def _image(image: Mapping[str, str], tag: str) -> str:
    if image["digest"]:
        return f"{image['repository']}@{image['digest']}"
    return f"{image['repository']}:{image['tag'] or tag}"


def _runtime(engine: dict[str, Any]) -> Runtime:
    drain = 310 if engine["drainSeconds"] is None else engine["drainSeconds"]
    spec = {
        key: engine[key]
        for key in (
            *("connector", "kvTransferConfig", "args", "argsWithoutKv", "simulated"),
            *("tensorParallelSize", "dataParallelSize", "gpuResource", "sideChannelPort"),
            *("startSeconds", "resources"),
        )
    }
    pod = {
        key: engine[key]
        for key in (
            *("runtimeClassName", "priorityClassName", "nodeSelector", "tolerations", "affinity"),
            *("topologySpreadConstraints", "volumes"),
        )
        if engine[key]
    }
    container = {
        key: engine[key]
        for key in ("envFrom", "livenessProbe", "volumeMounts", "securityContext")
        if engine[key]
    }
    env = engine["env"]
    if secret := engine["hfToken"]["existingSecret"]:
        key = {"name": secret, "key": engine["hfToken"]["key"]}
        env = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}}, *env]
    metadata = {"labels": engine["podLabels"], "annotations": engine["podAnnotations"]}
    own = f"pdproxy:{version.current()}"
    model = {"name": "sim" if engine["simulated"] else engine["model"]}
    if engine["servedModelName"]:
        model["served"] = engine["servedModelName"]
    return runtime(
        engine["name"],
        engine["role"],
        **spec,
        model=model,
        env=env,
        image=own if engine["simulated"] else _image(engine["image"], "latest"),
        replicas=1 if engine["replicas"] is None else engine["replicas"],
        drain={"seconds": drain},
        terminationGracePeriodSeconds=drain + 60,
        labels=engine["node"].get("labels", {}),
        servesWhole=engine["node"].get("serves_whole", False),
        template={
            "metadata": {key: value for key, value in metadata.items() if value},
            "spec": {**pod, "containers": [{"name": "engine", **container}]},
        },
    )


def made(front: Proxy, runtimes: list[Runtime]) -> Objects:
    """All objects that the operator makes."""
    objects = proxy_objects(front, selected_pools(front, runtimes), None)
    for _, pool in pools_of([front], runtimes):
        for one in pool.runtimes:
            objects += engine_objects(one, pool, [front], {pool.revision: one.spec.replicas})
    return objects


def both(name: str) -> tuple[Objects, Objects]:
    """The objects of the chart, and those of the operator."""
    chart, operator = rendered(SETS[name]), made(*resources_of(SETS[name]))
    if not SETS[name].get("engines"):
        # Runtimes may come at any time; the engines of a release are known.
        operator = [one for one in operator if one["metadata"]["name"] != "pdproxy-all"]
    return chart, operator


def pods_of(objects: Objects) -> dict[str, Any]:
    """The templates of pods by their component: the name of the engines, or `proxy`."""
    found = {}
    for one in of_kind(objects, "Deployment"):
        labels = one["spec"]["template"]["metadata"]["labels"]
        found[labels.get("pdproxy.dev/runtime") or labels.get("app.kubernetes.io/component")] = one
    if None in found:
        found["proxy"] = found.pop(None)
    return found


def plain_pod(deployment: dict[str, Any]) -> dict[str, Any]:
    """A template of pods without what names the release, and in one order."""
    pod = copy.deepcopy(deployment["spec"]["template"])
    labels = pod["metadata"]["labels"]
    for name in RELEASE:
        labels.pop(name, None)
    annotations = pod["metadata"].get("annotations", {})
    annotations.pop("checksum/config", None)
    pod["metadata"] = {"labels": labels, "annotations": annotations}
    (container,) = pod["spec"]["containers"]
    container["args"] = [_plain_word(word) for word in container["args"]]
    container["volumeMounts"].sort(key=lambda one: str(one["mountPath"]))
    for one in pod["spec"]["volumes"]:
        one.get("configMap", {}).pop("name", None)
    pod["spec"]["volumes"].sort(key=lambda one: str(one["name"]))
    for one in pod["spec"].get("topologySpreadConstraints", ()):
        if one["topologyKey"] == "kubernetes.io/hostname":
            del one["labelSelector"]
    return pod


def _plain_word(word: str) -> Any:
    name, _, value = word.partition("=")
    return (name, json.loads(value)) if name == "--kv-transfer-config" else word


def differences(chart: Any, operator: Any, path: str = "") -> Iterator[str]:
    """Yield the paths at which two values differ."""
    if isinstance(chart, dict) and isinstance(operator, dict):
        for key in sorted(chart.keys() | operator.keys()):
            yield from differences(chart.get(key), operator.get(key), f"{path}.{key}")
    elif chart != operator:
        yield f"{path}: {chart!r} is {operator!r}"


@pytest.mark.parametrize("name", SAME)
def test_pods_are_those_of_the_chart(name: str) -> None:
    chart, operator = (pods_of(objects) for objects in both(name))
    assert chart.keys() == operator.keys()
    for owner, theirs in chart.items():
        wanted, found = plain_pod(theirs), plain_pod(operator[owner])
        if "simulated" in name and owner != "proxy":
            # The model of a PDRuntime has a name, and clients ask for that one.
            found["spec"]["containers"][0]["args"].remove("--model=sim")
        assert [*differences(wanted, found, owner)] == []
        spec, own = theirs["spec"], operator[owner]["spec"]
        for key in ("minReadySeconds", "progressDeadlineSeconds"):
            assert spec.get(key) == own.get(key)
        assert spec["strategy"]["rollingUpdate"] == own["strategy"]["rollingUpdate"]


@pytest.mark.parametrize("name", SAME)
def test_settings_are_those_of_the_chart(name: str) -> None:
    chart, operator = (
        yaml.safe_load(of_kind(objects, "ConfigMap", "pdproxy")[0]["data"]["pdproxy.yaml"])
        for objects in both(name)
    )
    old = "app.kubernetes.io/instance=pdproxy,app.kubernetes.io/component="
    for pool in chart["pools"]:
        for node in pool["nodes"]:
            node["url"] = node["url"].replace(old, "pdproxy.dev/runtime=")
        # Runtimes of a pool have the order of their names.
        count = len([one for one in pool["nodes"] if "pdproxy.dev/runtime=" in one["url"]])
        pool["nodes"][:count] = sorted(pool["nodes"][:count], key=lambda one: str(one["url"]))
    for content in (chart, operator):
        content["pools"].sort(key=lambda one: str(one.get("name")))
    assert [*differences(chart, operator)] == []


@pytest.mark.parametrize("name", SAME)
def test_the_hook_is_that_of_the_chart(name: str) -> None:
    chart, operator = both(name)
    found = {
        one["metadata"]["name"]: one["data"]
        for one in of_kind(operator, "ConfigMap")
        if "prestop.sh" in one["data"]
    }
    engines = [one["name"] for one in SETS[name].get("engines", ())]
    assert found.keys() == {f"{engine}-prestop" for engine in engines}
    for data in found.values():
        assert data == of_kind(chart, "ConfigMap", "pdproxy-prestop")[0]["data"]


KINDS = ("Service", "Role", "RoleBinding", "ServiceAccount", "HTTPRoute", "PodMonitor")


@pytest.mark.parametrize("name", SAME)
def test_rights_services_routes_and_monitors_are_those_of_the_chart(name: str) -> None:
    chart, operator = (
        {
            (one["kind"], one["metadata"]["name"]): _plain(one)
            for one in objects
            if one["kind"] in KINDS
        }
        for objects in both(name)
    )
    assert [*differences(chart, operator)] == []


def _plain(one: dict[str, Any]) -> dict[str, Any]:
    """An object without what names the release, and without what is the same if it is not said."""
    one = copy.deepcopy(one)
    for name in ("metadata", "apiVersion"):
        del one[name]
    spec = one.get("spec", {})
    spec.pop("selector", None)  # judged by the pods that they select
    for port in spec.get("ports", ()):
        assert port.pop("protocol", "TCP") == "TCP"
    return one


# -- what selects pods


def fits(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a selector of labels selects a pod."""
    expressions = selector.get("matchExpressions", ())
    assert all(one["operator"] == "In" for one in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(one["key"]) in one["values"] for one in expressions
    )


def ways(objects: Objects) -> set[tuple[str, str]]:
    """Who may connect to whom, by the policies, of the components of a release."""
    labels = {
        owner: one["spec"]["template"]["metadata"]["labels"]
        for owner, one in pods_of(objects).items()
    }
    policies = of_kind(objects, "NetworkPolicy")
    found = set()
    for to, own in labels.items():
        mine = [one["spec"] for one in policies if fits(one["spec"]["podSelector"], own)]
        assert mine, f"{to} may be reached by all"
        for rule in (rule for spec in mine for rule in spec["ingress"]):
            for who, theirs in labels.items():
                peers = rule.get("from", [{"podSelector": {}}])
                if any(fits(peer["podSelector"], theirs) for peer in peers):
                    found.add((who, to))
    return found


@pytest.mark.parametrize("name", SAME)
def test_the_same_pods_reach_each_other(name: str) -> None:
    chart, operator = both(name)
    if of_kind(chart, "NetworkPolicy"):
        assert ways(operator) == ways(chart)
        theirs, own = (
            of_kind(objects, "NetworkPolicy", "pdproxy")[0]["spec"] for objects in (chart, operator)
        )
        assert theirs.get("egress") == own.get("egress")
        assert theirs["policyTypes"] == own["policyTypes"]
        assert theirs["ingress"][0]["ports"] == own["ingress"][0]["ports"]


WORKLOADS = ("Deployment", "PodDisruptionBudget", "PodMonitor", "Service")


def selected(objects: Objects, kind: str) -> list[tuple[str, list[str]]]:
    """Which pods the objects of a kind select, with what they say of them."""
    labels = {
        owner: one["spec"]["template"]["metadata"]["labels"]
        for owner, one in pods_of(objects).items()
    }
    found = []
    for one in of_kind(objects, kind):
        selector = one["spec"]["selector"]
        if kind == "Service":
            selector = {"matchLabels": selector}
        said = str(one["spec"].get("maxUnavailable", one["metadata"]["name"]))
        owners = [owner for owner, own in labels.items() if fits(selector, own)]
        found.append(("" if kind == "Deployment" else said, sorted(owners)))
    return sorted(found)


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("kind", WORKLOADS)
def test_objects_select_the_same_pods(kind: str, name: str) -> None:
    values = json.dumps(SETS[name])
    if kind == "PodDisruptionBudget" and "podDisruptionBudget" in values:
        return  # one engine or proxy may be missing: a resource has no field for another number
    chart, operator = (selected(objects, kind) for objects in both(name))
    assert operator == chart
    assert all(owners for _, owners in operator)


def test_the_sets_of_values_that_no_resource_has_are_named_with_the_reason() -> None:
    assert NOT_HERE.keys() <= SETS.keys()
    assert len(SAME) >= 10
