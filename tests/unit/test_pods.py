"""Which engines the pods of a cluster have: a row for each kind of pod."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdproxy.fleet.pods import PodRules, engines_of, joined
from pdproxy.settings.kubernetes import Kubernetes
from pdproxy.wire.kubernetes import Pod

ROLE = "pdproxy.dev/role"


def rules(*ports: int | str, scheme: str = "http", **settings: Any) -> PodRules:
    kubernetes = Kubernetes(**settings)
    return PodRules(scheme, ports or (8000,), kubernetes.pod_labels, kubernetes.family)


def pod(
    labels: dict[str, str] | None = None,
    *,
    name: str = "p-0",
    ips: tuple[str, ...] = ("10.0.0.1",),
    ready: str | None = "True",
    phase: str = "Running",
    deleted: bool = False,
    **spec: Any,
) -> Pod:
    """A pod as the API has it, with fields that matter to nobody here."""
    labels = {ROLE: "prefill"} if labels is None else labels
    text = {
        "metadata": {
            "name": name,
            "namespace": "llm",
            "uid": f"uid-{name}",
            "resourceVersion": "7",
            "labels": labels,
            "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}],
            **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {}),
        },
        "spec": {"containers": [{"name": "vllm", "image": "vllm"}], "nodeName": "gpu-1", **spec},
        "status": {
            "phase": phase,
            "conditions": [{"type": "Initialized", "status": "True"}],
            **({"podIP": ips[0], "podIPs": [{"ip": ip} for ip in ips]} if ips else {}),
        },
    }
    if ready is not None:
        text["status"]["conditions"].append({"type": "Ready", "status": ready})
    return msgspec.convert(text, Pod)


def ports(*named: tuple[str, int], of: str = "containers") -> dict[str, Any]:
    return {of: [{"ports": [{"name": name, "containerPort": port} for name, port in named]}]}


def at(role: str, *, ready: bool = True) -> list[tuple[str, str, bool]]:
    """The engine of `pod()`."""
    return [("http://10.0.0.1:8000", role, ready)]


ENGINES: dict[str, tuple[Pod, PodRules, list[tuple[str, str, bool]]]] = {
    "ready": (pod(), rules(), at("prefill")),
    "decode": (pod({ROLE: "decode"}), rules(), at("decode")),
    "any": (pod({ROLE: "any"}), rules(), at("any")),
    "aggregated": (pod({ROLE: "aggregated"}), rules(), at("aggregated")),
    "encode": (pod({ROLE: "encode"}), rules(), at("encode")),
    "not ready": (pod(ready="False"), rules(), at("prefill", ready=False)),
    "not known whether ready": (
        pod(ready="Unknown"),
        rules(),
        at("prefill", ready=False),
    ),
    "no word on readiness": (pod(ready=None), rules(), at("prefill", ready=False)),
    "starting": (pod(phase="Pending", ready=None), rules(), at("prefill", ready=False)),
    "without an address": (pod(ips=()), rules(), []),
    "being deleted": (pod(deleted=True), rules(), []),
    "being deleted, not ready": (pod(deleted=True, ready="False"), rules(), []),
    "failed": (pod(phase="Failed"), rules(), []),
    "succeeded": (pod(phase="Succeeded"), rules(), []),
    "being deleted, wrong role": (pod({ROLE: "x"}, deleted=True), rules(), []),
    "node lost": (pod(phase="Unknown", ready="Unknown"), rules(), at("prefill", ready=False)),
    "another port": (pod(), rules(9000), [("http://10.0.0.1:9000", "prefill", True)]),
    "TLS": (pod(), rules(scheme="https"), [("https://10.0.0.1:8000", "prefill", True)]),
    "a port's name": (
        pod(**ports(("metrics", 9090), ("http", 8080))),
        rules("http"),
        [("http://10.0.0.1:8080", "prefill", True)],
    ),
    "a port's name of a sidecar": (
        pod(**ports(("http", 8200), of="initContainers")),
        rules("http"),
        [("http://10.0.0.1:8200", "prefill", True)],
    ),
    "several ports": (
        pod(),
        rules(8000, 8001),
        [("http://10.0.0.1:8000", "prefill", True), ("http://10.0.0.1:8001", "prefill", True)],
    ),
    "IPv6": (pod(ips=("fd00::1",)), rules(), [("http://[fd00::1]:8000", "prefill", True)]),
    "IPv6, spelled otherwise": (
        pod(ips=("FD00:0:0:0::1",)),
        rules(),
        [("http://[fd00::1]:8000", "prefill", True)],
    ),
    "both, the first": (
        pod(ips=("10.0.0.1", "fd00::1")),
        rules(),
        at("prefill"),
    ),
    "both, IPv6": (
        pod(ips=("10.0.0.1", "fd00::1")),
        rules(family="ipv6"),
        [("http://[fd00::1]:8000", "prefill", True)],
    ),
    "both, IPv4": (
        pod(ips=("fd00::1", "10.0.0.1")),
        rules(family="ipv4"),
        at("prefill"),
    ),
    "a role of one's own": (
        pod({ROLE: "kv_both"}),
        rules(roles={"kv_both": "any"}),
        at("any"),
    ),
    "a label of one's own": (
        pod({"r": "decode"}),
        rules(role_label="r"),
        at("decode"),
    ),
    "llm-d": (
        pod({"llm-d.ai/role": "prefill-decode"}),
        rules(preset="llm-d"),
        at("any"),
    ),
    "llm-d, prefill": (
        pod({"llm-d.ai/role": "prefill"}),
        rules(preset="llm-d"),
        at("prefill"),
    ),
    "AIBrix": (
        pod({"role-name": "decode"}),
        rules(preset="aibrix"),
        at("decode"),
    ),
    "LeaderWorkerSet": (pod(), rules(preset="lws"), at("prefill")),
    "DisaggregatedSet": (
        pod({"disaggregatedset.x-k8s.io/role": "decode"}),
        rules(preset="disaggregatedset"),
        at("decode"),
    ),
    "Dynamo": (
        pod(
            {
                "nvidia.com/dynamo-component-type": "worker",
                "nvidia.com/dynamo-sub-component-type": "decode",
            }
        ),
        rules(preset="dynamo"),
        at("decode"),
    ),
    "Dynamo, one label": (
        pod({"nvidia.com/dynamo-component-type": "prefill"}),
        rules(preset="dynamo"),
        at("prefill"),
    ),
    "a preset, another label": (
        pod({"r": "both"}),
        rules(preset="llm-d", role_label="r"),
        at("any"),
    ),
}
LEFT_OUT = {
    "no such port": (pod(), rules("http"), "pod llm/p-0: none of its containers has a port http"),
    "no address": (pod(ips=("nowhere",)), rules(), "pod llm/p-0: nowhere: no IP address"),
    "no IPv6": (pod(), rules(family="ipv6"), "pod llm/p-0: 10.0.0.1: no ipv6 address"),
}
NO_ROLE = {
    "no label": (pod({}), rules(), f"pod llm/p-0: has no label {ROLE}: expected one with"),
    "no role": (pod({ROLE: "prefil"}), rules(), f'pod llm/p-0: label {ROLE} is "prefil": '),
    "capitals": (pod({ROLE: "Prefill"}), rules(), f'label {ROLE} is "Prefill": expected prefill, '),
    "empty": (pod({ROLE: ""}), rules(), f'label {ROLE} is "": expected prefill, decode, '),
    "no such value for the preset": (
        pod({"llm-d.ai/role": "x"}),
        rules(preset="llm-d"),
        "any, encode, prefill-decode, both",
    ),
    "another project's label": (pod({"llm-d.ai/role": "prefill"}), rules(), f"has no label {ROLE}"),
}


@pytest.mark.parametrize("row", ENGINES)
def test_a_pod_has_these_engines(row: str) -> None:
    found, with_rules, expected = ENGINES[row]
    engines, wrong = engines_of(found, with_rules)
    assert wrong is None
    assert [(one.url, one.role, one.ready) for one in engines] == expected
    assert {one.identity for one in engines} <= {found.metadata.uid}


@pytest.mark.parametrize("row", LEFT_OUT)
def test_a_pod_is_left_out(row: str) -> None:
    found, with_rules, why = LEFT_OUT[row]
    assert engines_of(found, with_rules) == ((), why)


@pytest.mark.parametrize("row", NO_ROLE)
def test_a_pod_does_not_say_its_role(row: str) -> None:
    """Which is wrong only where no node's settings say it."""
    found, with_rules, why = NO_ROLE[row]
    (engine,), wrong = engines_of(found, with_rules)
    assert (engine.role, wrong) == (None, None)
    assert why in engine.no_role


@pytest.mark.parametrize(
    ("labels", "settings", "expected"),
    [
        ({"pdproxy.dev/revision": "v2"}, {}, {"revision": "v2"}),
        ({"topology.kubernetes.io/rack": "r1"}, {}, {"rack": "r1"}),
        ({"topology.kubernetes.io/zone": "z"}, {"labels": {"zone": ""}}, {}),
        ({"a/b": "c"}, {"labels": {"d": "a/b"}}, {"d": "c"}),
        (
            {"disaggregatedset.x-k8s.io/revision": "v3"},
            {"preset": "disaggregatedset"},
            {"revision": "v3"},
        ),
        ({"roleset-name": "s"}, {"preset": "aibrix"}, {"roleset": "s"}),
    ],
)
def test_an_engine_has_labels_of_its_pod(
    labels: dict[str, str], settings: dict[str, Any], expected: dict[str, str]
) -> None:
    (engine,), _ = engines_of(pod({ROLE: "decode", **labels}), rules(**settings))
    of_pod = {"pod": "p-0", "namespace": "llm", "host": "gpu-1"}
    assert engine.labels == {**expected, **of_pod}


def test_of_two_pods_with_one_address_the_ready_one_is_used() -> None:
    """The other one can't listen there: while it starts, the engine that serves goes on."""
    serves = engines_of(pod(name="a"), rules())
    starts = engines_of(pod(name="b", ready="False"), rules())
    for both in ([serves, starts], [starts, serves]):
        assert joined(both) == ([*serves.engines], [])
    assert joined([starts, starts])[0] == []


def test_of_two_ready_pods_with_one_address_neither_is_used() -> None:
    """Nobody knows which of them answers. The others are."""
    same = [engines_of(pod(name=name), rules()) for name in ("a", "b")]
    other = engines_of(pod(name="c", ips=("10.0.0.2",)), rules())
    bad = engines_of(pod(name="d", ips=("nowhere",)), rules())
    engines, wrong = joined([same[0], other, same[1], bad])
    assert [one.url for one in engines] == ["http://10.0.0.2:8000"]
    assert wrong == [
        "pod llm/d: nowhere: no IP address",
        "pods llm/a and llm/b have the same address http://10.0.0.1:8000",
    ]
