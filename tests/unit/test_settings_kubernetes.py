"""The section `kubernetes`, and URLs that name pods."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.settings.errors import SettingsError
from pdproxy.settings.kubernetes import kubernetes_url, spelled_selector
from pdproxy.settings.load import EngineFlag, load

POOL = "pools: [{nodes: [%s]}]\n"
PODS = "{url: 'pods:///app=a', role: %s}"


@pytest.mark.parametrize(
    ("url", "spelled"),
    [
        ("pods://llm:8000/app=vllm", "pods://llm:8000/app=vllm"),
        ("pods:///app=vllm", "pods://:8000/app=vllm"),
        ("PODS://a,b:http/app!=c", "pods://a,b:http/app!=c"),
        ("pods://a,a/x", "pods://a:8000/x"),
        ("pods://*/x", "pods://*:8000/x"),
        ("podss://:8443/k8s.io/x==y", "podss://:8443/k8s.io/x=y"),
        ("pods:///a in (b, c),!d", "pods://:8000/a%20in%20(b,c),!d"),
        ("pods:///a%20notin%20(b)", "pods://:8000/a%20notin%20(b)"),
        ("pods:///a=", "pods://:8000/a="),
        ("inferencepool://llm/pool", "inferencepool://llm/pool"),
        ("inferencepools://pool", "inferencepools://pool"),
    ],
)
def test_a_url_has_one_spelling(url: str, spelled: str) -> None:
    found = kubernetes_url(url, ("url",))
    assert found.url == spelled
    assert kubernetes_url(spelled, ("url",)) == found


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("pods://llm:8000", "names no label: expected pods://NAMESPACE:PORT/LABEL_SELECTOR"),
        ("pods://llm:8000/", "names no label"),
        ("pods://LLM/a", '"LLM" is no name of a namespace'),
        ("pods://*,b/a", "expected no other beside it"),
        ("pods://:0/a", "expected a port from 1 to 65535"),
        ("pods://:65536/a", "expected a port from 1 to 65535"),
        ("pods://:-/a", '"-" is neither a port nor the name of one'),
        ("pods:///a=b,", '"" is no part of a label selector'),
        ("pods:///a in b", '"a in b" is no part of a label selector'),
        ("pods:///-a=b", '"-a" is no name of a label'),
        (f"pods:///a={'b' * 64}", "is no value of a label"),
        ("inferencepool://", "expected inferencepool://NAMESPACE/NAME"),
        ("inferencepool://a/B", "expected inferencepool://NAMESPACE/NAME"),
        ("inferencepool://A/b", '"A" is no name of a namespace'),
    ],
)
def test_a_url_is_refused(url: str, why: str) -> None:
    with pytest.raises(SettingsError) as error:
        kubernetes_url(url, ("pools", 0, "nodes", 0, "url"))
    assert str(error.value).startswith("pools[0].nodes[0].url: ")
    assert why in str(error.value)


@given(st.text(alphabet="ab=!,() inot%/.-", max_size=40))
def test_a_selector_in_its_normal_spelling_stays_as_it_is(text: str) -> None:
    with contextlib.suppress(ValueError):
        spelled = spelled_selector(text)
        assert spelled_selector(spelled) == spelled
        assert kubernetes_url(kubernetes_url(f"pods:///{spelled}", ()).url, ())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (POOL % "{url: 'http://a:1', role: by_label}", "pools[0].nodes[0].role: by_label: only "),
        (POOL % "{url: 'dns://a:1', role: by_label}", "only engines of pods:// or podss:// or "),
        (POOL % (PODS % "prefill"), "prefill engines, but no decode engine"),
        (POOL % (PODS % "decode") + "kubernetes: {preset: kserve}\n", "kubernetes.preset: "),
        (POOL % (PODS % "decode") + "kubernetes: {role_label: a b}\n", "kubernetes.role_label: "),
        (
            POOL % (PODS % "decode") + "kubernetes: {labels: {rack: '/'}}\n",
            'kubernetes.labels.rack: "/": no label of a pod can be so',
        ),
        (POOL % (PODS % "decode") + "kubernetes: {roles: {x: y}}\n", "kubernetes.roles"),
    ],
)
def test_settings_are_refused(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as error:
        load(file, {})
    assert why in str(error.value)


def test_flags_name_pods() -> None:
    """A selector for each role, or one whose pods say their roles."""
    flags = [("prefill", "pods:///app=p"), ("decode", "pods:///app=d"), ("by_label", "pods:///a=b")]
    settings = load(None, {}, engines=[EngineFlag(role, url) for role, url in flags])  # type: ignore[arg-type]
    assert [(node.role, node.url) for node in settings.pool.source_nodes] == [
        ("prefill", "pods://:8000/app=p"),
        ("decode", "pods://:8000/app=d"),
        ("by_label", "pods://:8000/a=b"),
    ]
    with pytest.raises(SettingsError, match=r"\(--by-label\)"):
        load(None, {}, engines=[EngineFlag("by_label", "pods:///")])


def test_labels_of_a_pool_are_compared_when_pods_are_found(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("pools: [{pair_within: [rack], nodes: [{url: 'pods:///a=b', role: by_label}]}]")
    assert load(file, {}).pool.pair_within == ("rack",)
