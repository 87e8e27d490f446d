"""P2P NCCL as vLLM does it: who waits for ever, what kills, and what stays behind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.virtual_link import HOST
from tests.sim.engines import OTHER, PROMPT, Engines, plain


def facts(role, **more):
    return SimFacts(
        **{
            "role": role,
            "connector": "p2p-nccl",
            "randomize_request_ids": False,
            "max_model_len": 500,
            **more,
        }
    )


def name(uid="0", p=1, d=2, suffix="-aaaaaaaa"):
    return f"cmpl-___prefill_addr_{HOST}:{p}___decode_addr_{HOST}:{d}_{uid}-0{suffix}"


def held(engine):
    return engine.core.connector.leases(0.0)


@given(st.integers(1, 70), st.sampled_from([1, 5, 16, 32]), st.sampled_from([8, 8192]))
@settings(max_examples=60, deadline=None)
def test_split_says_what_one_engine_says(length, block_size, budget):
    prompt = tuple(range(300, 300 + length))
    engines = Engines()
    p, d = (
        engines.add(facts(r, block_size=block_size, max_num_batched_tokens=budget))
        for r in ("prefill", "decode")
    )
    first = engines.answer(p, prompt, 1, id=name())
    assert first.outputs[-1].kv_transfer_params is None
    run = engines.answer(d, prompt, 8, id=name(suffix="-bbbbbbbb"))
    assert run.tokens == plain(prompt)
    assert d.stats.prompt_tokens_by_source["external_kv_transfer"] == length - 1
    assert (p.core.pool.usage, d.core.pool.usage, held(d)) == (0, 0, {})


def test_ids_with_random_suffixes_make_d_wait_for_ever(engines):
    p, d = (engines.add(facts(role, randomize_request_ids=True)) for role in ("prefill", "decode"))
    assert engines.answer(p, PROMPT, 1, id=name()).over == "length"
    stuck = engines.answer(d, id=name(suffix="-bbbbbbbb"))
    other = engines.answer(d, OTHER[:1], id="cmpl-other")
    assert (stuck.over, other.over, d.dead) == (None, None, False)
    assert list(held(d)) == [name()]


def test_d_s_whole_engine_waits_for_kv_that_comes_later(engines, p, d):
    stuck = engines.ask(d, PROMPT, 8, id=name())
    other = engines.ask(d, OTHER[:1], 3, id="cmpl-other")
    engines.run(engines.now + 100)
    assert (stuck.over, other.over) == (None, None)
    engines.answer(p, PROMPT, 1, id=name())
    engines.run(engines.now + 1)
    assert (stuck.over, other.over) == ("length", "length")
    assert stuck.tokens == plain(PROMPT)


def test_an_abort_does_not_end_that_wait(engines, p, d):
    engines.ask(d, PROMPT, 8, id=name())
    engines.run(engines.now + 1)
    engines.abort(d, name())
    other = engines.answer(d, OTHER[:1], 3, id="cmpl-other")
    assert other.over is None


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_p_dies_of_an_id_without_engines_and_of_a_second_token(engines, p, d, max_tokens):
    run = engines.answer(p, PROMPT, max_tokens, id=name() if max_tokens == 2 else "cmpl-mine")
    assert (run.over, p.dead) == ("error", True)


def test_d_dies_of_an_id_without_engines(engines, p, d):
    assert engines.answer(d, OTHER[:1], 3, id="cmpl-mine").over == "length"
    assert engines.answer(d, PROMPT, 3, id="cmpl-mine").over == "error"
    assert d.dead


def test_p_waits_for_ever_for_a_d_that_is_gone(engines, p, d):
    d.dead = True
    run = engines.answer(p, PROMPT, 1, id=name())
    assert engines.answer(p, OTHER, 1, id=name("1")).over is None
    assert (run.over, p.dead) == (None, False)


def test_kv_of_a_request_that_never_came_stays_until_one_with_its_id_ends(engines, p, d):
    engines.answer(p, PROMPT, 1, id=name())
    assert len(held(d)) == 1
    engines.answer(d, OTHER[:1], 1, id=name("another"))
    assert len(held(d)) == 1
    assert engines.answer(d, OTHER[:1], 1, id=name(suffix="-cccccccc")).over == "length"
    assert held(d) == {}


def test_a_longer_prompt_s_kv_kills_d(engines, p, d):
    engines.answer(p, PROMPT, 1, id=name())
    assert engines.answer(d, PROMPT[:20], 3, id=name()).over == "error"
    assert d.dead
