"""The operator's chart: what it renders is what Kubernetes takes and what the command knows; its
rights are those that are listed here, and no more; an uninstallation takes nothing of the users'.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdproxy.cli.commands import parser_for
from pdproxy_operator import definitions
from pdproxy_operator.kinds import WRITTEN
from tests.chart.pod_security import against_restricted
from tests.chart.render import (
    CHART,
    OPERATOR,
    VERSIONS,
    Objects,
    RefusedError,
    helm,
    mistakes,
    of_kind,
    pod_of,
    rendered,
    text_of,
)

SETS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "two namespaces": {"watchNamespaces": ["a", "b", "a"]},
    "three of them": {"replicas": 3, "log": {"level": "debug", "format": "json"}},
    "a secret and monitoring": {
        "metricsSecret": {"existingSecret": "metrics", "key": "secret"},
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "image": {"digest": f"sha256:{'5' * 64}"},
    },
    "definitions and rights of somebody else": {
        "definitions": {"install": False},
        "rbac": {"create": False, "aggregate": False},
        "serviceAccount": {"create": False, "name": "operators"},
    },
    "much of its own": {
        "imagePullSecrets": [{"name": "registry"}],
        "priorityClassName": "high",
        "podLabels": {"team": "llm"},
        "podAnnotations": {"a": "b"},
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "serviceAccount": {"annotations": {"a": "b"}},
    },
}
DEFINITION = "CustomResourceDefinition"
ALL = ("create", "delete", "get", "list", "patch", "watch")
RIGHTS = {
    "pdproxy.dev/pdruntimes": ("list", "watch"),
    "pdproxy.dev/pdproxies": ("list", "watch"),
    "pdproxy.dev/pdruntimes/scale": ("patch",),
    "pdproxy.dev/pdruntimes/status": ("patch",),
    "pdproxy.dev/pdproxies/status": ("patch",),
    "/pods": ("list", "patch", "watch"),
    "/configmaps": ALL,
    "/services": ALL,
    "/serviceaccounts": ALL,
    "apps/deployments": ALL,
    "apps/deployments/scale": ("patch",),
    "gateway.networking.k8s.io/httproutes": ALL,
    "leaderworkerset.x-k8s.io/leaderworkersets": ALL,
    "leaderworkerset.x-k8s.io/leaderworkersets/scale": ("patch",),
    "monitoring.coreos.com/podmonitors": ALL,
    "networking.k8s.io/networkpolicies": ALL,
    "policy/poddisruptionbudgets": ALL,
    "rbac.authorization.k8s.io/rolebindings": ALL,
    "rbac.authorization.k8s.io/roles": ALL,
    "events.k8s.io/events": ("create",),
}


def objects_of(name: str) -> Objects:
    return rendered(SETS[name], release="operator", chart=OPERATOR)


def rights(role: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """The verbs of a role, by group and resource."""
    return {
        f"{group}/{resource}": tuple(sorted(rule["verbs"]))
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


@pytest.mark.parametrize("name", SETS)
def test_kubernetes_takes_the_objects(name: str) -> None:
    for one in objects_of(name):
        for version in VERSIONS:
            assert mistakes(one, version) == [], (version, one["kind"], one["metadata"]["name"])


@pytest.mark.parametrize("name", SETS)
def test_the_operator_may_run_where_the_strictest_standard_holds(name: str) -> None:
    pod = pod_of(objects_of(name), "operator-pdproxy-operator")["spec"]
    assert against_restricted(pod) == []
    (container,) = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("name", ["nothing", "a secret and monitoring", "three of them"])
def test_helm_has_nothing_to_say_and_an_upgrade_changes_nothing(name: str, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(SETS[name]))
    assert "0 chart(s) failed" in helm("lint", "--strict", str(OPERATOR), "-f", str(file))
    once, again = (text_of(SETS[name], *words, chart=OPERATOR) for words in ((), ("--is-upgrade",)))
    assert once == again


def test_the_definitions_are_the_packages_and_outlive_the_release() -> None:
    """All PDRuntimes and PDProxies of a cluster go with their definitions."""
    found = {one["metadata"]["name"]: one for one in of_kind(objects_of("nothing"), DEFINITION)}
    for name in definitions.NAMES:
        wanted = yaml.safe_load(definitions.text_of(name))
        one = found.pop(wanted["metadata"]["name"])
        assert one["spec"] == wanted["spec"]
        assert one["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert not found
    assert not of_kind(objects_of("definitions and rights of somebody else"), DEFINITION)


def test_the_rights_are_these() -> None:
    objects = objects_of("nothing")
    (account,) = of_kind(objects, "ServiceAccount")
    (role,) = of_kind(objects, "ClusterRole", "llm-operator-pdproxy-operator")
    (binding,) = of_kind(objects, "ClusterRoleBinding")
    assert rights(role) == RIGHTS
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    name = account["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name, "namespace": "llm"}]
    assert pod_of(objects, name)["spec"]["serviceAccountName"] == name
    assert not of_kind(objects, "Role")


def test_there_are_no_rights_where_it_does_not_work() -> None:
    objects = objects_of("two namespaces")
    roles, bindings = of_kind(objects, "Role"), of_kind(objects, "RoleBinding")
    for ones in (roles, bindings):
        assert [one["metadata"]["namespace"] for one in ones] == ["a", "b"]
    for role, binding in zip(roles, bindings, strict=True):
        assert rights(role) == RIGHTS
        assert binding["roleRef"]["kind"] == "Role"
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert binding["subjects"][0]["namespace"] == "llm"
    assert not of_kind(objects, "ClusterRoleBinding")
    assert {"--namespace=a", "--namespace=b"} <= set(words_of(objects))


def test_several_operators_agree_who_acts() -> None:
    objects = objects_of("three of them")
    (role,) = of_kind(objects, "Role")
    assert rights(role) == {"coordination.k8s.io/leases": ("create", "get", "update")}
    assert "--leader-elect" in words_of(objects)
    assert "--leader-elect" not in words_of(objects_of("nothing"))
    for name in ("nothing", "three of them"):  # a new one may act before the old one ends, else
        (deployment,) = of_kind(objects_of(name), "Deployment")
        assert deployment["spec"]["strategy"] == {"type": "Recreate"}


@pytest.mark.parametrize("name", SETS)
def test_who_has_a_role_of_a_namespace_has_it_for_our_kinds(name: str) -> None:
    by_label = {
        label.rpartition("-")[2]: set(rights(one).values())
        for one in of_kind(objects_of(name), "ClusterRole")
        for label in one["metadata"]["labels"]
        if label.startswith("rbac.authorization.k8s.io/aggregate-to-")
    }
    if name == "definitions and rights of somebody else":
        assert by_label == {}
    else:
        whole = ("create", "delete", "deletecollection", "patch", "update")
        assert by_label == {
            "view": {("get", "list", "watch")},
            "edit": {whole, ("patch", "update")},
        }


def test_no_role_has_secrets_or_everything() -> None:
    for name in SETS:
        for kind in ("Role", "ClusterRole"):
            for role in of_kind(objects_of(name), kind):
                assert "*" not in json.dumps(role["rules"])
                assert not any("secrets" in of for of in rights(role))


def test_the_secret_is_a_file_and_the_metrics_are_read() -> None:
    objects = objects_of("a secret and monitoring")
    pod = pod_of(objects, "operator-pdproxy-operator")
    (container,) = pod["spec"]["containers"]
    (volume,) = pod["spec"]["volumes"]
    assert volume["secret"]["secretName"] == "metrics"
    folder = container["volumeMounts"][0]["mountPath"]
    assert f"--secret-file={folder}/secret" in container["args"]
    (monitor,) = of_kind(objects, "PodMonitor")
    selected = monitor["spec"]["selector"]["matchLabels"].items()
    assert selected <= pod["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in [port["name"] for port in container["ports"]]


@pytest.mark.parametrize("name", SETS)
def test_the_command_knows_its_options(name: str) -> None:
    words = words_of(objects_of(name))
    given = parser_for(words).parse_args(words)
    values = SETS[name]
    assert given.namespace == sorted(set(values.get("watchNamespaces", [])))
    assert given.leader_elect == (values.get("replicas", 1) > 1)
    assert given.listen.endswith(":8080")
    assert (given.secret_file is None) == ("metricsSecret" not in values)
    assert given.log_level == values.get("log", {}).get("level", "info")


def test_each_kind_that_the_operator_writes_is_among_the_rights() -> None:
    wanted = {f"{kind.group}/{kind.plural}" for kind in WRITTEN}
    assert wanted == {name for name, verbs in RIGHTS.items() if verbs == ALL}


def words_of(objects: Objects) -> list[str]:
    (container,) = pod_of(objects, "operator-pdproxy-operator")["spec"]["containers"]
    words: list[str] = container["args"]
    return words


def test_each_value_is_used_and_checked() -> None:
    values = yaml.safe_load((OPERATOR / "values.yaml").read_text())
    checked = json.loads((OPERATOR / "values.schema.json").read_text())["properties"]
    assert values.keys() == checked.keys() - {"global"}
    templates = "\n".join(path.read_text() for path in (OPERATOR / "templates").iterdir())
    for name, value in values.items():
        assert re.search(rf"\.Values\.{name}\b", templates), name
        if "properties" in checked[name]:
            assert value.keys() == checked[name]["properties"].keys(), name
            for inner in value:
                assert re.search(rf"\.{inner}\b", templates), f"{name}.{inner}"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"replica": 2}, "replica"),
        ({"watchNamespace": ["a"]}, "watchNamespace"),
        ({"watchNamespaces": "a"}, "/watchNamespaces"),
        ({"watchNamespaces": ["A"]}, "/watchNamespaces/0"),
        ({"watchNamespaces": ["*"]}, "/watchNamespaces/0"),
        ({"log": {"level": "trace"}}, "/log/level"),
        ({"image": {"digest": "sha256:abc"}}, "/image/digest"),
        ({"rbac": {"agregate": False}}, "agregate"),
        ({"definitions": {"install": "no"}}, "/definitions/install"),
        ({"metricsSecret": {"key": "a/../b"}}, "/metricsSecret/key"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_typo_is_refused_by_its_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(RefusedError) as error:
        text_of(values, chart=OPERATOR)
    (line, *_) = (line for line in str(error.value).splitlines() if line.startswith("- at "))
    assert said in line


def notes_of(values: dict[str, Any], tmp_path: Path) -> str:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    words = ["--dry-run=client", "--namespace", "llm", "-f", str(file)]
    return helm("install", "operator", str(OPERATOR), *words).partition("\nNOTES:\n")[2]


def test_the_notes_have_resources_that_can_be_used_and_a_warning(tmp_path: Path) -> None:
    notes = notes_of({"watchNamespaces": ["a"], "image": {"tag": "1.0"}}, tmp_path)
    command, _, rest = notes.partition("<<EOF\n")
    assert command.splitlines()[-1] == "kubectl -n a apply -f - "
    text = rest.partition("\nEOF\n")[0]  # a shell knows its end by that alone
    prefill, decode, proxy = yaml.safe_load_all(text)
    assert [one["spec"]["role"] for one in (prefill, decode)] == ["prefill", "decode"]
    for one in (prefill, decode):
        selected = proxy["spec"]["runtimeSelector"]["matchLabels"].items()
        assert selected <= one["metadata"]["labels"].items()
    assert proxy["spec"]["image"] == "pdproxy:1.0"
    engines = yaml.safe_load((CHART / "values.yaml").read_text())["engineDefaults"]["image"]
    assert prefill["spec"]["image"] == f"{engines['repository']}:{engines['tag']}"
    crds = " ".join(f"{name}.pdproxy.dev" for name in definitions.NAMES)
    assert f"kubectl delete crd {crds}" in notes
    assert "The definitions stay" in notes


def test_the_chart_is_of_the_version_of_the_other_one() -> None:
    ours, other = (
        yaml.safe_load((chart / "Chart.yaml").read_text()) for chart in (OPERATOR, CHART)
    )
    for key in ("version", "appVersion", "kubeVersion"):
        assert ours[key] == other[key]
