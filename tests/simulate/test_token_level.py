"""The fast engines do what the token-level simulator does, step by step."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.bench.trace import TraceEntry, spread
from pdproxy_lab.simulate.cluster import Call, Cluster
from pdproxy_lab.simulate.load import TraceReplay
from pdproxy_lab.simulate.shape import Fleet, Shape
from tests.simulate.loads import H200, cluster, conversations, copies, drawn
from tests.simulate.token_level import TokenLevel

SEEDS = st.integers(0, 2**32)


def compared(
    fleet: Fleet, shape: Shape, calls: list[Call], hardware: Hardware = H200
) -> tuple[Cluster, TokenLevel]:
    fast, slow = cluster(fleet, shape, hardware), TokenLevel(fleet, hardware, shape)
    fast.run(copies(calls))
    slow.run(copies(calls))
    return fast, slow


def assert_equal(fast: Cluster, slow: TokenLevel) -> None:
    for name in ("first", "last", "worst_gap"):
        ours, theirs = list(getattr(fast.records, name)), list(getattr(slow.records, name))
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6), name
    assert fast.itl.total == len(slow.gaps)


@settings(max_examples=40, deadline=None)
@given(
    seed=SEEDS,
    chunk=st.sampled_from((32, 64, 256, 2048)),
    seqs=st.sampled_from((2, 7, 64)),
    rate=st.sampled_from((2.0, 20.0, 200.0)),
    cached=st.booleans(),
)
def test_one_engine_does_the_same_steps(
    seed: int, chunk: int, seqs: int, rate: float, cached: bool
) -> None:
    shape = Shape(
        max_num_batched_tokens=chunk,
        max_num_seqs=seqs,
        kv_tokens=16_000,
        unit_tokens=16,
        enable_prefix_caching=cached,
    )
    assert_equal(*compared(Fleet(aggregated=1), shape, drawn(seed, 25, rate, 300, 16)))


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, blocks=st.integers(32, 60), chunk=st.sampled_from((32, 256, 2048)))
def test_one_engine_preempts_the_same_requests(seed: int, blocks: int, chunk: int) -> None:
    shape = Shape(
        max_num_batched_tokens=chunk,
        kv_tokens=blocks * 16,
        unit_tokens=16,
        enable_prefix_caching=False,
    )
    fast, slow = compared(Fleet(aggregated=1), shape, drawn(seed, 20, 50.0, 300, 16))
    assert_equal(fast, slow)
    (theirs,), (ours,) = slow.engines.values(), fast.engines.values()
    assert ours.preemptions == theirs.stats.preemptions


@settings(max_examples=40, deadline=None)
@given(
    seed=SEEDS,
    prefill=st.integers(1, 3),
    decode=st.integers(1, 3),
    rate=st.sampled_from((2.0, 20.0, 100.0)),
    cached=st.booleans(),
    per_token=st.sampled_from((0.0, 50e-6)),
)
def test_a_split_fleet_does_the_same_steps(
    seed: int, prefill: int, decode: int, rate: float, cached: bool, per_token: float
) -> None:
    shape = Shape(
        max_num_batched_tokens=512, kv_tokens=64_000, unit_tokens=16, enable_prefix_caching=cached
    )
    fleet, hardware = (
        Fleet(prefill=prefill, decode=decode),
        structs.replace(H200, pull_token_s=per_token),
    )
    assert_equal(*compared(fleet, shape, drawn(seed, 25, rate, 600, 16), hardware))


@pytest.mark.parametrize(
    "fleet", [Fleet(aggregated=2), Fleet(prefill=2, decode=1)], ids=["plain", "split"]
)
def test_a_slice_of_a_trace_agrees_with_blocks_of_16_tokens(fleet: Fleet) -> None:
    lines = conversations(3, 40)
    entries = [
        TraceEntry(
            one["timestamp"] / 1000,
            one["input_length"],
            one["output_length"],
            tuple(one["hash_ids"]),
        )
        for one in lines
    ]
    shape = Shape(max_num_batched_tokens=2048, kv_tokens=200_000)
    calls = list(TraceReplay(entries=spread(entries), scale=1.5).calls(0))
    fast, slow = compared(fleet, shape, calls)
    for name in ("ttft", "tpot"):
        assert times(fast.records, name) == pytest.approx(times(slow.records, name), rel=0.1), name


def times(records, name: str) -> float:
    both = zip(records.due, records.first, records.last, records.output, strict=True)
    if name == "ttft":
        return median(first - due for due, first, _, _ in both)
    return median((last - first) / (tokens - 1) for _, first, last, tokens in both if tokens > 1)
