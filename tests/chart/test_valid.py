"""With each set of values, the chart renders objects that Kubernetes takes, and settings that the
program takes; wrong values are refused before anything is installed.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from pdproxy.cli.main import main
from tests.chart.render import (
    CHART,
    CUSTOM,
    VERSIONS,
    Objects,
    RefusedError,
    helm,
    mistakes,
    pod_of,
    rendered,
    settings_of,
    text_of,
)
from tests.chart.sets import ENGINES, QWEN, SETS


def objects_of(name: str) -> Objects:
    return rendered(SETS[name])


@pytest.mark.parametrize("name", SETS)
def test_kubernetes_takes_the_objects(name: str) -> None:
    """Each version that the chart allows, without a field that it does not know."""
    known = [one for one in objects_of(name) if (one["apiVersion"], one["kind"]) not in CUSTOM]
    assert len(known) > 4
    for one in known:
        for version in VERSIONS:
            assert mistakes(one, version) == [], (version, one["kind"], one["metadata"]["name"])


@pytest.mark.parametrize("version", VERSIONS)
def test_a_field_that_kubernetes_does_not_know_is_found(version: str) -> None:
    (deployment,) = (
        copy.deepcopy(one)
        for one in objects_of("2p2d")
        if one["kind"] == "Deployment" and one["metadata"]["name"] == "pdproxy"
    )
    deployment["spec"]["template"]["spec"]["containers"][0]["lifecycel"] = {}
    (found,) = mistakes(deployment, version)
    assert "lifecycel" in found


@pytest.mark.parametrize("name", SETS)
def test_the_program_takes_the_settings(name: str) -> None:
    settings = settings_of(objects_of(name))
    assert all(pool.nodes for pool in settings.pools)


def test_numbers_and_what_is_off_reach_the_program() -> None:
    """Helm knows only floating point numbers, and takes false and 0 for nothing where it merges."""
    settings = settings_of(objects_of("many proxies"))
    assert settings.limits.max_body_bytes == 67_108_864
    values = {
        **ENGINES,
        "config": {"listen": {"linger": 0, "admin": None}, "media": {"urls": False}},
    }
    settings = settings_of(rendered(values))
    assert (settings.listen.linger, settings.listen.admin, settings.media.urls) == (0, None, "off")


@pytest.mark.parametrize("name", ["2p2d", "monitoring", "behind a gateway", "keys of all kinds"])
def test_helm_has_nothing_to_say(name: str, tmp_path: Any) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(SETS[name]))
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), "-f", str(file))


@pytest.mark.parametrize(
    "name", ["two models", "monitoring", "keys of all kinds", "behind a gateway", "many proxies"]
)
def test_an_upgrade_without_changes_changes_nothing(name: str) -> None:
    assert text_of(SETS[name]) == text_of(SETS[name], "--is-upgrade")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"replicaz": 3}, "replicaz"),
        ({"image": {"repo": "x"}}, "repo"),
        ({"image": {"digest": "sha256:abc"}}, "/image/digest"),
        ({"config": {"deadlines": {"drian": 5}}}, "drian"),
        ({"config": {"limits": {"max_inflight": -1}}}, "/config/limits/max_inflight"),
        ({"config": {"listen": {"port": "8000"}}}, "/config/listen/port"),
        ({"config": {"pools": [{"policy": "least-load"}]}}, "/config/pools/0/policy"),
        ({"config": {"pools": [{"nodes": [{"url": "pods:///app=vllm"}]}]}}, "role"),
        ({"config": {"pools": [{"connector": "nixle"}]}}, "/config/pools/0/connector"),
        ({"engines": [{"name": "p", "role": "prefil"}]}, "/engines/0/role"),
        ({"engines": [{"name": "p", "role": "prefill", "replica": 2}]}, "replica"),
        ({"engines": [{"role": "prefill"}]}, "name"),
        ({"engines": [{"name": "Prefill_1", "role": "prefill"}]}, "/engines/0/name"),
        ({"engines": [{"name": "proxy", "role": "prefill"}]}, "/engines/0/name"),
        ({"engineDefaults": {"connector": "nixl_push"}}, "/engineDefaults/connector"),
        ({"engineDefaults": {"tensorParallelSize": 0}}, "/engineDefaults/tensorParallelSize"),
        ({"service": {"type": "Clusterip"}}, "/service/type"),
        ({"route": {"enabled": "yes"}}, "/route/enabled"),
        ({"terminationGracePeriodSeconds": "5m"}, "/terminationGracePeriodSeconds"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_typo_is_refused_by_its_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(RefusedError) as error:
        rendered({**ENGINES, **values})
    (line, *_) = (line for line in str(error.value).splitlines() if line.startswith("- at "))
    assert said in line


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "no engines: set `engines`"),
        ({"engines": ENGINES["engines"]}, "engines: prefill has no model"),
        (
            {**ENGINES, "engines": [{"name": "e", "role": "any"}] * 2},
            "engines: two entries have the name e",
        ),
        (
            {**ENGINES, "engineDefaults": {**QWEN, "args": ["--tensor-parallel-size", "2"]}},
            "engines: prefill: args: the chart sets --tensor-parallel-size: use tensorParallelSize",
        ),
        (
            {**ENGINES, "engineDefaults": {**QWEN, "args": ["--port=8001"]}},
            "engines: prefill: args: the chart sets --port",
        ),
        (
            {**ENGINES, "engineDefaults": {**QWEN, "args": ["--ssl-keyfile", "/key"]}},
            "engines: prefill: args: probes need plain HTTP: leave --ssl-keyfile out",
        ),
        (
            {
                **ENGINES,
                "engineDefaults": {
                    **QWEN,
                    "env": [{"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "value": "0.0.0.0"}],
                },
            },
            "engines: prefill: env: the chart sets VLLM_NIXL_SIDE_CHANNEL_HOST",
        ),
        (
            {**ENGINES, "engineDefaults": {"model": "m", "connector": "shared"}},
            "engines: prefill: connector shared needs kvTransferConfig.kv_connector",
        ),
        (
            {**ENGINES, "terminationGracePeriodSeconds": 280},
            "terminationGracePeriodSeconds is 280, but a proxy that stops takes up to 280 s",
        ),
        ({**ENGINES, "route": {"enabled": True}}, "route.parentRefs names no gateway"),
        (
            {**ENGINES, "config": {"listen": {"uds": "/run/pdproxy/socket"}}},
            "config.listen.uds: nobody outside of the pod reaches a Unix socket",
        ),
        (
            {**ENGINES, "config": {"listen": {"tls": {"client_ca": "/ca.pem"}}}},
            "config.listen.tls.client_ca: the probes of Kubernetes have no certificate",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_can_not_work_are_refused_in_a_sentence(
    values: dict[str, Any], said: str
) -> None:
    with pytest.raises(RefusedError) as error:
        rendered(values)
    assert said in str(error.value)


def test_what_the_program_refuses_is_a_mistake_here_too(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that a pod could begin with agrees with what these tests ask."""
    values = {**ENGINES, "config": {"dns": {"min_ttl": 90}}}  # no schema can say that
    objects = rendered(values)
    (config,) = (
        one for one in objects if one["kind"] == "ConfigMap" and "pdproxy.yaml" in one["data"]
    )
    file = tmp_path / "pdproxy.yaml"
    file.write_text(config["data"]["pdproxy.yaml"])
    assert main(["config", "validate", "--config", str(file)]) == 2
    assert "dns.min_ttl" in capsys.readouterr().err
    file.write_text(file.read_text().replace("min_ttl: 90", "min_ttl: 9"))
    assert main(["config", "validate", "--config", str(file)]) == 0
    assert pod_of(objects)["spec"]["containers"][0]["args"] == ["serve"]
