"""The simulated core schedules, caches and samples as vLLM does: tokens depend on prompt and
weights alone, time on the work.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.tokenizer import EOS
from tests.sim.engines import OTHER, PROMPT, Engines, plain

SMALL: dict[str, Any] = {"num_gpu_blocks": 20, "max_model_len": 256, "block_size": 16}


def test_two_engines_of_one_model_say_the_same():
    assert plain() == plain(num_gpu_blocks=600, enable_prefix_caching=False)


def test_another_model_and_other_weights_say_something_else():
    assert len({tuple(plain()), tuple(plain(model="other")), tuple(plain(weights=1))}) == 3


@given(st.lists(st.integers(300, 900), min_size=1, max_size=70), st.data())
@settings(max_examples=40, deadline=None)
def test_each_token_of_the_prompt_matters(prompt, data):
    place = data.draw(st.integers(0, len(prompt) - 1))
    changed = list(prompt)
    changed[place] += 1
    assert plain(tuple(prompt)) != plain(tuple(changed))


@given(st.integers(1, 200), st.integers(1, 64), st.integers(1, 32))
@settings(max_examples=40, deadline=None)
def test_chunks_and_block_sizes_change_no_token(length, budget, block_size):
    prompt = tuple(range(300, 300 + length))
    facts = {
        "max_num_batched_tokens": budget,
        "block_size": block_size,
        "max_model_len": 500,
        "hardware": Hardware(speed=0),
    }
    assert plain(prompt, **facts) == plain(prompt)


def test_a_cached_prefix_changes_no_token_and_is_counted():
    engines = Engines()
    engine = engines.add(SimFacts())
    first = engines.answer(engine)
    second = engines.answer(engine)
    assert first.tokens == second.tokens
    assert first.outputs[-1].num_cached_tokens == 0
    assert second.outputs[-1].num_cached_tokens == 96
    assert engine.stats.prefix_cache_hits == 96
    assert dict(engine.stats.prompt_tokens_by_source) == {
        "external_kv_transfer": 0,
        "local_cache_hit": 96,
        "local_compute": 104,
    }


def test_a_whole_cached_prompt_still_computes_its_last_block():
    engines = Engines()
    engine = engines.add(SimFacts())
    prompt = PROMPT[:96]
    assert engines.answer(engine, prompt).tokens == engines.answer(engine, prompt).tokens
    assert engine.stats.prefix_cache_hits == 80


def test_a_cache_salt_keeps_prefixes_apart():
    engines = Engines()
    engine = engines.add(SimFacts())
    engines.answer(engine, cache_salt="a")
    engines.answer(engine, cache_salt="b")
    assert engine.stats.prefix_cache_hits == 0


def test_requests_run_together_and_say_what_they_say_alone():
    engines = Engines()
    engine = engines.add(SimFacts())
    runs = [
        engines.ask(engine, tuple(range(300 + number, 380 + number)), 20) for number in range(20)
    ]
    engines.run()
    assert [run.tokens for run in runs] == [
        plain(tuple(range(300 + n, 380 + n)), 20) for n in range(20)
    ]
    assert engine.core.pool.usage == 0


def test_out_of_blocks_the_youngest_is_preempted_and_loses_no_token():
    engines = Engines()
    engine = engines.add(SimFacts(**SMALL, enable_prefix_caching=False))
    runs = [
        engines.ask(engine, tuple(range(300 + number, 350 + number)), 60) for number in range(5)
    ]
    engines.run()
    assert engine.stats.preemptions > 0
    assert max(pace(engines, runs[0])) < 0.02, "the oldest is never thrown out"
    assert [run.tokens for run in runs] == [
        plain(tuple(range(300 + n, 350 + n)), 60) for n in range(5)
    ]
    assert engine.core.pool.usage == 0


def test_a_prompt_begins_only_if_all_of_it_fits():
    """vLLM's `scheduler_reserve_full_isl`: two prompts that are cut never take each other's
    blocks.
    """
    engines = Engines()
    engine = engines.add(SimFacts(**SMALL, max_num_batched_tokens=32, enable_prefix_caching=False))
    # 13 of 19 blocks each
    first, second = (engines.ask(engine, tuple(range(300 + n, 500 + n)), 2) for n in range(2))
    engines.run()
    assert engine.stats.preemptions == 0
    assert first.times[-1] < second.times[0]
    assert [run.tokens for run in (first, second)] == [
        plain(tuple(range(300 + n, 500 + n)), 2) for n in range(2)
    ]


def test_no_more_requests_run_than_allowed():
    engines = Engines()
    engine = engines.add(SimFacts(max_num_seqs=2))
    runs = [engines.ask(engine, max_tokens=5) for _ in range(4)]
    # the others came during the first step
    assert (engine.stats.running, engine.stats.waiting) == (1, 3)
    engines.run()
    assert all(run.over == "length" for run in runs)
    assert runs[0].times[-1] < runs[2].times[0]


def test_lower_priority_numbers_go_first():
    engines = Engines()
    engine = engines.add(SimFacts(max_num_seqs=1))
    engines.ask(engine)
    late, early = engines.ask(engine, priority=5), engines.ask(engine, OTHER, priority=-1)
    engines.run()
    assert early.times[-1] < late.times[0]


def test_the_end_token_stops_unless_it_is_ignored():
    stopped = next(
        (prompt, run)
        for start in range(300, 500)
        if (run := plain_run(prompt := tuple(range(start, start + 40)), 400)).over == "stop"
    )
    prompt, run = stopped
    assert run.tokens[-1] == EOS
    assert EOS not in run.tokens[:-1]
    assert run.outputs[-1].stop_reason is None
    more = plain(prompt, len(run.tokens) + 3)
    assert more[: len(run.tokens)] == run.tokens
    assert len(more) == len(run.tokens) + 3


def plain_run(prompt, max_tokens, **sampling):
    engines = Engines()
    run = engines.ask(engines.add(SimFacts()), prompt, max_tokens, ignore_eos=False, **sampling)
    engines.run()
    return run


def test_a_stop_token_stops_and_is_told():
    third = plain()[2]
    run = plain_run(PROMPT, 8, stop_token_ids=frozenset({third}))
    assert (run.tokens, run.over, run.outputs[-1].stop_reason) == (plain()[:3], "stop", third)


def test_min_tokens_keep_the_end_away():
    third = plain()[2]
    run = plain_run(PROMPT, 8, stop_token_ids=frozenset({third}), min_tokens=5)
    assert len(run.tokens) >= 5
    assert third not in run.tokens[:4]


def test_the_context_length_ends_a_request():
    engines = Engines()
    engine = engines.add(SimFacts(max_model_len=110))
    run = engines.answer(engine, PROMPT, 50)
    assert (len(run.tokens), run.over) == (10, "length")


def test_a_seed_repeats_and_no_seed_does_not():
    engines = Engines()
    engine = engines.add(SimFacts())
    texts = [
        tuple(engines.answer(engine, temperature=1.0, seed=seed).tokens)
        for seed in (1, 1, 2, None, None)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 4


def test_log_probabilities_are_ordered_and_hold_the_chosen_token():
    engines = Engines()
    run = engines.answer(engines.add(SimFacts()), logprobs=3, prompt_logprobs=2)
    assert run.tokens == plain()
    for output in run.outputs:
        (token,) = output.tokens
        assert [c.rank for c in token.top] == [1, 2, 3]
        assert sorted((c.logprob for c in token.top), reverse=True) == [
            c.logprob for c in token.top
        ]
        assert (token.top[0].token, token.top[0].logprob) == (token.id, token.logprob)
    prompt = run.outputs[0].prompt_logprobs
    assert prompt is not None
    assert [entry and entry[0].token for entry in prompt] == [None, *PROMPT[1:]]
    assert run.outputs[1].prompt_logprobs is None


def test_bias_bad_words_and_penalties_steer():
    first, second, *_ = plain()
    engines = Engines()
    engine = engines.add(SimFacts())
    assert engines.answer(engine, logit_bias={first: -100}).tokens[0] != first
    assert engines.answer(engine, logit_bias={777: 100}).tokens == [777] * 8
    assert engines.answer(engine, bad_words=((first, second),)).tokens[1] != second
    tokens = engines.answer(engine, max_tokens=300, frequency_penalty=1.0).tokens
    words = [token for token in tokens if token >= 264]
    assert len(words) == len(set(words))


def test_an_abort_frees_everything_at_any_time():
    for moment in (0.0, 0.001, 0.003, 0.02):
        engines = Engines()
        engine = engines.add(SimFacts(max_num_batched_tokens=10))
        run = engines.ask(engine, max_tokens=1000, id="x")
        engines.run(moment)
        engines.abort(engine, "x")
        seen = len(run.outputs)
        engines.run()
        assert len(run.outputs) == seen
        assert (engine.core.pool.usage, engine.stats.running, engine.stats.waiting) == (0, 0, 0)


# -- time


def pace(engines, run):
    return [later - earlier for earlier, later in zip(run.times, run.times[1:], strict=False)]


def test_decoding_is_slowed_by_the_batch_and_by_prefill_that_runs_along():
    engines = Engines()
    engine = engines.add(
        SimFacts(hardware=Hardware(decode_step_s=0.01, decode_step_per_seq_s=0.001))
    )
    run = engines.ask(engine, max_tokens=30)
    engines.run(0.055)
    others = [engines.ask(engine, tuple(range(400 + n, 450 + n)), 30) for n in range(9)]
    engines.run(0.15)
    engines.ask(engine, tuple(range(500, 700)) * 10, 1)
    engines.run()
    gaps = pace(engines, run)
    assert gaps[0] == pytest.approx(0.01)
    assert gaps[10] == pytest.approx(0.01 + 9 * 0.001)
    assert max(gaps[10:]) == pytest.approx(0.01 + 9 * 0.001 + 2000 / 40_000)
    assert all(other.over == "length" for other in others)


def test_speed_scales_time_and_zero_takes_none():
    times = {}
    for speed in (1.0, 10.0, 0.0):
        engines = Engines()
        times[speed] = engines.ask(
            engines.add(SimFacts(hardware=Hardware(speed=speed))), max_tokens=20
        ).times
        engines.run()
    assert times[10.0] == pytest.approx([time / 10 for time in times[1.0]])
    assert times[0.0] == [0.0] * 20


def test_equal_inputs_give_equal_runs():
    def run():
        engines = Engines(chance=3)
        engine = engines.add(SimFacts(**SMALL))
        runs = [
            engines.ask(engine, tuple(range(300 + n, 340 + n)), 40, temperature=1.0)
            for n in range(8)
        ]
        engines.run()
        return [(one.tokens, one.times) for one in runs]

    assert run() == run()


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"block_size": 0}, "block_size"),
        ({"num_gpu_blocks": 10}, "num_gpu_blocks"),
        ({"model": ""}, "model"),
        ({"kv_lease_duration": 0}, "kv_lease_duration"),
    ],
)
def test_facts_that_make_no_sense_are_refused_by_name(wrong, word):
    with pytest.raises(ValueError, match=word):
        SimFacts(**wrong)
