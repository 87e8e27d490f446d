"""Changes of the pods that a resource asks for."""

from __future__ import annotations

from typing import Any

import pytest

from pdproxy_operator.engine_objects import engine_objects
from pdproxy_operator.errors import ConfigError
from pdproxy_operator.pools import pools_of, selected_pools
from pdproxy_operator.proxy_objects import proxy_objects
from tests.operator.resources import proxy, runtime

PREFILL, DECODE = runtime("p", "prefill"), runtime("d", "decode")


def engine_pod(template: dict[str, Any], **more: Any) -> dict[str, Any]:
    one = runtime("any", "any", template=template, **more)
    ((_, pool),) = pools_of([], [one])
    (deployment,) = (it for it in engine_objects(one, pool, [], {}) if it["kind"] == "Deployment")
    pod: dict[str, Any] = deployment["spec"]["template"]
    return pod


def proxy_pod(template: dict[str, Any]) -> dict[str, Any]:
    front = proxy(template=template)
    objects = proxy_objects(front, selected_pools(front, [PREFILL, DECODE]), None)
    (deployment,) = (one for one in objects if one["kind"] == "Deployment")
    pod: dict[str, Any] = deployment["spec"]["template"]
    return pod


def test_parts_are_merged_by_their_names() -> None:
    template = {
        "metadata": {"labels": {"team": "llm"}, "annotations": {"a": "b"}},
        "spec": {
            "hostNetwork": True,
            "tolerations": [{"operator": "Exists"}],
            "containers": [
                {
                    "name": "engine",
                    "env": [{"name": "A", "value": "1"}],
                    "ports": [{"containerPort": 9000, "name": "more"}],
                    "volumeMounts": [{"name": "models", "mountPath": "/models"}],
                    "readinessProbe": {"timeoutSeconds": 9},
                    "startupProbe": None,
                    "lifecycle": {"postStart": {"exec": {"command": ["true"]}}},
                },
                {"name": "beside", "image": "x"},
            ],
            "volumes": [
                {"name": "shm", "emptyDir": {"sizeLimit": "64Gi"}},
                {"name": "models", "persistentVolumeClaim": {"claimName": "models"}},
            ],
        },
    }
    pod, plain = engine_pod(template), engine_pod({})
    engine, beside = pod["spec"]["containers"]
    assert beside == {"name": "beside", "image": "x"}
    assert pod["metadata"]["labels"] == {**plain["metadata"]["labels"], "team": "llm"}
    assert pod["metadata"]["annotations"] == {"a": "b"}
    assert pod["spec"]["hostNetwork"] is True
    assert pod["spec"]["tolerations"] == [{"operator": "Exists"}]
    volumes = {one.pop("name"): one for one in pod["spec"]["volumes"]}
    assert volumes["shm"] == {"emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}
    assert [*volumes] == ["shm", "prestop", "models"]
    (before,) = plain["spec"]["containers"]
    assert engine["env"] == [*before["env"], {"name": "A", "value": "1"}]
    assert engine["ports"] == [*before["ports"], {"containerPort": 9000, "name": "more"}]
    assert engine["readinessProbe"] == {**before["readinessProbe"], "timeoutSeconds": 9}
    assert "startupProbe" not in engine
    assert engine["lifecycle"].keys() == {"preStop", "postStart"}
    assert engine["args"] == before["args"]


def engine(**changes: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "engine", **changes}]}}


OF_ENGINES: list[tuple[dict[str, Any], str]] = [
    ({"kind": "Pod"}, "template.kind: only metadata and spec can be changed"),
    ({"metadata": {"name": "x"}}, "template.metadata.name: only labels and annotations"),
    (
        {"metadata": {"labels": {"pdproxy.dev/role": "decode"}}},
        "template.metadata.labels.pdproxy.dev/role: it can't be changed here: use role",
    ),
    ({"metadata": {"labels": {"pdproxy.dev/runtime": None}}}, "it is pdproxy's own"),
    ({"metadata": {"labels": None}}, "template.metadata.labels: pdproxy needs metadata.labels."),
    ({"metadata": 5}, "template.metadata: pdproxy needs"),
    ({"spec": {"containers": [{"name": {}}]}}, "each entry must have name"),
    ({"metadata": None}, "template.metadata: pdproxy needs metadata.labels."),
    ({"spec": {"containers": None}}, "template.spec.containers: pdproxy needs spec.containers["),
    ({"spec": {"containers": {"name": "engine"}}}, "template.spec.containers: "),
    ({"spec": {"containers": [{"image": "x"}]}}, "each entry must have name"),
    ({"spec": {"containers": ["engine"]}}, "each entry must have name"),
    (
        engine(image="x"),
        "template.spec.containers[engine].image: it can't be changed here: use image",
    ),
    (engine(args=[]), "template.spec.containers[engine].args: it can't be changed here: use args"),
    (engine(command=["sh"]), "template.spec.containers[engine].command: "),
    (engine(lifecycle=None), "pdproxy needs spec.containers[engine].lifecycle.preStop"),
    (engine(lifecycle={"preStop": {}}), "it can't be changed here: use drain"),
    (
        engine(env=[{"name": "POD_IP", "value": "x"}]),
        "template.spec.containers[engine].env[POD_IP]",
    ),
    (engine(env=[]), ""),
    (engine(volumeMounts=[{"mountPath": "/pdproxy", "name": "x"}]), ".volumeMounts[/pdproxy]"),
    (engine(ports=[{"containerPort": 8000, "name": "x"}]), ".ports[8000]"),
    ({"spec": {"volumes": [{"name": "prestop", "emptyDir": {}}]}}, "spec.volumes[prestop]"),
    (
        {"spec": {"terminationGracePeriodSeconds": 5}},
        "use terminationGracePeriodSeconds",
    ),
    ({"spec": {"$patch": "replace"}}, "template.spec.$patch: directives of patches"),
    ({"spec": {"containers": [{"$patch": "delete", "name": "engine"}]}}, "directives of patches"),
]


@pytest.mark.parametrize(("template", "said"), OF_ENGINES)
def test_what_engines_need_stays(template: dict[str, Any], said: str) -> None:
    if not said:
        assert engine_pod(template) == engine_pod({})
        return
    with pytest.raises(ConfigError) as error:
        engine_pod(template)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ({"metadata": {"labels": {"pdproxy.dev/proxy": "x"}}}, "it is pdproxy's own"),
        ({"spec": {"serviceAccountName": "x"}}, "template.spec.serviceAccountName: "),
        ({"spec": {"containers": [{"name": "pdproxy", "args": ["x"]}]}}, "use config"),
        ({"spec": {"terminationGracePeriodSeconds": 5}}, "use config.deadlines"),
        ({"spec": {"volumes": [{"name": "config", "emptyDir": {}}]}}, "spec.volumes[config]"),
    ],
)
def test_what_proxies_need_stays(template: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        proxy_pod(template)
    assert said in str(error.value)


def test_limits_of_another_form_are_refused_by_their_name() -> None:
    with pytest.raises(ConfigError, match=r"resources\.limits: expected a mapping"):
        engine_pod({}, resources={"limits": "8"})


def test_an_engine_has_one_key() -> None:
    one = runtime("any", "any")
    fronts = [proxy(name, engineKey={"name": name, "key": "key"}) for name in ("a", "b")]
    ((_, pool),) = pools_of([], [one])
    with pytest.raises(ConfigError, match="the PDProxies a and b select any and have different"):
        engine_objects(one, pool, fronts, {})
    own = [{"name": "VLLM_API_KEY", "value": "x"}]
    key = {"name": "keys", "key": "key"}
    for env in (own, []):
        objects = engine_objects(runtime("any", "any", env=env), pool, [proxy(engineKey=key)], {})
        (found,) = (
            it
            for it in objects[1]["spec"]["template"]["spec"]["containers"][0]["env"]
            if it["name"] == "VLLM_API_KEY"
        )
        assert ("value" in found) == bool(env)
    objects = engine_objects(one, pool, [proxy("a"), proxy("b")], {})
    (files,) = (it for it in objects if it["kind"] == "ConfigMap")
    assert files["data"]["variables"] == "PDPROXY_SERVICES='http://a-all:8000 http://b-all:8000'\n"
