"""The engines that the chart starts: what each is told, what a revision is, how pods end."""

from __future__ import annotations

import copy
import json
import shlex
from typing import Any

import pytest
import yaml

from pdproxy.settings.kubernetes import Kubernetes, PodsUrl, kubernetes_url
from tests.chart.generate import HOOK
from tests.chart.pod_security import against_baseline
from tests.chart.render import CHART, ROOT, Objects, of_kind, pod_of, rendered, settings_of
from tests.chart.sets import ENGINES, QWEN, SETS
from tests.unit.test_configs import simulated

VLLM = frozenset((ROOT / "tests" / "reference" / "vllm_names.txt").read_text().split("\n"))
CONNECTORS = {
    "nixl": "NixlConnector",
    "nixl-push": "NixlPushConnector",
    "mooncake": "MooncakeConnector",
}


def engine_of(objects: Objects, name: str) -> dict[str, Any]:
    (container,) = pod_of(objects, f"pdproxy-{name}")["spec"]["containers"]
    return dict(container)


def option(container: dict[str, Any], name: str) -> str:
    (found,) = (word for word in container["args"] if word.startswith(f"{name}="))
    return str(found.partition("=")[2])


@pytest.mark.parametrize("connector", CONNECTORS)
def test_engines_move_kv_by_the_connector_that_the_proxy_takes(connector: str) -> None:
    values = {**ENGINES, "engineDefaults": {**QWEN, "connector": connector}}
    objects = rendered(values)
    for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        container = engine_of(objects, name)
        assert json.loads(option(container, "--kv-transfer-config")) == {
            "kv_connector": CONNECTORS[connector],
            "kv_role": role,
        }
        assert container["args"][0] == "Qwen/Qwen3-0.6B"
        assert option(container, "--port") == "8000"
        assert "--enable-prompt-tokens-details" in container["args"]
    (pool,) = settings_of(objects).pools
    assert pool.connector == connector


def test_a_plain_engine_moves_none_and_role_any_does_both() -> None:
    objects = rendered(SETS["role any, and a plain engine"])
    deployments = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "Deployment")}
    assert "replicas" not in deployments["pdproxy-any"]  # an autoscaler's are left as they are
    assert deployments["pdproxy-plain"]["replicas"] == 1
    any_, plain = (engine_of(objects, name) for name in ("any", "plain"))
    assert json.loads(option(any_, "--kv-transfer-config"))["kv_role"] == "kv_both"
    assert not any(word.startswith("--kv-transfer-config") for word in plain["args"])


@pytest.mark.parametrize("name", ["2p2d", "2p2d of simulated engines", "data parallelism"])
def test_other_engines_reach_the_side_channel_at_the_pods_own_address(name: str) -> None:
    """A variable is only known behind the one that it refers to."""
    objects = rendered(SETS[name])
    for role in ("prefill", "decode"):
        container = engine_of(objects, role)
        env = {one["name"]: one for one in container["env"]}
        assert env["POD_IP"]["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        if name == "2p2d of simulated engines":
            assert container["command"] == ["pdproxy", "sim"]
            assert option(container, "--side-channel-host") == "$(POD_IP)"
            first = option(container, "--side-channel-port")
        else:
            assert container["command"] == ["vllm", "serve"]
            names = [*env]
            assert names.index("POD_IP") < names.index("VLLM_NIXL_SIDE_CHANNEL_HOST")
            assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"]["value"] == "$(POD_IP)"
            first = env["VLLM_NIXL_SIDE_CHANNEL_PORT"]["value"]
        ranks = 4 if name == "data parallelism" else 1
        ports = [one["containerPort"] for one in container["ports"] if one["name"] != "http"]
        assert ports == [*range(int(first), int(first) + ranks)]


@pytest.mark.parametrize("name", [name for name in SETS if SETS[name].get("engines")])
def test_each_engine_knows_its_flags(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = rendered(SETS[name])
    for one in SETS[name]["engines"]:
        container = engine_of(objects, one["name"])
        words = [word.partition("=")[0] for word in container["args"] if word.startswith("-")]
        if container["command"] == ["vllm", "serve"]:
            variables = [it["name"] for it in container["env"] if it["name"].startswith("VLLM_")]
            assert {*words, *variables} <= VLLM
        else:
            service = {"command": shlex.join(["sim", *container["args"]])}
            facts, host, port = simulated(monkeypatch, service)
            assert (facts.role, host, port) == (one["role"], "0.0.0.0", 8000)


@pytest.mark.parametrize("connector", ["nixl-push", "mooncake", "shared"])
def test_simulated_engines_have_each_connector(
    connector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {**ENGINES, "engineDefaults": {"simulated": True, "connector": connector}}
    container = engine_of(rendered(values), "decode")
    service = {"command": shlex.join(["sim", *container["args"]])}
    assert simulated(monkeypatch, service)[0].connector == connector


def test_flags_that_change_no_kv_are_flags() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert {*values["engineDefaults"]["argsWithoutKv"]} <= VLLM


def test_gpus_are_as_many_as_the_flags_say() -> None:
    for name, role, gpus in (
        ("two models", "big-p", 4),
        ("two models", "decode", 1),
        ("data parallelism", "prefill", 4),
    ):
        container = engine_of(rendered(SETS[name]), role)
        assert container["resources"]["limits"]["nvidia.com/gpu"] == str(gpus)
    objects = rendered(SETS["engines on RDMA, with much of their own"])
    assert engine_of(objects, "decode")["resources"] == {
        "limits": {"nvidia.com/gpu": "1", "rdma/hca": "1"},
        "requests": {"memory": "64Gi"},
    }
    simulated = engine_of(rendered(SETS["2p2d of simulated engines"]), "decode")
    assert simulated["resources"] == {}


@pytest.mark.parametrize("name", [name for name in SETS if SETS[name].get("engines")])
def test_the_proxy_looks_for_just_these_pods(name: str) -> None:
    objects = rendered(SETS[name])
    settings = settings_of(objects)
    labels = Kubernetes().pod_labels
    found = {}
    for pool in settings.pools:
        for node in pool.source_nodes:
            url = kubernetes_url(node.url, ())
            assert isinstance(url, PodsUrl)
            parts = (one.partition("=") for one in url.selector.split(","))
            selector = {key: value for key, _, value in parts}
            for one in of_kind(objects, "Deployment"):
                own = one["spec"]["template"]["metadata"]["labels"]
                if selector.items() <= own.items():
                    assert one["metadata"]["name"] not in found
                    found[one["metadata"]["name"]] = (node.role, pool.name)
                    assert own[labels.role[0]] == node.role
                    assert own[labels.engine["revision"]]
                    (container,) = one["spec"]["template"]["spec"]["containers"]
                    assert url.port in {port["containerPort"] for port in container["ports"]}
    expected = {f"pdproxy-{one['name']}": one["role"] for one in SETS[name]["engines"]}
    assert {owner: role for owner, (role, _) in found.items()} == expected
    assert len({pool for _, pool in found.values()}) == (2 if name == "two models" else 1)


@pytest.mark.parametrize(
    ("args", "facts"),
    [
        (["--max-num-seqs=64", "--max-num-batched-tokens", "2048"], (64, 2048)),
        (["--max-num-seqs", "64", "--max-num-seqs=128"], (128, None)),
        (["--max-num-batched-tokens=2k", "--max-num-seqs-else=3", "5"], (None, None)),
    ],
)
def test_flags_of_engines_are_facts_in_the_settings(
    args: list[str], facts: tuple[int | None, int | None]
) -> None:
    engine = {"name": "plain", "role": "aggregated", "model": "m", "args": args}
    (pool,) = settings_of(rendered({"engines": [engine]})).pools
    found = pool.nodes[0].facts
    assert (found.max_num_seqs, found.max_num_batched_tokens) == facts


def test_settings_of_a_pool_stand_beside_its_engines() -> None:
    (pool,) = settings_of(rendered(SETS["settings of a pool, beside those of its engines"])).pools
    assert (pool.policy.placement, pool.profile) == ("auto", "h200-8b")
    assert [node.role for node in pool.nodes] == ["prefill", "decode", "aggregated"]


# -- revisions


def revisions(values: dict[str, Any]) -> dict[str, str]:
    deployments = of_kind(rendered(values), "Deployment")
    labels = {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"]
        for one in deployments
    }
    return {
        name: found["pdproxy.dev/revision"]
        for name, found in labels.items()
        if "pdproxy.dev/revision" in found
    }


@pytest.mark.parametrize(
    ("of_decode", "is_another"),
    [
        ({"args": ["--block-size=64"]}, True),
        ({"args": ["--max-num-seqs=256", "--block-size", "64"]}, True),
        ({"args": ["--max-num-seqs=256", "--a-flag-of-the-next-release"]}, True),
        ({"image": {"tag": "v0.33.0"}}, True),
        ({"tensorParallelSize": 2}, True),
        ({"kvTransferConfig": {"kv_load_failure_policy": "recompute"}}, True),
        ({"args": ["--max-num-seqs", "512"]}, False),
        ({"args": ["--max-model-len=4096", "--gpu-memory-utilization", "0.8"]}, False),
        ({"replicas": 9, "env": [{"name": "A", "value": "b"}], "nodeSelector": {"a": "b"}}, False),
    ],
    ids=json.dumps,
)
def test_a_revision_is_of_all_roles_and_changes_with_what_may_change_kv(
    of_decode: dict[str, Any], is_another: bool
) -> None:
    before = revisions(ENGINES)
    assert len(before) == 2
    (revision,) = {*before.values()}
    changed = copy.deepcopy(ENGINES)
    changed["engines"][1] |= of_decode
    (new,) = {*revisions(changed).values()}
    assert (new != revision) == is_another


@pytest.mark.parametrize("role", ["decode", "aggregated"])
def test_one_more_entry_that_changes_no_kv_has_the_revision_of_the_others(role: str) -> None:
    """Otherwise all engines would be replaced."""
    more = {"name": "more", "role": role, "args": ["--max-num-seqs=8"]}
    found = revisions({**ENGINES, "engines": [*ENGINES["engines"], more]})
    assert len(found) == 3
    assert {*found.values()} == {*revisions(ENGINES).values()}


def test_models_have_revisions_of_their_own() -> None:
    before = revisions(SETS["two models"])
    changed = copy.deepcopy(SETS["two models"])
    changed["engines"][3]["args"] = ["--block-size=64"]
    after = revisions(changed)
    assert {name for name in before if before[name] != after[name]} == {
        "pdproxy-big-p",
        "pdproxy-big-d",
    }


# -- how a pod lives and ends


def test_a_busy_engine_is_not_down() -> None:
    container = engine_of(rendered(ENGINES), "decode")
    assert "livenessProbe" not in container
    ready = container["readinessProbe"]
    assert ready["failureThreshold"] * ready["periodSeconds"] >= 30
    start = container["startupProbe"]
    assert start["failureThreshold"] * start["periodSeconds"] == 1800
    (deployment,) = of_kind(rendered(ENGINES), "Deployment", "pdproxy-decode")
    assert deployment["spec"]["progressDeadlineSeconds"] > 1800
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert deployment["spec"]["minReadySeconds"] == 10


@pytest.mark.parametrize(
    ("values", "drain"),
    [
        ({}, 310),
        ({"config": {"deadlines": {"engine_drain": 60}}}, 70),
        ({"engineDefaults": {**QWEN, "drainSeconds": 30}}, 30),
    ],
)
def test_an_engine_ends_behind_the_requests_that_it_has(values: dict[str, Any], drain: int) -> None:
    objects = rendered({**ENGINES, **values})
    pod = pod_of(objects, "pdproxy-decode")["spec"]
    (container,) = pod["containers"]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert f"DRAIN_SECONDS={drain}" in command
    left = pod["terminationGracePeriodSeconds"] - drain
    assert left > int(option(container, "--shutdown-timeout"))


def test_the_hook_knows_variables_that_the_chart_gives_it() -> None:
    hook = HOOK.read_text()
    for name in ("2p2d", "mooncake", "TLS"):
        objects = rendered(SETS[name])
        container = engine_of(objects, "prefill")
        program, *words = container["lifecycle"]["preStop"]["exec"]["command"]
        given = dict(word.split("=") for word in words if "=" in word)
        (files,) = of_kind(objects, "ConfigMap", "pdproxy-prestop")
        name_of_services, services = files["data"]["variables"].rstrip().split("=")
        assert f"${{{name_of_services}-" in hook
        assert (program, words[-2:]) == ("env", ["sh", "/pdproxy/prestop.sh"])
        assert all(f"${{{variable}:-" in hook for variable in given)
        scheme = "https" if name == "TLS" else "http"
        assert shlex.split(services) == [f"{scheme}://pdproxy-all:8000"]
        assert ("KV_SECONDS" in given) == (name == "mooncake")


@pytest.mark.parametrize("name", [name for name in SETS if SETS[name].get("engines")])
def test_engines_need_no_more_than_the_baseline_standard(name: str) -> None:
    objects = rendered(SETS[name])
    for one in SETS[name]["engines"]:
        found = against_baseline(pod_of(objects, f"pdproxy-{one['name']}")["spec"])
        assert found == (["IPC_LOCK"] if "RDMA" in name else [])
