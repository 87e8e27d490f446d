"""The proxies' part of the chart: rights, probes, time to stop, networks, monitoring."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from pdproxy.app.drain import longest_drain
from pdproxy.serving.access.routes import TABLE
from tests.chart.pod_security import against_restricted
from tests.chart.render import ROOT, Objects, of_kind, pod_of, rendered, settings_of
from tests.chart.sets import ENGINES, IMAGE, SETS
from tests.release import version

PODS_ALONE = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
POOLS_TOO = [
    *PODS_ALONE,
    {
        "apiGroups": ["inference.networking.k8s.io"],
        "resources": ["inferencepools"],
        "verbs": ["list", "watch"],
    },
]


def pods_of(objects: Objects) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the labels' owner and each template of pods, and the test's pod."""
    for one in objects:
        if one["kind"] == "Deployment":
            yield one["metadata"]["name"], one["spec"]["template"]
        elif one["kind"] == "Pod":
            yield one["metadata"]["name"], one


def fits(selector: dict[str, Any], template: dict[str, Any]) -> bool:
    labels = template["metadata"]["labels"]
    return selector.get("matchLabels", selector).items() <= labels.items()


# -- rights


@pytest.mark.parametrize("name", SETS)
def test_proxy_and_test_may_run_where_the_strictest_standard_holds(name: str) -> None:
    ours = [
        template["spec"]
        for _, template in pods_of(rendered(SETS[name]))
        if template["metadata"]["labels"]["app.kubernetes.io/component"] in ("proxy", "test")
    ]
    assert ours
    for spec in ours:
        assert against_restricted(spec) == []
        assert all(one["securityContext"]["readOnlyRootFilesystem"] for one in spec["containers"])
        assert all("memory" in one["resources"]["limits"] for one in spec["containers"])


@pytest.mark.parametrize(
    ("context", "found"),
    [
        ({"runAsUser": 0}, "runAsNonRoot"),
        ({"capabilities": {"drop": []}}, "capabilities.drop"),
        ({"allowPrivilegeEscalation": True}, "allowPrivilegeEscalation"),
    ],
)
def test_what_the_standard_forbids_is_found(context: dict[str, Any], found: str) -> None:
    pod = pod_of(rendered({**ENGINES, "securityContext": context}))
    assert against_restricted(pod["spec"]) == [found]


@pytest.mark.parametrize(
    ("name", "kind", "rights"),
    [
        ("2p2d", "Role", {None: PODS_ALONE}),
        ("pods that are there, of two namespaces", "Role", {"a": PODS_ALONE, "b": PODS_ALONE}),
        ("pods of the release's own namespace, over TLS", "Role", {None: PODS_ALONE}),
        ("pods of all namespaces", "ClusterRole", {None: PODS_ALONE}),
        ("an InferencePool", "Role", {None: POOLS_TOO}),
        ("an InferencePool of another namespace, with a preset", "Role", {"llm-d": POOLS_TOO}),
        ("engines at addresses", "Role", {}),
        ("names in DNS", "Role", {}),
    ],
)
def test_the_proxy_may_list_and_watch_pods_where_the_settings_name_them(
    name: str, kind: str, rights: dict[str | None, Any]
) -> None:
    objects = rendered(SETS[name])
    roles = {one["metadata"].get("namespace"): one for one in of_kind(objects, kind)}
    assert {place: one["rules"] for place, one in roles.items()} == rights
    bindings = of_kind(objects, f"{kind}Binding")
    assert {one["metadata"].get("namespace") for one in bindings} == {*rights}
    account = pod_of(objects)["spec"]["serviceAccountName"]
    for one in bindings:
        role = roles[one["metadata"].get("namespace")]
        assert (one["roleRef"]["kind"], one["roleRef"]["name"]) == (kind, role["metadata"]["name"])
        assert one["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "llm"}]
    for owner, template in pods_of(objects):
        has_token = template["spec"]["automountServiceAccountToken"]
        assert has_token == (owner == "pdproxy" and bool(rights)), owner


# -- health, and the end


@pytest.mark.parametrize("name", ["2p2d", "TLS"])
def test_engines_that_load_or_fail_restart_no_proxy_and_take_none_out(name: str) -> None:
    (container,) = pod_of(rendered(SETS[name]))["spec"]["containers"]
    paths = {
        probe: container[f"{probe}Probe"]["httpGet"]["path"]
        for probe in ("startup", "liveness", "readiness")
    }
    assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready/proxy"}
    assert {*paths.values()} <= {route.path for route in TABLE}
    schemes = {container[f"{probe}Probe"]["httpGet"]["scheme"] for probe in paths}
    assert schemes == {"HTTPS" if name == "TLS" else "HTTP"}


@pytest.mark.parametrize("name", SETS)
def test_a_proxy_has_the_time_that_its_longest_drain_takes(name: str) -> None:
    objects = rendered(SETS[name])
    settings = settings_of(objects)
    longest = longest_drain(settings.deadlines, settings.listen.linger)
    given = pod_of(objects)["spec"]["terminationGracePeriodSeconds"]
    own = SETS[name].get("terminationGracePeriodSeconds")
    assert given == (longest + 20 if own is None else own)
    assert given > longest


def test_a_linger_is_longer_than_it_takes_until_a_proxy_is_seen_to_stop() -> None:
    objects = rendered(ENGINES)
    probe = pod_of(objects)["spec"]["containers"][0]["readinessProbe"]
    seen = probe["periodSeconds"] * probe["failureThreshold"]
    assert seen < settings_of(objects).listen.linger


# -- settings


def test_other_engines_replace_no_proxy_and_other_settings_do() -> None:
    def checksum(values: dict[str, Any]) -> str:
        return str(pod_of(rendered(values))["metadata"]["annotations"]["checksum/config"])

    more = {**ENGINES, "engines": [*ENGINES["engines"], {"name": "d2", "role": "decode"}]}
    assert checksum(more) == checksum(ENGINES)
    assert checksum({**ENGINES, "config": {"deadlines": {"drain": 90}}}) != checksum(ENGINES)
    assert checksum(SETS["two models"]) != checksum(ENGINES)


def test_settings_are_those_of_the_values_over_those_of_the_chart() -> None:
    settings = settings_of(rendered(SETS["keys of all kinds"]))
    assert settings.auth.api_keys_file == "/etc/pdproxy-keys/clients/keys"
    assert settings.auth.admin_keys_file == "/etc/pdproxy-keys/admin/list"
    assert settings.auth.engine_api_key_file == "/etc/pdproxy-keys/engines/key"
    assert (settings.replicas.count, settings.replicas.name) == ("auto", "pdproxy-replicas")
    settings = settings_of(rendered(SETS["nothing but proxies, with much of their own"]))
    assert (settings.replicas.count, settings.replicas.name) == (3, None)


@pytest.mark.parametrize("name", ["keys of all kinds", "TLS"])
def test_each_file_that_the_settings_name_is_mounted(name: str) -> None:
    objects = rendered(SETS[name])
    text = json.dumps(of_kind(objects, "ConfigMap", "pdproxy")[0])
    mounts = pod_of(objects)["spec"]["containers"][0]["volumeMounts"]
    folders = [one["mountPath"] for one in mounts]
    named = [word for word in text.replace("\\n", " ").split() if word.startswith("/")]
    assert len(named) > 1
    for file in named:
        assert any(file.startswith(f"{folder}/") for folder in folders), file
    secrets = [one["secret"] for one in pod_of(objects)["spec"]["volumes"] if "secret" in one]
    assert {one["defaultMode"] for one in secrets} == {0o440}
    assert len(secrets) == len([one for one in folders if one.startswith("/etc/pdproxy-")])


def test_values_have_no_secrets() -> None:
    """Only names of Secrets: what is in values is in the release, which many can read."""
    for name in SETS:
        assert of_kind(rendered(SETS[name]), "Secret") == []


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ({}, f"pdproxy:{version.current()}"),
        ({"repository": "r/p", "tag": "v9"}, "r/p:v9"),
        ({**IMAGE, "tag": "v9"}, f"{IMAGE['repository']}@{IMAGE['digest']}"),
    ],
)
def test_a_digest_wins_over_a_tag(image: dict[str, str], name: str) -> None:
    values = {**SETS["2p2d of simulated engines"], "image": image}
    images = [
        template["spec"]["containers"][0]["image"] for _, template in pods_of(rendered(values))
    ]
    assert images == [name] * 4  # two kinds of engines, the proxy, the test


def test_a_service_without_an_address_says_how_many_proxies_there_are() -> None:
    objects = rendered(ENGINES)
    name = settings_of(objects).replicas.name
    (service,) = of_kind(objects, "Service", name)
    assert service["spec"]["clusterIP"] == "None"
    assert "publishNotReadyAddresses" not in service["spec"]  # who leaves does not count


def test_an_engine_that_ends_asks_proxies_that_end_too() -> None:
    """They are not ready any more, and have requests."""
    objects = rendered(ENGINES)
    (files,) = of_kind(objects, "ConfigMap", "pdproxy-prestop")
    assert "http://pdproxy-all:8000" in files["data"]["variables"]
    (service,) = of_kind(objects, "Service", "pdproxy-all")
    assert service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["clusterIP"] == "None"


# -- what selects pods


@pytest.mark.parametrize("name", SETS)
def test_each_selector_selects_the_pods_that_it_means(name: str) -> None:
    objects = rendered(SETS[name])
    pods = dict(pods_of(objects))
    engines = {owner for owner in pods if not owner.endswith(("pdproxy", "-test"))}
    seen = 0
    for one in objects:
        kind, spec, own = one["kind"], one.get("spec", {}), one["metadata"]["name"]
        selector = spec.get("podSelector") or spec.get("selector")
        if not selector or kind == "Pod":
            continue
        found = {owner for owner, template in pods.items() if fits(selector, template)}
        if kind in ("Deployment", "PodDisruptionBudget"):
            assert found == {own}
        elif own.endswith("-engines"):
            assert found == engines
        elif "-kv-" in own:
            assert found <= engines
            assert found
        else:  # the Services, and what is for the proxies
            assert found == {"pdproxy"}, (kind, own)
        seen += 1
    assert seen > 2


@pytest.mark.parametrize(
    ("name", "budgets"),
    [
        ("2p2d", {owner: {"maxUnavailable": 1} for owner in ("", "-prefill", "-decode")}),
        ("engines on RDMA, with much of their own", {"": {"maxUnavailable": 1}}),
        (
            "many proxies",
            {
                "": {"minAvailable": "50%"},
                **{owner: {"maxUnavailable": 1} for owner in ("-prefill", "-decode")},
            },
        ),
        ("nothing but proxies, with much of their own", {}),
    ],
)
def test_a_budget_has_one_bound_or_is_not_there(name: str, budgets: dict[str, Any]) -> None:
    """Helm adds what values say to the defaults; Kubernetes refuses a budget with both bounds."""
    found = of_kind(rendered(SETS[name]), "PodDisruptionBudget")
    bounds = {
        one["metadata"]["name"].removeprefix("pdproxy"): {
            key: value for key, value in one["spec"].items() if key != "selector"
        }
        for one in found
    }
    assert bounds == budgets


def test_a_long_name_of_a_release_fits_into_the_names_of_its_services() -> None:
    objects = rendered({**ENGINES, "route": {}}, release="r" * 53)
    names = [one["metadata"]["name"] for one in of_kind(objects, "Service")]
    assert len(names) == 3
    assert max(map(len, names)) <= 63
    (replicas,) = (name for name in names if name.endswith("-replicas"))
    config = of_kind(objects, "ConfigMap", replicas.removesuffix("-replicas"))[0]
    assert f"name: {replicas}\n" in config["data"]["pdproxy.yaml"]


# -- networks


def test_kv_comes_only_from_engines_of_the_same_model() -> None:
    objects = rendered(SETS["two models"])
    policies = [
        one for one in of_kind(objects, "NetworkPolicy") if "-kv-" in one["metadata"]["name"]
    ]
    pods = dict(pods_of(objects))
    groups = []
    for one in policies:
        (rule,) = one["spec"]["ingress"]
        (peer,) = rule["from"]
        assert peer["podSelector"] == one["spec"]["podSelector"]
        groups.append({owner for owner, pod in pods.items() if fits(peer["podSelector"], pod)})
    assert sorted(map(sorted, groups)) == [
        ["pdproxy-big-d", "pdproxy-big-p"],
        ["pdproxy-decode", "pdproxy-prefill"],
    ]


def test_only_who_is_named_reaches_the_proxies_and_the_engines() -> None:
    objects = rendered(SETS["few who may"])
    values = SETS["few who may"]["networkPolicy"]
    (proxy,) = of_kind(objects, "NetworkPolicy", "pdproxy")
    (rule,) = proxy["spec"]["ingress"]
    assert rule["from"][:2] == [*values["clients"], *values["monitoring"]]
    pods = dict(pods_of(objects))
    inside = [peer["podSelector"] for peer in rule["from"][2:]]
    reach = {owner for owner, pod in pods.items() if any(fits(one, pod) for one in inside)}
    assert reach == {"pdproxy-prefill", "pdproxy-decode", "pdproxy-test"}
    egress = proxy["spec"]["egress"]
    assert [rule["to"] for rule in egress if "to" in rule] == [
        values["apiServer"],
        [{"podSelector": {}}],
        values["egress"][0]["to"],
    ]
    (engines,) = of_kind(objects, "NetworkPolicy", "pdproxy-engines")
    from_proxy, from_monitoring = engines["spec"]["ingress"]
    assert fits(from_proxy["from"][0]["podSelector"], pods["pdproxy"])
    assert from_monitoring["from"] == values["monitoring"]


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("2p2d", ["Ingress", "Egress"]),
        ("pods of all namespaces", ["Ingress", "Egress"]),
        ("engines at addresses", ["Ingress"]),
        ("names in DNS", ["Ingress"]),
        ("settings of a pool, beside those of its engines", ["Ingress"]),
    ],
)
def test_what_proxies_reach_is_bounded_where_all_engines_are_pods(
    name: str, types: list[str]
) -> None:
    (policy,) = of_kind(rendered(SETS[name]), "NetworkPolicy", "pdproxy")
    assert policy["spec"]["policyTypes"] == types
    assert ("egress" in policy["spec"]) == ("Egress" in types)


def test_a_gateway_cuts_no_stream_and_asks_once() -> None:
    (route,) = of_kind(rendered(SETS["behind a gateway"]), "HTTPRoute")
    (rule,) = route["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    assert rule["backendRefs"] == [{"name": "pdproxy", "port": 80}]
    assert {"retry", "sessionPersistence"}.isdisjoint(rule)


# -- monitoring


def test_rules_and_dashboards_are_those_of_the_repository() -> None:
    objects = rendered(SETS["monitoring"])
    (rule,) = of_kind(objects, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((ROOT / "configs/prometheus/rules.yml").read_text())
    shown = dict[str, str]()
    for one in of_kind(objects, "ConfigMap"):
        if one["metadata"]["labels"].get("grafana_dashboard") == "1":
            shown |= one["data"]
    boards = [*(ROOT / "configs/dashboards").glob("*.json")]
    assert len(boards) > 4
    assert {name: json.loads(text) for name, text in shown.items()} == {
        f"pdproxy-{board.name}": json.loads(board.read_text()) for board in boards
    }


def test_prometheus_finds_all_pages_under_the_names_that_rules_look_for() -> None:
    objects = rendered(SETS["monitoring"])
    pods = dict(pods_of(objects))
    jobs = {}
    for one in of_kind(objects, "PodMonitor"):
        (endpoint,) = one["spec"]["podMetricsEndpoints"]
        (job,) = (it["replacement"] for it in endpoint["relabelings"] if it["targetLabel"] == "job")
        for owner, template in pods.items():
            if fits(one["spec"]["selector"], template):
                (container,) = template["spec"]["containers"]
                assert endpoint["port"] in {port["name"] for port in container["ports"]}
                jobs[owner] = job
    assert jobs == {"pdproxy": "pdproxy", "pdproxy-prefill": "vllm", "pdproxy-decode": "vllm"}
    (proxies,) = of_kind(objects, "PodMonitor", "pdproxy")
    (endpoint,) = proxies["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"] == {"credentials": {"name": "metrics", "key": "key"}}
