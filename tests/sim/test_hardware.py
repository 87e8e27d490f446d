"""The formula of an engine's times: its defaults change nothing, each term adds what it says, and
more work never takes less.
"""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.engine_model.hardware import Hardware, attended

TOKENS = st.integers(0, 100_000)
SEQUENCES = st.integers(0, 1024)
SECONDS = st.floats(0, 1, allow_subnormal=False)
H200 = Hardware(
    prefill_tokens_per_s=1 / 21e-6,
    chunk_base_s=0.0021,
    decode_step_s=0.004_327,
    decode_step_per_seq_s=27e-6,
    weights_read_once=True,
    context_token_s=33.6e-9,
    attention_s=0.97e-9,
    prompt_begin_s=0.0033,
    pull_s=0.0098,
    further_pull_s=0.0163,
    link_bytes_per_s=131_072 / 2.98e-6,
    transfer_latency_s=0.0035,
)


@given(
    st.builds(
        Hardware,
        speed=st.just(0.0) | st.floats(1e-6, 100),
        prefill_tokens_per_s=st.floats(1, 1e6),
        decode_step_s=SECONDS,
        decode_step_per_seq_s=SECONDS,
        kv_bytes_per_token=st.integers(0, 10**7),
        link_bytes_per_s=st.floats(1, 1e12),
        transfer_latency_s=SECONDS,
    ),
    TOKENS,
    SEQUENCES,
    st.integers(0, 10**9),
    st.floats(0, 1e12),
    st.integers(0, 100),
    TOKENS,
)
def test_without_the_further_terms_times_are_those_of_the_first_formula(
    hardware, prefill, decoding, context, attention, pulls, pulled
):
    def step_s():
        if not hardware.speed:
            return 0.0
        taken = prefill / hardware.prefill_tokens_per_s
        if decoding:
            taken += hardware.decode_step_s + (decoding - 1) * hardware.decode_step_per_seq_s
        return taken / hardware.speed

    def transfer_s():
        if not hardware.speed:
            return 0.0
        moving = prefill * hardware.kv_bytes_per_token / hardware.link_bytes_per_s
        return (hardware.transfer_latency_s + moving) / hardware.speed

    assert (
        hardware.step_s(prefill, decoding, context, attention, pulls, pulled_tokens=pulled)
        == step_s()
    )
    assert hardware.step_s(prefill, decoding) == step_s()
    assert hardware.transfer_s(prefill) == transfer_s()
    assert (hardware.before_engine_s, hardware.between_engines_s, hardware.to_client_s) == (0, 0, 0)


@given(
    TOKENS,
    SEQUENCES,
    st.integers(0, 10**7),
    st.floats(0, 1e9),
    st.integers(0, 10),
    st.integers(0, 10),
    TOKENS,
)
def test_all_terms_are_those_of_the_measured_engine(
    prefill, decoding, context, attention, pulls, begun, pulled
):
    weights = 0.0043 if prefill or decoding else 0.0
    expected = max(weights, 0.0021 + 21e-6 * prefill) if prefill else weights
    expected += 27e-6 * decoding + 33.6e-9 * context + 0.97e-9 * attention
    expected += 0.0098 + 0.0163 * (pulls - 1) if pulls else 0.0
    expected += 0.0033 * begun
    work = (prefill, decoding, context, attention, pulls, begun)
    assert H200.step_s(*work) == pytest.approx(expected)
    # Without the term for it, it does not matter how many tokens are pulled: to the last bit.
    assert H200.step_s(*work, pulled) == H200.step_s(*work)
    by_token = msgspec.structs.replace(H200, pull_token_s=3e-6)
    expected += 3e-6 * pulled if pulls else 0.0
    assert by_token.step_s(*work, pulled) == pytest.approx(expected)


WORK = st.tuples(
    TOKENS,
    SEQUENCES,
    st.integers(0, 10**7),
    st.floats(0, 1e9),
    st.integers(0, 10),
    st.integers(0, 10),
    TOKENS,
)


@given(
    st.sampled_from([Hardware(), H200, msgspec.structs.replace(H200, pull_token_s=3e-6)]),
    WORK,
    WORK,
)
def test_more_work_never_takes_less_time(hardware, work, more):
    total = [a + b for a, b in zip(work, more, strict=True)]
    assert hardware.step_s(*total) >= hardware.step_s(*work) >= 0
    assert hardware.transfer_s(work[0] + more[0]) >= hardware.transfer_s(work[0])


@given(st.floats(0.1, 100), TOKENS, SEQUENCES)
def test_all_times_are_divided_by_the_speed(speed, prefill, decoding):
    overheads = {
        "request_overhead_s": 0.03,
        "handoff_overhead_s": 0.005,
        "response_overhead_s": 0.004,
    }
    usual = msgspec.structs.replace(H200, pull_token_s=3e-6, **overheads)
    fast = msgspec.structs.replace(usual, speed=speed)
    work = (prefill, decoding, 1000, 1e6, 2, 1, 5000)
    assert fast.step_s(*work) * speed == pytest.approx(usual.step_s(*work))
    assert fast.transfer_s(prefill) * speed == pytest.approx(usual.transfer_s(prefill))
    assert fast.before_engine_s * speed == pytest.approx(0.03)
    assert fast.between_engines_s * speed == pytest.approx(0.005)
    assert fast.to_client_s * speed == pytest.approx(0.004)
    assert msgspec.structs.replace(usual, speed=0).to_client_s == 0


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(1, 5000))
def test_a_prompt_in_two_chunks_compares_as_many_tokens_as_in_one(tokens, before, further):
    assert attended(tokens, before) + attended(further, before + tokens) == attended(
        tokens + further, before
    )


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in Hardware.__struct_fields__
        if not isinstance(getattr(Hardware(), name), bool)
    ],
)
@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf")])
def test_hardware_that_makes_no_sense_is_refused_by_name(name, wrong):
    with pytest.raises(ValueError, match=name):
        Hardware(**{name: wrong})


@pytest.mark.parametrize("name", ["prefill_tokens_per_s", "link_bytes_per_s"])
def test_a_rate_of_0_is_refused(name):
    with pytest.raises(ValueError, match=name):
        msgspec.convert({name: 0}, Hardware)
