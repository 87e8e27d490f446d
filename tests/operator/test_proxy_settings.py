"""The settings that the operator writes for proxies, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pdproxy_operator.errors import ConfigError
from pdproxy_operator.pools import selected_pools
from pdproxy_operator.proxy_settings import ProxySettings, proxy_settings
from pdproxy_operator.resources import Runtime
from tests.operator.resources import proxy, runtime

PREFILL, DECODE = runtime("p", "prefill"), runtime("d", "decode")
CUSTOM = "Qwen-Qwen3-0.6B-custom"


def settings(*runtimes: Runtime, **more: Any) -> ProxySettings:
    front = proxy(**more)
    return proxy_settings(front, selected_pools(front, runtimes or (PREFILL, DECODE)), None)


def test_what_a_runtime_says_of_its_engines_is_in_the_settings() -> None:
    """Labels, too: the proxies pair by them, and no engine is started anew for a label."""
    big = {"tensorParallelSize": 4, "groupSize": 2, "labels": {"rack": "r1"}}
    prefill = runtime("p", "prefill", servesWhole=True, labels={"rack": "r2"})
    pool = {"name": "Qwen-Qwen3-0.6B-nixl", "pair_within": ["rack"]}
    made = settings(prefill, runtime("d", "decode", **big), config={"pools": [pool]})
    assert made.content["pools"][0]["nodes"] == [
        {
            "url": "pods://:8000/pdproxy.dev/runtime=d,leaderworkerset.sigs.k8s.io/worker-index=0",
            "role": "decode",
            "facts": {"tensor_parallel_size": 4},
            "labels": {"rack": "r1"},
        },
        {
            "url": "pods://:8000/pdproxy.dev/runtime=p",
            "role": "prefill",
            "facts": {"tensor_parallel_size": 1},
            "serves_whole": True,
            "labels": {"rack": "r2"},
        },
    ]
    assert made.checked.pools[0].pair_within == ("rack",)


@pytest.mark.parametrize(
    ("args", "facts"),
    [
        (["--max-num-seqs=64", "--max-num-batched-tokens", "2048"], (64, 2048)),
        (["--max-num-seqs", "64", "--max-num-seqs=128"], (128, None)),
        (["--max-num-batched-tokens=2k", "--max-num-seqs"], (None, None)),
        (["--max-num-seqs-else=3", "5"], (None, None)),
    ],
)
def test_flags_of_engines_are_facts_in_the_settings(
    args: list[str], facts: tuple[int | None, int | None]
) -> None:
    made = settings(runtime("p", "prefill", args=args), runtime("d", "decode"))
    node = made.checked.pools[0].nodes[-1]
    assert (node.facts.max_num_seqs, node.facts.max_num_batched_tokens) == facts


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"config": {"deadlines": {"drian": 5}}},
            "the settings are refused: deadlines.drian: unknown key (did you mean drain?)",
        ),
        ({"config": {"deadlines": {"drain": -5}}}, "the settings are refused: deadlines.drain: "),
        ({"config": {"dns": {"min_ttl": 90}}}, "dns.min_ttl"),
        ({"config": {"pools": ["x"]}}, "refused: pools[1]: expected a mapping"),
        ({"config": {"pools": [{"name": ["x"]}]}}, ".name: expected text that isn't empty"),
        ({"config": {"pools": 5}}, "refused: pools: expected a list"),
        ({"config": {"auth": 5, "kubernetes": 5, "replicas": 5}}, "auth: expected a mapping"),
        (
            {"config": {"pools": [{"name": "Qwen-Qwen3-0.6B-nixl", "profile": "h200-9b"}]}},
            "the settings are refused: pools[Qwen-Qwen3-0.6B-nixl].profile: ",
        ),
        ({"config": {"pools": {"nodes": []}}}, "the settings are refused: pools: "),
        (
            {"config": {"pools": [{"name": "x", "nodes": "y"}]}},
            "the settings are refused: pools[x].nodes: ",
        ),
        ({"config": {"listen": "here"}}, "the settings are refused: listen: "),
        ({"config": {"listen": {"uds": "/run/x"}}}, "nobody outside of the pod reaches a Unix"),
        ({"config": {"listen": {"tls": {"client_ca": "/ca"}}}}, "listen.tls"),
        (
            {
                "config": {
                    "pools": [{"name": "x", "nodes": [{"url": "pods://a:80/b", "role": "any"}]}]
                }
            },
            "pool x: pods://a:80/b: the operator gives rights for the pods of its own namespace",
        ),
        (
            {
                "config": {
                    "pools": [{"name": "x", "nodes": [{"url": "inferencepool://a", "role": "any"}]}]
                }
            },
            "pool x: inferencepool://a: the operator gives rights for the pods of its own",
        ),
        (
            {"runtimeSelector": {"matchLabels": {"model": "other"}}},
            "no engines: no PDRuntime has the labels of runtimeSelector",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_proxies_would_refuse_is_refused_in_a_sentence(
    more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        settings(**more)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_nested_too_deeply_is_refused() -> None:
    config: dict[str, Any] = {}
    for _ in range(sys.getrecursionlimit()):  # the API server takes more
        config = {"a": config}
    front = proxy()
    front = replace(front, spec=replace(front.spec, config=config))
    with pytest.raises(ConfigError, match="config: nested too deeply"):
        proxy_settings(front, selected_pools(front, [PREFILL, DECODE]), None)


def test_settings_of_any_size_are_not_checked() -> None:
    """It would hold up the operator for all other PDProxies."""
    nodes = [{"url": f"http://10.0.0.1:{port}", "role": "any"} for port in range(1, 3000)]
    with pytest.raises(ConfigError, match=r"^config has \d+ bytes as JSON: 65536 are the most$"):
        settings(config={"pools": [{"name": "more", "connector": "nixl", "nodes": nodes}]})


def test_one_role_alone_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        settings(PREFILL)
    assert "pools[Qwen-Qwen3-0.6B-nixl].nodes: prefill engines, but no decode" in str(error.value)


def test_models_that_would_be_one_pool_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        settings(PREFILL, DECODE, runtime("other", "any", model={"name": "Qwen-Qwen3-0.6B"}))
    assert "the models Qwen-Qwen3-0.6B and Qwen/Qwen3-0.6B would have one name" in str(error.value)


def test_a_value_that_looks_like_a_pool_is_none() -> None:
    with pytest.raises(ConfigError, match=r"pools\[77\]"):
        settings(config={"deadlines": {"pools[77]": 5}})


def test_custom_engines_need_the_name_of_a_connector() -> None:
    flag = '--kv-transfer-config={"kv_connector":"X"}'
    custom = [runtime(one, one, connector="custom", args=[flag]) for one in ("prefill", "decode")]
    with pytest.raises(ConfigError) as error:
        settings(*custom)
    assert (
        f"config.pools by which connector the proxies ask for KV, such as [{{name: {CUSTOM}"
        in str(error.value)
    )
    made = settings(*custom, config={"pools": [{"name": CUSTOM, "connector": "lmcache-mp"}]})
    assert made.checked.pools[0].connector == "lmcache-mp"


def test_files_of_the_operators_pod_are_not_read(tmp_path: Path) -> None:
    """Whoever may write a PDProxy need not be one who may read them."""
    secret = tmp_path / "token"
    secret.write_text("secret")
    config = {"auth": {"api_keys_file": str(secret)}}
    pool = {"name": "Qwen-Qwen3-0.6B-nixl", "profile": str(secret), "policy": "auto"}
    made = settings(config={**config, "pools": [pool]})
    assert made.content["pools"][0]["profile"] == str(secret)


def test_secrets_are_not_in_what_is_said() -> None:
    with pytest.raises(ConfigError) as error:
        settings(config={"auth": {"api_keys": "sk-secret"}})
    assert "sk-secret" not in str(error.value)
