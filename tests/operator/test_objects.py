"""The objects that the operator makes: Kubernetes takes them, and engines and proxies can run."""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdproxy.settings.load import load
from pdproxy_operator.engine_objects import engine_objects
from pdproxy_operator.pools import pools_of, selected_pools
from pdproxy_operator.proxy_objects import proxy_objects
from pdproxy_operator.resources import Runtime
from tests.chart.pod_security import against_baseline, against_restricted
from tests.chart.render import CUSTOM, ROOT, mistakes
from tests.operator.generate import FOLDER, text_of
from tests.operator.resources import proxy, runtime
from tests.operator.sets import SETS, objects_of
from tests.unit.test_configs import simulated

VLLM = frozenset((ROOT / "tests" / "reference" / "vllm_names.txt").read_text().split("\n"))
VERSIONS = ("1.28", "1.32", "1.37")


def pods_of(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each template of pods, with the name of the runtime or of the PDProxy."""
    for one in objects:
        labels = one["metadata"]["labels"]
        owner = labels.get("pdproxy.dev/runtime") or labels["pdproxy.dev/proxy"]
        if one["kind"] == "Deployment":
            yield owner, one["spec"]["template"]
        elif one["kind"] == "LeaderWorkerSet":
            group = one["spec"]["leaderWorkerTemplate"]
            yield owner, group["leaderTemplate"]
            yield f"{owner}'s worker", group["workerTemplate"]


def engine_of(pod: dict[str, Any]) -> dict[str, Any] | None:
    return next((one for one in pod["spec"]["containers"] if one["name"] == "engine"), None)


@pytest.mark.parametrize("name", SETS)
def test_a_file_is_current(name: str) -> None:
    stale = f"{name} is stale: python -m tests.operator.generate"
    assert (FOLDER / f"{name}.yaml").read_text() == text_of(name), stale
    assert {path.stem for path in FOLDER.iterdir()} == {*SETS}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", SETS)
def test_kubernetes_takes_the_objects(name: str, version: str) -> None:
    """Without a field that it does not know; of groups, the templates of their pods."""
    objects = objects_of(name)
    known = [one for one in objects if (one["apiVersion"], one["kind"]) not in CUSTOM]
    deployment = next(one for one in objects if one["kind"] == "Deployment")
    for _, pod in pods_of(objects):
        known.append({**deployment, "spec": {**deployment["spec"], "template": pod}})
    assert len(known) > 10
    for one in known:
        assert mistakes(one, version) == [], (one["kind"], one["metadata"]["name"])


@pytest.mark.parametrize("name", SETS)
def test_each_object_has_one_owner_and_a_name_of_its_own(name: str) -> None:
    objects = objects_of(name)
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len({*names}) == len(names)
    for one in objects:
        (owner,) = one["metadata"]["ownerReferences"]
        labels = one["metadata"]["labels"]
        key = {"PDRuntime": "pdproxy.dev/runtime", "PDProxy": "pdproxy.dev/proxy"}[owner["kind"]]
        assert labels[key] == owner["name"]
        assert labels["app.kubernetes.io/managed-by"] == "pdproxy-operator"
        assert owner["uid"] == f"uid-of-{owner['name']}"
        assert owner["controller"]


@pytest.mark.parametrize("name", SETS)
def test_pods_need_no_more_rights_than_they_must(name: str) -> None:
    for owner, pod in pods_of(objects_of(name)):
        judge = against_restricted if engine_of(pod) is None else against_baseline
        assert judge(pod["spec"]) == [], owner


@pytest.mark.parametrize("name", SETS)
def test_each_engine_knows_its_flags(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0
    for _, pod in pods_of(objects_of(name)):
        container = engine_of(pod)
        if container is None:
            continue
        seen += 1
        words = [word.partition("=")[0] for word in container["args"] if word.startswith("-")]
        assert len({*words}) == len(words)
        if container["command"] == ["vllm", "serve"]:
            variables = [it["name"] for it in container["env"] if it["name"].startswith("VLLM_")]
            assert {*words, *variables} <= VLLM
        else:
            facts, host, port = simulated(
                monkeypatch, {"command": shlex.join(["sim", *container["args"]])}
            )
            assert (facts.model, facts.connector, host, port) == (
                "model",
                "nixl-push",
                "0.0.0.0",
                8000,
            )
    assert seen


def test_a_group_is_one_engine_whose_leader_answers() -> None:
    objects = objects_of("1p3d_of_groups")
    (groups,) = (one for one in objects if one["kind"] == "LeaderWorkerSet")
    assert groups["spec"]["replicas"] == 3
    pods = dict(pods_of(objects))
    leader, worker = (engine_of(pods[owner]) for owner in ("big-decode", "big-decode's worker"))
    assert leader is not None
    assert worker is not None
    assert worker["args"] == [*leader["args"], "--headless"]
    for one in (leader, worker):
        assert one["resources"]["limits"] == {"nvidia.com/gpu": "8"}  # of sixteen
        assert "--tensor-parallel-size=16" in one["args"]
        assert "--node-rank=$(LWS_WORKER_INDEX)" in one["args"]
    assert leader.keys() - worker.keys() == {"startupProbe", "readinessProbe", "lifecycle", "ports"}
    (settings,) = (
        one["data"]["pdproxy.yaml"] for one in objects if "pdproxy.yaml" in one.get("data", {})
    )
    assert "runtime=big-decode,leaderworkerset.sigs.k8s.io/worker-index=0" in settings
    assert "runtime=big-prefill\n" in settings
    (prefill,) = (one for one in objects if one["kind"] == "Deployment" and "prefill" in str(one))
    assert "--nnodes" not in json.dumps(prefill)


def test_other_ranks_are_reached_at_ports_of_their_own() -> None:
    pods = dict(pods_of(objects_of("any_with_autoscaling")))
    container = engine_of(pods["qwen"])
    assert container is not None
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"http": 8000, "kv-0": 5600, "kv-1": 5601}


def test_an_engine_asks_all_proxies_before_it_ends() -> None:
    objects = objects_of("two_proxies")
    said = {
        one["metadata"]["name"]: one["data"]["variables"]
        for one in objects
        if one["kind"] == "ConfigMap" and "variables" in one["data"]
    }
    urls = "http://inside-all:8000 https://outside-all:8443"
    both = f"PDPROXY_SERVICES='{urls}'\n"
    assert said == dict.fromkeys(("plain-prestop", "prefill-prestop", "decode-prestop"), both)
    services = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "Service"}
    for url in urls.split():
        name, _, port = url.partition("://")[2].partition(":")
        assert services[name]["publishNotReadyAddresses"]
        assert services[name]["ports"][0]["port"] == int(port)


def test_other_proxies_start_no_engine_anew() -> None:
    """Weights take minutes to load."""
    name = "2p2d"
    before = copy.deepcopy(dict(pods_of(objects_of(name))))
    SETS[name].proxies.append(proxy("second"))
    try:
        after = dict(pods_of(objects_of(name)))
    finally:
        SETS[name].proxies.pop()
    assert after.pop("second")
    assert after == before


def one_of(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = (one for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def test_engines_without_proxies_are_open_to_those_who_use_them() -> None:
    one = runtime("alone", "any")
    ((_, pool),) = pools_of([], [one])
    kinds = [it["kind"] for it in engine_objects(one, pool, [], {pool.revision: 1})]
    assert kinds == ["ConfigMap", "Deployment", "PodDisruptionBudget"]


def test_a_revision_that_has_no_engines_yet_has_none() -> None:
    one = runtime("one", "any", replicas=3)
    ((_, pool),) = pools_of([], [one])
    objects = engine_objects(one, pool, [], {"0123456789": 3})
    assert one_of(objects, "Deployment", f"one-{pool.revision}")["spec"]["replicas"] == 0


def test_other_engines_replace_no_proxy_and_other_settings_do() -> None:
    prefill, decode = SETS["2p2d"].runtimes

    def checksum(*more: Runtime, **changes: Any) -> str:
        front = proxy("front", **changes)
        pools = selected_pools(front, [prefill, decode, *more])
        template = one_of(proxy_objects(front, pools, None), "Deployment", "front")["spec"]
        return str(template["template"]["metadata"]["annotations"]["checksum/config"])

    assert checksum(runtime("d2", "decode", labels={"rack": "r1"})) == checksum()
    assert checksum(config={"deadlines": {"drain": 90}}) != checksum()
    assert checksum(runtime("big", "any", model={"name": "big"})) != checksum()


def test_the_proxies_know_the_operators_key() -> None:
    """By its digest, beside those of others: the operator reads their metrics."""
    others = ["b" * 64]
    front = proxy("front", config={"auth": {"reader_key_digests": others}})
    pools = selected_pools(front, SETS["2p2d"].runtimes)
    settings = one_of(proxy_objects(front, pools, "a" * 64), "ConfigMap", "front")["data"]
    auth = yaml.safe_load(settings["pdproxy.yaml"])["auth"]
    assert auth == {"reader_key_digests": ["a" * 64, *others]}


def test_nobody_takes_an_object_from_the_operator_by_its_labels() -> None:
    labels = {"pdproxy.dev/proxy": "x", "app.kubernetes.io/managed-by": "x", "release": "y"}
    front = proxy("front", monitor={"labels": labels})
    objects = proxy_objects(front, selected_pools(front, SETS["2p2d"].runtimes), None)
    assert one_of(objects, "PodMonitor", "front-engines")["metadata"]["labels"] == {
        "pdproxy.dev/proxy": "front",
        "app.kubernetes.io/managed-by": "pdproxy-operator",
        "release": "y",
    }


@pytest.mark.parametrize("name", SETS)
def test_the_program_takes_the_settings(name: str, tmp_path: Path) -> None:
    """As they are written."""
    for one in objects_of(name):
        if "pdproxy.yaml" in one.get("data", {}):
            file = tmp_path / one["metadata"]["name"]
            file.write_text(one["data"]["pdproxy.yaml"])
            assert all(pool.nodes for pool in load(file, {}).pools)
