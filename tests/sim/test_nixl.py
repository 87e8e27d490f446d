"""What real engines do with KV handles, each case of it, in virtual time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.sim.facts import KvEventsConfig, SimFacts
from pdproxy_lab.sim.kv_event_log import block_hash
from pdproxy_lab.sim.request import EngineDeadError
from tests.sim.engines import OTHER, PREFILL, PROMPT, Engines, external, plain


def facts(role):
    return SimFacts(role=role)


@given(st.integers(1, 70), st.sampled_from([1, 5, 16, 32]))
@settings(max_examples=60, deadline=None)
def test_split_says_what_one_engine_says(length, block_size):
    prompt = tuple(range(300, 300 + length))
    engines = Engines()
    p, d = (engines.add(SimFacts(block_size=block_size, max_model_len=500)) for _ in range(2))
    run = engines.answer(d, prompt, 8, engines.handle(p, prompt))
    assert run.tokens == plain(prompt)
    assert external(d) == length
    assert p.core.pool.usage == d.core.pool.usage == 0
    assert not p.core.nixl.held


def test_the_handle_is_the_recorded_one(engines, p):
    handle = engines.answer(p, PROMPT, 1, dict(PREFILL), id="cmpl-1-0-abcdef01").handle
    assert handle == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]],
        "remote_engine_id": "engine-0",
        "remote_request_id": "cmpl-1-0-abcdef01",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 100,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }


def test_what_decode_has_cached_is_not_pulled_again(engines, p, d):
    engines.answer(d)
    run = engines.answer(d, PROMPT, 8, engines.handle(p))
    assert run.tokens == plain()
    assert external(d) == 4
    assert not p.core.nixl.held


def test_usage_tells_what_prefill_had_cached(engines, p, d):
    engines.answer(p)
    run = engines.answer(d, PROMPT, 8, engines.handle(p))
    assert run.outputs[-1].num_cached_tokens == 96
    without = {
        k: v for k, v in engines.handle(p, OTHER).items() if k != "remote_prefill_cached_tokens"
    }
    assert engines.answer(d, OTHER, 8, without).outputs[-1].num_cached_tokens == 100


# -- answers that are wrong without an error


def test_another_prompt_of_the_same_blocks_gets_wrong_tokens(engines, p, d):
    run = engines.answer(d, OTHER, 8, engines.handle(p))
    assert run.over == "length"
    assert run.tokens != plain(OTHER)


def test_a_shorter_prompt_gets_wrong_tokens(engines, p, d):
    run = engines.answer(d, OTHER[:40], 8, engines.handle(p))
    assert run.over == "length"
    assert run.tokens != plain(OTHER[:40])


def test_the_right_tokens_behind_another_beginning_give_wrong_tokens(engines, p, d):
    """A page's KV depends on all that its writer had read before it, not on its own tokens
    alone.
    """
    begin, other, end = PROMPT[:16], OTHER[:16], PROMPT[16:48]
    right, wrong = engines.handle(p, begin + end), engines.handle(p, other + end)
    mixed = right["remote_block_ids"][0][:1] + wrong["remote_block_ids"][0][1:]
    run = engines.answer(d, begin + end, 8, right | {"remote_block_ids": [mixed]})
    assert run.over == "length"
    assert run.tokens != plain(begin + end)


def test_wrong_kv_poisons_the_prefix_cache(engines, p, d):
    engines.answer(d, OTHER, 8, engines.handle(p))
    assert engines.answer(d, OTHER).tokens != plain(OTHER)


def test_after_a_lease_that_was_ended_by_hand_the_blocks_still_serve(engines, p, d):
    handle = engines.handle(p)
    assert p.core.nixl.end_leases(engines.now) == 1
    assert p.stats.kv_expired == 1
    assert engines.answer(d, PROMPT, 8, handle).tokens == plain()


def test_after_the_lease_the_blocks_are_reused_and_give_wrong_tokens(engines, p, d):
    handle = engines.handle(p)
    engines.run(engines.now + 31)
    assert p.stats.kv_expired == 1
    run = engines.answer(d, PROMPT, 8, handle)
    assert run.over == "length"
    assert run.tokens != plain()


@pytest.mark.parametrize("caches", [True, False])
def test_a_handle_used_twice_gives_wrong_tokens(engines, d, caches):
    p = engines.add(SimFacts(enable_prefix_caching=caches))
    second = engines.add(SimFacts())
    handle = engines.handle(p)
    assert engines.answer(d, PROMPT, 8, dict(handle)).tokens == plain()
    run = engines.answer(second, PROMPT, 8, handle)
    assert run.over == "length"
    assert run.tokens != plain()
    assert p.stats.late_notifications == 1


def test_a_prefix_that_others_still_used_gives_wrong_tokens_once_it_is_free(engines, d):
    p = engines.add(SimFacts())
    second = engines.add(SimFacts())
    handle, same = engines.handle(p), engines.handle(p)
    assert handle["remote_block_ids"][0][:6] == same["remote_block_ids"][0][:6]
    assert engines.answer(d, PROMPT, 8, dict(handle)).tokens == plain()
    prefix = handle | {"remote_block_ids": [handle["remote_block_ids"][0][:6]]}
    third, fourth = engines.add(SimFacts()), engines.add(SimFacts())
    assert engines.answer(third, PROMPT[:96], 8, dict(prefix)).tokens == plain(PROMPT[:96])
    assert engines.answer(second, PROMPT, 8, same).tokens == plain()
    assert engines.answer(fourth, PROMPT[:96], 8, prefix).tokens != plain(PROMPT[:96])


def test_freed_pages_stay_in_the_prefix_cache_under_other_ids(engines, p, d):
    handle = engines.handle(p)
    assert engines.answer(d, PROMPT, 8, dict(handle)).tokens == plain()
    again = engines.handle(p)
    assert again["remote_prefill_cached_tokens"] == 96
    assert not set(handle["remote_block_ids"][0][:6]) & set(again["remote_block_ids"][0][:6])
    assert engines.answer(engines.add(SimFacts()), PROMPT, 8, again).tokens == plain()


def test_kv_events_follow_freed_pages(engines, d):
    """What a subscriber believes is what the prefix cache has, whether pages moved or were
    dropped.
    """
    events = KvEventsConfig(enable_kv_cache_events=True, publisher="zmq")
    p = engines.add(SimFacts(num_gpu_blocks=24, max_model_len=112, kv_events=events))
    believed: set[int] = set()
    most = 0
    for number in range(12):
        prompt = tuple(range(300 + number % 5 * 10, 400 + number % 5 * 10))
        engines.answer(d, prompt, 1, engines.handle(p, prompt))
        for event in p.core.kv_events.take():
            assert event["type"] == "BlockStored" or believed.issuperset(event["block_hashes"])
            (believed.update if event["type"] == "BlockStored" else believed.difference_update)(
                event["block_hashes"]
            )
        assert believed == {block_hash(key) for key in p.core.pool._cached}
        most = max(most, len(believed))
    assert most > 12


def test_without_other_blocks_freed_pages_leave_the_prefix_cache(engines, d):
    p = engines.add(SimFacts(num_gpu_blocks=8, max_model_len=112))
    assert engines.answer(d, PROMPT, 8, engines.handle(p)).tokens == plain()
    assert p.core.pool.usage == 0
    assert engines.handle(p)["remote_prefill_cached_tokens"] == 0


def test_without_do_remote_prefill_decode_recomputes_and_says_nothing(engines, p, d):
    handle = engines.handle(p) | {"do_remote_prefill": False}
    run = engines.answer(d, PROMPT, 8, handle)
    assert run.tokens == plain()
    assert external(d) == 0
    assert d.stats.prompt_tokens_by_source["local_compute"] == 100
    assert p.core.nixl.held  # until the lease ends


def test_without_a_connector_decode_recomputes_and_prefill_gives_no_handle(engines, p):
    d = engines.add(SimFacts(connector="none"))
    assert engines.answer(d, PROMPT, 8, engines.handle(p)).tokens == plain()
    assert external(d) == 0
    assert engines.answer(d, PROMPT, 1, dict(PREFILL)).outputs[-1].kv_transfer_params is None


def test_hits_are_counted_when_scheduled_even_if_nothing_arrives(engines, p, d):
    handle = engines.handle(p) | {"remote_engine_id": "somebody else"}
    assert engines.answer(d, PROMPT, 8, handle).over == "error"
    assert d.stats.external_prefix_cache_hits == 100
    assert external(d) == 0


# -- what kills a core


def test_a_prompt_that_needs_more_blocks_than_the_handle_holds_kills_decode(engines, p, d):
    run = engines.answer(d, PROMPT + OTHER, 8, engines.handle(p))
    assert (d.dead, run.over) == (True, "error")
    with pytest.raises(EngineDeadError):
        engines.ask(d)


@pytest.mark.parametrize("blocks", [[], [[]], None])
def test_a_handle_without_blocks_kills_decode(engines, p, d, blocks):
    engines.answer(d, PROMPT, 8, engines.handle(p) | {"remote_block_ids": blocks})
    assert d.dead


@pytest.mark.parametrize(
    "key", ["remote_engine_id", "remote_request_id", "remote_host", "remote_port"]
)
def test_with_a_key_missing_the_request_hangs_and_its_abort_kills_decode(engines, p, d, key):
    handle = engines.handle(p)
    del handle[key]
    run = engines.ask(d, PROMPT, 8, handle, id="hangs")
    engines.run(engines.now + 1000)
    assert (run.outputs, d.dead) == ([], False)
    engines.abort(d, "hangs")
    assert d.dead


def test_rejecting_a_handle_with_a_key_missing_kills_decode(engines, p, d):
    handle = engines.handle(p)
    del handle["remote_host"]
    with pytest.raises(EngineDeadError):
        d.core.reject(handle)


# -- who holds P's blocks, and until when


def test_blocks_are_held_for_the_lease(engines, p):
    engines.handle(p)
    assert p.core.pool.usage > 0
    engines.run(29.9)
    assert p.core.nixl.held
    engines.run(31)
    assert (p.core.pool.usage, p.stats.kv_expired) == (0, 1)


def test_a_request_in_decodes_queue_keeps_the_lease_alive(engines, p):
    d = engines.add(
        SimFacts(max_num_seqs=1, hardware=Hardware(decode_step_s=0.2), enable_prefix_caching=False)
    )
    engines.answer(d, OTHER, 1, engines.handle(p, OTHER))  # they know each other
    long = engines.ask(d, OTHER, 500)
    engines.run(engines.now + 1)
    run = engines.ask(d, PROMPT, 8, engines.handle(p))
    engines.run(engines.now + 60)
    assert (long.over, run.over) == (None, None)
    assert p.stats.kv_expired == 0
    engines.run(engines.now + 60)
    assert run.tokens == plain()


def test_a_rejected_request_gives_the_blocks_back(engines, p, d):
    engines.answer(d, OTHER, 1, engines.handle(p, OTHER))
    d.core.reject(engines.handle(p))
    engines.ask(d)
    engines.run(engines.now + 0.1)
    assert not p.core.nixl.held


def test_between_strangers_a_release_waits_for_a_step_of_decode(engines, p, d):
    handle = engines.handle(p)
    d.core.reject(handle)
    engines._turn(d)
    engines.run(engines.now + 5)
    assert p.core.nixl.held
    engines.answer(d, OTHER)
    assert not p.core.nixl.held


def test_an_abort_in_the_queue_gives_the_blocks_back(engines, p):
    d = engines.add(SimFacts(max_num_seqs=1))
    engines.answer(d, OTHER, 1, engines.handle(p, OTHER))
    engines.ask(d, OTHER, 2000)
    engines.ask(d, PROMPT, 8, engines.handle(p), id="waits")
    engines.abort(d, "waits")
    engines.run(engines.now + 1)
    assert not p.core.nixl.held


def test_an_abort_during_a_pull_frees_blocks_when_the_pull_is_resolved(engines, p):
    d = engines.add(SimFacts(hardware=Hardware(transfer_latency_s=10)))
    engines.ask(d, PROMPT, 8, engines.handle(p), id="pulls")
    engines.run(engines.now + 1)
    engines.abort(d, "pulls")
    assert d.core.pool.usage > 0
    engines.run(engines.now + 15)
    assert d.core.pool.usage == 0
    assert not p.core.nixl.held


def test_an_aborted_prefill_leaves_nothing(engines, p):
    engines.ask(p, PROMPT * 20, 1, dict(PREFILL), id="x")
    engines.abort(p, "x")
    engines.run()
    assert (p.core.pool.usage, p.core.nixl.held) == (0, {})


def test_prefill_that_stops_by_itself_still_holds_its_blocks(engines, p):
    first = plain()[0]
    run = engines.answer(p, PROMPT, 1, dict(PREFILL), stop_token_ids=frozenset({first}))
    assert run.over == "stop"
    assert run.handle


def test_two_children_of_one_prompt_strand_one_handle(engines, p):
    engines.answer(p, PROMPT, 1, dict(PREFILL), id="0_x")
    engines.answer(p, PROMPT, 1, dict(PREFILL), id="1_x")
    assert len(p.core.nixl.held) == 2


# -- engines that die


@pytest.mark.parametrize(("policy", "over"), [("fail", "error"), ("recompute", "length")])
def test_a_prefill_engine_that_is_gone(engines, p, policy, over):
    d = engines.add(SimFacts(kv_load_failure_policy=policy))
    engines.answer(d, OTHER, 1, engines.handle(p, OTHER))
    handle = engines.handle(p)
    p.dead = True
    run = engines.ask(d, PROMPT, 8, handle)
    engines.run(engines.now + 0.5)
    assert run.over == over
    assert run.tokens == ([] if policy == "fail" else plain())
    assert d.core.pool.usage == 0
    assert d.stats.failed_transfers == 1


def test_a_prefill_engine_that_was_never_met_and_is_gone_takes_the_handshakes_deadline(
    engines, p, d
):
    handle = engines.handle(p)
    p.dead = True
    run = engines.ask(d, PROMPT, 8, handle)
    engines.run(engines.now + 4.9)
    assert run.over is None
    engines.run(engines.now + 0.2)
    assert run.over == "error"


def test_a_handle_of_an_engine_that_was_restarted_fails_at_once(engines, p, d):
    handle = engines.handle(p)
    p.core.engine_id = "another now"
    assert engines.answer(d, PROMPT, 8, handle).over == "error"
