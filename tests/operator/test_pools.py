"""Which runtimes are replaced together, and what makes another revision."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pdproxy_operator.pools import pools_of, revision_of, selected_pools
from tests.operator.resources import proxy, runtime

PREFILL, DECODE = runtime("p", "prefill"), runtime("d", "decode", args=["--max-num-seqs=256"])

KEEPS: dict[str, list[Any]] = {
    "replicas": [0, 7],
    "resources": [{"requests": {"cpu": "4"}}, {"limits": {"rdma/hca": "1"}}],
    "labels": [{"rack": "r1"}],
    "drain": [{"seconds": 5}],
    "terminationGracePeriodSeconds": [900],
    "startSeconds": [60],
    "env": [[{"name": "A", "value": "b"}]],
    "template": [{"metadata": {"annotations": {"a": "b"}}}],
    "servesWhole": [True],
    "args": [["--max-num-seqs=8"], ["--max-num-seqs", "8", "--max-model-len=4096"]],
}
CHANGES: dict[str, list[Any]] = {
    "image": ["vllm/vllm-openai:v0.33.0"],
    "model": [{"name": "Qwen/Qwen3-8B"}],
    "args": [
        ["--dtype=bfloat16"],
        ["--max-num-seqs=256", "--block-size", "64"],
        ["--kv-cache-dtype=fp8", "--max-num-seqs=256"],
        ["--a-flag-of-the-next-release"],
    ],
    "tensorParallelSize": [2],
    "dataParallelSize": [2],
    "groupSize": [2],
    "connector": ["nixl-push", "mooncake"],
    "kvTransferConfig": [{"kv_load_failure_policy": "recompute"}],
    "simulated": [True],
}


def one_of(choices: dict[str, list[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(values) for name, values in choices.items()}
    )


@given(kept=one_of(KEEPS))
def test_what_changes_no_kv_keeps_the_revision(kept: dict[str, Any]) -> None:
    decode = runtime("d", "decode", **{"args": ["--max-num-seqs=256"], **kept})
    assert revision_of([PREFILL, decode]) == revision_of([PREFILL, DECODE])


@given(
    kept=one_of(KEEPS),
    changed=st.sampled_from([(name, value) for name, all_ in CHANGES.items() for value in all_]),
)
def test_what_may_change_kv_makes_another(kept: dict[str, Any], changed: tuple[str, Any]) -> None:
    decode = runtime(
        "d", "decode", **{"args": ["--max-num-seqs=256"], **kept, changed[0]: changed[1]}
    )
    assert revision_of([PREFILL, decode]) != revision_of([PREFILL, DECODE])


@given(st.permutations([PREFILL, DECODE, runtime("d2", "decode"), runtime("plain", "aggregated")]))
def test_a_revision_is_the_same_in_each_order_and_everywhere(runtimes: list[Any]) -> None:
    """Engines of a pool that is not changed must never be replaced, whatever operator runs."""
    assert revision_of(runtimes) == "0b2ff76dd7"


def test_plain_engines_and_equal_ones_have_no_part_in_it() -> None:
    more = [runtime("plain", "aggregated", image="other"), runtime("d2", "decode")]
    assert revision_of([PREFILL, DECODE, *more]) == revision_of([PREFILL, DECODE])


def test_a_runtime_is_replaced_in_the_pool_of_the_first_proxy_that_selects_it() -> None:
    other = runtime("o", "decode", own_labels={"model": "other"})
    alone = [runtime(name, "any", own_labels={"model": "none"}) for name in ("x", "y")]
    second = proxy("second", runtimeSelector={"matchLabels": {}})
    first = proxy("first")
    every = [DECODE, other, PREFILL, *alone]
    found = [
        (one and one.metadata.name, [it.metadata.name for it in pool.runtimes])
        for one, pool in pools_of([second, first], every)
    ]
    assert found == [("first", ["d", "p"]), ("second", ["o", "x", "y"])]
    (pool,) = selected_pools(second, every)
    assert [it.metadata.name for it in pool.runtimes] == ["d", "o", "p", "x", "y"]
    found = [
        (one and one.metadata.name, [it.metadata.name for it in pool.runtimes])
        for one, pool in pools_of([first], every)
    ]
    assert found == [("first", ["d", "p"]), (None, ["o"]), (None, ["x"]), (None, ["y"])]


def test_a_proxy_that_comes_or_goes_replaces_no_engine() -> None:
    def revisions(*proxies: Any) -> dict[str, str]:
        pools = [pool for _, pool in pools_of(proxies, [PREFILL, DECODE])]
        return {one.metadata.name: pool.revision for pool in pools for one in pool.runtimes}

    assert revisions() == revisions(proxy())


def test_models_and_connectors_have_pools_of_their_own() -> None:
    big = runtime("big", "any", model={"name": "big", "served": "large"})
    push = runtime("push", "any", connector="nixl-push")
    pools = [pool for _, pool in pools_of([proxy()], [push, big, PREFILL, DECODE])]
    assert [(pool.name, pool.model, pool.connector) for pool in pools] == [
        ("Qwen-Qwen3-0.6B-nixl", "Qwen/Qwen3-0.6B", "nixl"),
        ("Qwen-Qwen3-0.6B-nixl-push", "Qwen/Qwen3-0.6B", "nixl-push"),
        ("big-nixl", "big", "nixl"),
    ]
    assert len({pool.revision for pool in pools}) == 3
