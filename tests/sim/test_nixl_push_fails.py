"""What real engines do when P pushes and something is wrong (keys, engines, addresses, workers), in
virtual time.
"""

import pytest

from pdproxy_lab.sim.facts import SimFacts
from tests.sim.engines import OTHER, plain
from tests.sim.pushes import LEASE, decode, facts, free, meet, prefill, promise, wait

# -- what kills a core


@pytest.mark.parametrize(
    "key", ["remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size"]
)
def test_a_handle_without_a_key_kills_d(engines, p, d, key):
    run = decode(engines, p, d, "x", kv=promise(p, **{key: ...}))
    assert (d.dead, run.over) == (True, "error")


def test_pp_size_may_be_left_out(engines, p, d):
    prefill(engines, p, "x")
    run = decode(engines, p, d, "x", kv=promise(p, pp_size=...))
    wait(engines)
    assert run.tokens == plain()


@pytest.mark.parametrize(
    ("key", "dies"), [("remote_request_id", True), ("remote_port", True), ("tp_size", False)]
)
def test_an_abort_in_the_queue_reads_all_keys_but_the_size(engines, p, key, dies):
    d = engines.add(facts("decode", max_num_seqs=1))
    engines.ask(d, OTHER, 2000)
    decode(engines, p, d, "x", kv=promise(p, **{key: ...}))
    wait(engines, 0.5)
    assert not d.dead
    engines.abort(d, "cmpl-x-0-bbbbbbbb")
    assert d.dead is dies


# -- engines that are not there


def test_a_wrong_engine_id_fails_at_once(engines, p, d):
    prefill(engines, p, "x")
    run = decode(engines, p, d, "x", kv=promise(p, remote_engine_id="nope"))
    wait(engines, 0.5)
    assert (run.over, run.tokens, free(d)) == ("error", [], True)
    assert d.stats.failed_transfers == 1
    assert len(p.core.connector.held) == 1


@pytest.mark.parametrize(("policy", "over"), [("fail", "error"), ("recompute", "length")])
def test_a_wrong_port_fails_after_the_handshake_s_deadline(engines, p, policy, over):
    d = engines.add(facts("decode", kv_load_failure_policy=policy))
    prefill(engines, p, "x")
    run = decode(engines, p, d, "x", kv=promise(p, remote_port=77))
    wait(engines, 4.9)
    assert run.over is None
    wait(engines, 0.5)
    assert (run.over, len(p.core.connector.held)) == (over, 1)
    wait(engines, LEASE)
    assert free(p)


def test_one_failed_handshake_counts_once_whatever_waits_for_it(engines, p, d):
    runs = [decode(engines, p, d, n, kv=promise(p, remote_port=77)) for n in range(3)]
    wait(engines, 5.5)
    assert [run.over for run in runs] == ["error"] * 3
    assert d.stats.failed_transfers == 1


def test_an_engine_that_was_met_is_found_at_any_address(engines, p, d):
    meet(engines, p, d)
    prefill(engines, p, "x")
    run = decode(engines, p, d, "x", kv=promise(p, remote_port=77, remote_host="nowhere"))
    wait(engines)
    assert run.tokens == plain()


def test_p_that_has_died_leaves_d_waiting_if_they_had_met(engines, p, d):
    meet(engines, p, d)
    p.dead = True
    run = decode(engines, p, d, "x")
    wait(engines, 1000)
    assert (run.outputs, d.stats.failed_notifications, len(d.core.connector.expected)) == ([], 1, 1)


def test_d_that_restarted_with_the_same_id_never_gets_a_push_again(engines, p, d):
    meet(engines, p, d)
    d.core.agent = "the next run"
    d.core.connector._met.clear()
    runs = []
    for number in range(3):
        prefill(engines, p, number)
        runs.append(decode(engines, p, d, number))
        wait(engines)
    assert [run.outputs for run in runs] == [[], [], []]
    assert p.stats.failed_transfers == 3
    wait(engines, LEASE)
    assert (free(p), p.stats.kv_expired, len(d.core.connector.expected)) == (True, 3, 3)


def test_d_that_restarted_with_another_id_gets_its_push(engines, p, d):
    meet(engines, p, d)
    d.core.engine_id = d.core.connector._engine_id = "another"
    d.core.agent = "the next run"
    prefill(engines, p, "x")
    run = decode(engines, p, d, "x")
    wait(engines)
    assert run.tokens == plain()


def test_a_d_that_is_gone_leaves_p_with_its_blocks_until_the_lease_ends(engines, p, d):
    decode(engines, p, d, "x")
    wait(engines, 0.1)
    d.dead = True
    prefill(engines, p, "x")
    wait(engines, 10)
    assert (len(p.core.connector.held), p.stats.failed_transfers) == (1, 1)
    wait(engines, LEASE)
    assert free(p)


@pytest.mark.parametrize(("pushes", "pulls"), [("prefill", "decode"), ("decode", "prefill")])
def test_push_and_pull_refuse_each_other(engines, pushes, pulls):
    made = {
        pushes: engines.add(facts(pushes)),
        pulls: engines.add(SimFacts(role=pulls, connector="nixl")),
    }
    p, d = made["prefill"], made["decode"]
    handle = prefill(engines, p, "x")
    wait(engines)
    run = decode(engines, p, d, "x", kv=handle.handle)
    wait(engines)
    assert (run.over, d.stats.failed_transfers, len(p.core.nixl.held)) == ("error", 1, 1)


# -- several workers


@pytest.mark.parametrize(("workers", "claimed"), [(1, 1), (2, 2), (4, 4)])
def test_workers_that_are_all_named(engines, workers, claimed):
    p = engines.add(facts("prefill", tensor_parallel_size=workers))
    d = engines.add(facts("decode"))
    prefill(engines, p, "x")
    run = decode(engines, p, d, "x", kv=promise(p, tp_size=claimed))
    wait(engines)
    assert run.tokens == plain()


def test_a_worker_that_is_not_named_pushes_nothing(engines):
    p = engines.add(facts("prefill", tensor_parallel_size=2))
    d = engines.add(facts("decode"))
    prefill(engines, p, "x")
    run = decode(engines, p, d, "x", kv=promise(p, tp_size=1))
    wait(engines, LEASE - 1)
    assert (run.outputs, len(p.core.connector.held)) == ([], 1)


@pytest.mark.parametrize("wrong", [{"tp_size": 2}, {"pp_size": 2}])
def test_a_worker_that_does_not_exist_kills_p_s_listener(engines, p, d, wrong):
    run = decode(engines, p, d, "x", kv=promise(p, **wrong))
    wait(engines, 5.5)
    assert run.over == "error"
    other = decode(engines, p, engines.add(facts("decode")), "y")
    wait(engines, 5.5)
    assert (other.over, p.dead) == ("error", False)


def test_a_stage_that_does_not_exist_is_waited_for_by_a_d_that_has_met_p(engines, p, d):
    meet(engines, p, d)
    prefill(engines, p, "x")
    run = decode(engines, p, d, "x", kv=promise(p, pp_size=2))
    wait(engines, 100)
    assert (run.outputs, free(p), len(d.core.connector.expected)) == ([], True, 1)


@pytest.mark.parametrize("size", [None, "1", 0, -1])
def test_no_number_of_workers_fails_at_once(engines, p, d, size):
    run = decode(engines, p, d, "x", kv=promise(p, tp_size=size))
    wait(engines, 0.5)
    assert (run.over, d.dead) == ("error", False)
