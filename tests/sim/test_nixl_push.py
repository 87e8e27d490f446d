"""What real engines do when P pushes, in virtual time: who gets whose KV, what waits for it, and
for how long.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.engine_model.hardware import Hardware
from tests.sim.engines import OTHER, PREFILL, PROMPT, Engines, external, plain
from tests.sim.pushes import LEASE, decode, facts, free, meet, prefill, promise, wait

# -- in every order, with right text


@pytest.mark.parametrize("order", ["pd", "dp", "p d", "d p"])
@given(st.integers(1, 70), st.sampled_from([1, 5, 16, 32]))
@settings(max_examples=30, deadline=None)
def test_split_says_what_one_engine_says(order, length, block_size):
    prompt = tuple(range(300, 300 + length))
    engines = Engines()
    p, d = (
        engines.add(facts(role, block_size=block_size, max_model_len=500))
        for role in ("prefill", "decode")
    )
    for step in order:
        if step == "p":
            prefill(engines, p, "x", prompt)
        elif step == "d":
            run = decode(engines, p, d, "x", prompt)
        else:
            wait(engines)
    wait(engines)
    assert run.tokens == plain(prompt)
    assert external(d) == length
    assert free(p)
    assert free(d)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 3)), max_size=24),
    st.integers(0, 3),
)
@settings(max_examples=80, deadline=None)
def test_many_at_once_in_any_order(steps, speed):
    """Whatever comes first, each pair of legs gets its own KV, and in the end nothing is held."""
    engines = Engines()
    hardware = Hardware(speed=(0.0, 1.0, 5.0, 0.5)[speed])
    p, d = (engines.add(facts(role, hardware=hardware)) for role in ("prefill", "decode"))
    asked: dict[str, set[int]] = {"p": set(), "d": set()}
    runs = {}
    for number, prefills, waits in [*steps, *((n, b, 0) for n in range(6) for b in (True, False))]:
        prompt = tuple(range(300 + number, 340 + 2 * number))
        role = "p" if prefills else "d"
        if number not in asked[role]:
            asked[role].add(number)
            if prefills:
                prefill(engines, p, number, prompt)
            else:
                runs[prompt] = decode(engines, p, d, number, prompt)
        wait(engines, waits / 100)
    wait(engines, 20)
    assert [run.tokens for run in runs.values()] == [plain(prompt) for prompt in runs]
    assert (free(p), free(d)) == (True, True)
    assert not p.core.connector.registrations()


def test_the_handle_is_the_recorded_one(engines, p):
    assert engines.answer(p, PROMPT, 1, dict(PREFILL), id="cmpl-1-0-abcdef01").handle == {
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
        "transfer_mode": "push",
        "remote_prefill_cached_tokens": 0,
    }


def test_p_counts_transfers_and_d_external_tokens(engines, p, d):
    meet(engines, p, d)
    assert (sum(p.stats.transfers.counts), p.stats.transferred_bytes.total) == (1, 7 * 16 * 131_072)
    assert sum(d.stats.transfers.counts) == 0
    assert (external(p), external(d)) == (0, 100)
    assert (p.stats.external_prefix_cache_queries, p.stats.external_prefix_cache_hits) == (100, 0)
    assert (d.stats.external_prefix_cache_queries, d.stats.external_prefix_cache_hits) == (100, 100)


def test_only_what_d_has_not_cached_is_written(engines, p, d):
    engines.answer(d)
    prefill(engines, p, "x")
    run = decode(engines, p, d, "x")
    wait(engines)
    assert run.tokens == plain()
    assert external(d) == 4
    assert p.stats.transferred_bytes.total == 16 * 131_072
    assert (free(p), free(d)) == (True, True)


# -- which request gets whose KV


@pytest.mark.parametrize(
    ("prefills", "decodes", "meets"),
    [
        ("cmpl-a-0-11111111", "cmpl-a-0-22222222", True),
        ("cmpl-a-0-1111AAAA", "cmpl-a-0-22222222", True),
        ("chatcmpl-a-11111111", "chatcmpl-a-22222222", True),
        ("same", "same", True),
        ("cmpl-a-0-11111111", "cmpl-a-1-22222222", False),
        ("cmpl-a-0-11111111", "chatcmpl-a-22222222", False),
        ("cmpl-a-0-11111111", "cmpl-a-0-2222222", False),
        ("cmpl-a-0-11111111-22222222", "cmpl-a-0-33333333", False),
        ("cmpl-a-0-11111111", "0_cmpl-a-0-22222222", False),
    ],
)
@pytest.mark.parametrize("first", ["p", "d"])
def test_ids_match_without_their_random_digits(engines, p, d, prefills, decodes, meets, first):
    def ask(role):
        if role == "p":
            engines.ask(p, PROMPT, 1, dict(PREFILL), id=prefills)
            return None
        return engines.ask(d, PROMPT, 8, promise(p), id=decodes)

    runs = [ask(role) for role in (first, "p" if first == "d" else "d") if not wait(engines, 0.1)]
    wait(engines)
    (run,) = [run for run in runs if run is not None]
    assert run.tokens == (plain() if meets else [])
    assert p.core.connector.registrations() == ([] if meets else [decodes])


def test_two_clients_with_one_id_swap_their_kv(engines, p, d):
    one = decode(engines, p, d, "same", PROMPT, "00000001")
    two = decode(engines, p, d, "same", OTHER, "00000002")
    wait(engines, 0.5)
    prefill(engines, p, "same", OTHER, "00000003")
    wait(engines, 0.5)
    prefill(engines, p, "same", PROMPT, "00000004")
    wait(engines)
    assert (one.over, two.over) == ("length", "length")
    assert one.tokens != plain()
    assert two.tokens != plain(OTHER)


def test_a_shorter_prompt_at_d_gets_the_end_of_p_s(engines, p, d):
    prefill(engines, p, "x", PROMPT)
    run = decode(engines, p, d, "x", PROMPT[:40])
    wait(engines)
    assert run.over == "length"
    assert run.tokens != plain(PROMPT[:40])


def test_a_longer_prompt_at_d_gets_nothing(engines, p, d):
    run = decode(engines, p, d, "x", PROMPT + OTHER)
    prefill(engines, p, "x", PROMPT)
    wait(engines, LEASE - 1)
    assert (run.outputs, len(p.core.connector.held)) == ([], 1)
    wait(engines, 3)
    assert (run.outputs, p.stats.kv_expired, free(p)) == ([], 1, True)


# -- what D waits for


def test_d_waits_for_ever_for_a_prompt_that_never_comes(engines, p, d):
    run = decode(engines, p, d, "x")
    wait(engines, 10_000)
    assert run.outputs == []
    assert d.core.connector.awaited(engines.now)["cmpl-x-0-bbbbbbbb"] > 9_000
    assert p.core.connector.registrations() == ["cmpl-x-0-bbbbbbbb"]


def test_an_abort_frees_no_blocks_until_the_push_comes(engines, p, d):
    run = decode(engines, p, d, "x")
    wait(engines)
    used = d.core.pool.usage
    engines.abort(d, "cmpl-x-0-bbbbbbbb")
    wait(engines, 1000)
    assert d.core.pool.usage == used > 0
    assert list(d.core.connector.awaited(engines.now)) == ["cmpl-x-0-bbbbbbbb"]
    prefill(engines, p, "x")
    wait(engines)
    assert (run.outputs, free(d), free(p)) == ([], True, True)


def test_an_abort_in_d_s_queue_sends_nothing_and_p_s_blocks_wait_for_the_lease(engines, p):
    d = engines.add(facts("decode", max_num_seqs=1))
    meet(engines, p, d)
    engines.ask(d, OTHER, 2000)
    decode(engines, p, d, "x")
    prefill(engines, p, "x")
    wait(engines, 0.5)
    engines.abort(d, "cmpl-x-0-bbbbbbbb")
    wait(engines, LEASE - 2)
    assert len(p.core.connector.held) == 1
    wait(engines, 3)
    assert (free(p), p.stats.kv_expired, d.dead) == (True, 1, False)


def test_a_rejected_request_releases_nothing_at_p(engines, p, d):
    meet(engines, p, d)
    handle = prefill(engines, p, "x")
    wait(engines)
    d.core.reject(handle.handle)
    engines.ask(d)
    wait(engines, LEASE - 3)
    assert len(p.core.connector.held) == 1
    wait(engines, 4)
    assert (free(p), p.stats.kv_expired) == (True, 1)


def test_a_prompt_that_d_computes_itself_registers_nothing(engines, p, d):
    """With prompt_logprobs, vLLM reads no KV of others: P's blocks wait for the lease."""
    run = decode(engines, p, d, "x", prompt_logprobs=0)
    prefill(engines, p, "x")
    wait(engines)
    assert (run.tokens, external(d)) == (plain(), 0)
    assert (len(p.core.connector.held), p.core.connector.registrations()) == (1, [])
    wait(engines, LEASE)
    assert (free(p), free(d)) == (True, True)


def test_p_s_own_handle_works_one_leg_after_the_other(engines, p, d):
    handle = prefill(engines, p, "x")
    wait(engines)
    run = decode(engines, p, d, "x", kv=handle.handle)
    wait(engines)
    assert run.tokens == plain()
    assert (free(p), free(d)) == (True, True)


# -- the lease


@pytest.mark.parametrize("stopped", [False, True])
def test_p_keeps_blocks_for_its_lease_however_it_ended(engines, p, d, stopped):
    stops = {"stop_token_ids": frozenset(plain()[:1])} if stopped else {}
    assert prefill(engines, p, "x", **stops).outputs == []
    wait(engines, LEASE - 1)
    assert len(p.core.connector.held) == 1
    wait(engines, 2)
    assert (free(p), p.stats.kv_expired) == (True, 1)
    run = decode(engines, p, d, "x")
    wait(engines, 100)
    assert (run.outputs, p.core.connector.registrations()) == ([], ["cmpl-x-0-bbbbbbbb"])


@pytest.mark.parametrize(("own", "expired"), [(False, 1), (True, 0)])
def test_d_s_queue_renews_only_a_lease_that_it_can_name(engines, p, own, expired):
    d = engines.add(
        facts(
            "decode",
            max_num_seqs=1,
            hardware=Hardware(decode_step_s=0.2),
            enable_prefix_caching=False,
        )
    )
    meet(engines, p, d)
    engines.ask(d, OTHER, 500)
    wait(engines)
    handle = prefill(engines, p, "x")
    wait(engines)
    decode(engines, p, d, "x", kv=handle.handle if own else None)
    wait(engines, 60)
    assert p.stats.kv_expired == expired


def test_an_aborted_prefill_keeps_nothing_and_pushes_nothing(engines, p, d):
    run = decode(engines, p, d, "x", PROMPT * 20)
    prefill(engines, p, "x", PROMPT * 20)
    wait(engines, 0.03)
    engines.abort(p, "cmpl-x-0-aaaaaaaa")
    wait(engines, 100)
    assert (run.outputs, free(p), len(p.core.connector.registrations())) == ([], True, 1)


def test_a_write_after_the_lease_brings_what_is_in_the_blocks_by_then(engines, d):
    p = engines.add(
        facts(
            "prefill",
            num_gpu_blocks=20,
            max_model_len=256,
            hardware=Hardware(transfer_latency_s=40),
        )
    )
    prefill(engines, p, "x")
    run = decode(engines, p, d, "x")
    wait(engines, 35)
    assert (p.stats.kv_expired, run.outputs) == (1, [])
    for number in range(4):
        engines.answer(p, tuple(range(500 + number, 700 + number)))
    wait(engines, 10)
    assert run.over == "length"
    assert run.tokens != plain()
