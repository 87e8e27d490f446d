"""MoRIIO as vLLM does it, in both modes: who keeps blocks how long, what kills, and what answers
wrongly.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.virtual_link import HOST
from tests.sim.engines import OTHER, PROMPT, Engines, plain

MODES = pytest.mark.parametrize("mode", ["READ", "WRITE"])


def facts(role, mode="READ", **more):
    return SimFacts(
        **{"role": role, "connector": "moriio", "transfer_mode": mode, "max_model_len": 500, **more}
    )


def name(uid="0"):
    address = "host:{},handshake:{},notify:{}"
    p, d = (address.format(HOST, port, port) for port in (1, 2))
    return f"cmpl-___prefill_addr_{p}___decode_addr_{d}_{uid * 32}-0-{'ab' * 4}"


def to_p(uid="0", **more):
    params = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
    }
    return params | {"transfer_id": f"tx-{uid}", **more}


def to_d(uid="0"):
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": None,
        "remote_block_ids": None,
    }
    return params | {"transfer_id": f"tx-{uid}"}


def pair(mode, **more):
    engines = Engines()
    return (
        engines,
        engines.add(facts("prefill", mode, **more)),
        engines.add(facts("decode", mode, **more)),
    )


def usage(*engines):
    return [engine.core.pool.usage for engine in engines]


@MODES
@given(
    length=st.integers(1, 70),
    block_size=st.sampled_from([1, 5, 16, 32]),
    budget=st.sampled_from([8, 8192]),
)
@settings(max_examples=40, deadline=None)
def test_split_says_what_one_engine_says(mode, length, block_size, budget):
    """P first, in both modes: in WRITE mode P writes once D has reported its blocks."""
    prompt = tuple(range(300, 300 + length))
    engines, p, d = pair(mode, block_size=block_size, max_num_batched_tokens=budget)
    first = engines.answer(p, prompt, 1, to_p(), id=name())
    run = engines.answer(d, prompt, 8, first.handle if mode == "READ" else to_d(), id=name())
    assert run.tokens == plain(prompt)
    assert d.stats.prompt_tokens_by_source["external_kv_transfer"] == length - (mode == "READ")
    assert usage(p, d) == [0, 0]
    assert p.core.connector.leases(0.0) == {}


def test_write_with_d_first():
    engines, p, d = pair("WRITE")
    run = engines.ask(d, PROMPT, 8, to_d(), id=name())
    engines.run(engines.now + 100)
    assert run.outputs == []
    engines.answer(p, PROMPT, 1, to_p(), id=name())
    engines.run(engines.now + 1)
    assert run.tokens == plain(PROMPT)
    assert usage(p, d) == [0, 0]


@MODES
def test_p_keeps_blocks_for_defer_timeout(mode):
    engines, p, _ = pair(mode)
    engines.answer(p, PROMPT, 1, to_p(), id=name())
    assert p.core.connector.leases(engines.now)["tx-0"] == pytest.approx(59, abs=0.2)
    engines.run(engines.now + 58)
    assert p.core.pool.usage > 0
    engines.run(engines.now + 2)
    assert p.core.pool.usage == 0


def test_a_second_read_gives_wrong_tokens():
    engines, p, d = pair("READ")
    other = engines.add(facts("decode"))
    handle = engines.answer(p, PROMPT, 1, to_p(), id=name()).handle
    assert engines.answer(d, PROMPT, 8, dict(handle), id=name()).tokens == plain()
    run = engines.answer(other, PROMPT, 8, handle, id=name())
    assert run.over == "length"
    assert run.tokens != plain()


def test_p_keeps_nothing_of_what_did_not_end_by_length():
    engines, p, _ = pair("READ")
    run = engines.answer(p, PROMPT, 1, to_p(), id=name(), stop_token_ids=frozenset(range(1 << 16)))
    assert run.over == "stop"
    assert run.outputs[-1].kv_transfer_params is None
    assert p.core.pool.usage == 0


@MODES
def test_a_refused_request_frees_p_s_blocks(mode):
    engines, p, d = pair(mode)
    first = engines.answer(p, PROMPT, 1, to_p(), id=name())
    d.core.reject(first.handle)
    engines._turn(d)
    engines.run(engines.now + 1)
    assert p.core.pool.usage == 0


def test_read_dies_of_a_refused_request_that_names_nobody():
    engines, p, d = pair("READ")
    handle = engines.answer(p, PROMPT, 1, to_p(), id=name()).handle
    del handle["remote_host"]
    engines._guarded(d, lambda: d.core.reject(handle))
    assert d.dead


@MODES
def test_a_request_without_parameters(mode):
    """A WRITE engine computes it. A READ engine takes what its memory holds, and its answer is
    wrong.
    """
    engines, _, d = pair(mode)
    engines.answer(d, OTHER, 4, None, id="cmpl-before") if mode == "WRITE" else None
    run = engines.answer(d, PROMPT, 8, None, id="cmpl-mine")
    assert (run.over, d.dead) == ("length", False)
    assert (run.tokens == plain(PROMPT)) is (mode == "WRITE")


@MODES
def test_a_prefill_engine_serves_alone(mode):
    engines, p, _ = pair(mode)
    assert engines.answer(p, PROMPT, 8, None, id="cmpl-mine").tokens == plain(PROMPT)


@pytest.mark.parametrize("missing", ["remote_engine_id", "remote_block_ids"])
def test_write_kills_p_without_these_keys(missing):
    engines, p, _ = pair("WRITE")
    params = to_p()
    del params[missing]
    assert engines.answer(p, PROMPT, 1, params, id=name()).over == "error"
    assert p.dead


def test_write_kills_engines_that_can_not_find_each_other():
    engines, p, d = pair("WRITE")
    engines.answer(p, PROMPT, 1, to_p(), id="cmpl-mine")
    engines.answer(d, PROMPT, 1, to_d(), id="cmpl-mine")
    assert (p.dead, d.dead) == (True, True)


def test_d_that_is_aborted_while_it_waits_keeps_its_blocks_for_ever():
    engines, p, d = pair("WRITE")
    engines.ask(d, PROMPT, 8, to_d(), id=name())
    engines.run(engines.now + 1)
    engines.abort(d, name())
    engines.answer(p, PROMPT, 1, to_p(), id=name())
    engines.run(engines.now + 1000)
    assert p.core.pool.usage == 0
    assert d.core.pool.usage > 0


def test_d_that_is_aborted_before_it_is_scheduled_reports_that_and_p_writes_nothing():
    engines, p, d = pair("WRITE", max_num_seqs=1)
    engines.ask(d, OTHER, 400, None, id="cmpl-before")
    engines.ask(d, PROMPT, 8, to_d(), id=name())
    engines.abort(d, name())
    engines.answer(p, PROMPT, 1, to_p(), id=name())
    engines.run(engines.now + 100)
    assert usage(p, d) == [0, 0]


def test_d_is_over_at_once_where_p_has_written_before_under_that_name():
    """A transfer that no request waits for is remembered: the next request of its name takes its
    blocks as written.
    """
    engines, _, d = pair("WRITE")
    d.core.connector.written("tx-0", (), ())
    run = engines.answer(d, PROMPT, 8, to_d(), id=name())
    assert run.over == "length"


@pytest.mark.parametrize(
    ("change", "dies"), [(lambda ids: [0, *ids], False), (lambda ids: ids[:-2], True)]
)
def test_read_takes_the_last_of_p_s_blocks(change, dies):
    engines, p, d = pair("READ", block_size=5)
    handle = engines.answer(p, PROMPT, 1, to_p(), id=name()).handle
    handle["remote_block_ids"] = [change(handle["remote_block_ids"][0])]
    run = engines.answer(d, PROMPT, 8, handle, id=name())
    assert d.dead is dies
    assert dies or run.tokens == plain(PROMPT)


def test_read_without_a_block_of_a_short_prompt_releases_it_and_answers_from_its_memory():
    engines, p, d = pair("READ", block_size=64)
    handle = engines.answer(p, PROMPT[:20], 1, to_p(), id=name()).handle
    assert (
        engines.answer(d, PROMPT[:20], 8, handle | {"remote_block_ids": [[]]}, id=name()).over
        == "length"
    )
    assert usage(p, d) == [0, 0]


@pytest.mark.parametrize("groups", [[[1], [2]], [1, 2], 7])
def test_read_dies_of_other_forms_of_blocks(groups):
    engines, p, d = pair("READ")
    handle = engines.answer(p, PROMPT, 1, to_p(), id=name()).handle
    engines.answer(d, PROMPT, 8, handle | {"remote_block_ids": groups}, id=name())
    assert d.dead


def test_read_dies_without_an_address_even_if_there_is_nothing_to_read():
    engines, p, d = pair("READ")
    handle = engines.answer(p, (300,), 1, to_p(), id=name()).handle
    del handle["remote_host"]
    engines.answer(d, (300,), 1, handle, id="cmpl-mine")
    assert d.dead


def test_write_releases_at_the_place_in_the_parameters_first():
    _, _, d = pair("WRITE")
    d.core.connector.dropped(name(), to_d() | {"remote_host": "elsewhere", "remote_notify_port": 7})
    (report,) = d.core.connector.outbox
    assert (report.kind, report.place.host, report.place.port) == ("release", "elsewhere", 7)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_write_dies_of_a_number_that_is_null(role):
    engines, p, d = pair("WRITE")
    asked = p if role == "prefill" else d
    spoiled = to_p(remote_dp_size=None) if role == "prefill" else to_d() | {"remote_dp_rank": None}
    engines.answer(asked, PROMPT, 1, spoiled, id=name())
    assert asked.dead


def test_write_on_another_rank_than_p_s_reports_nothing_if_the_rank_is_overridden():
    engines, _, d = pair("WRITE")
    engines.ask(
        d, PROMPT, 8, to_d() | {"remote_dp_rank": 1, "remote_dp_rank_override": True}, id=name()
    )
    assert not d.core.connector.outbox
    assert d.core.pool.usage > 0


def test_write_of_more_blocks_than_d_has_frees_p_and_leaves_d_waiting():
    engines, p, d = pair("WRITE", block_size=5)
    run = engines.ask(d, PROMPT[:-6], 8, to_d(), id=name())
    engines.answer(p, PROMPT, 1, to_p(), id=name())
    engines.run(engines.now + 1000)
    assert (run.outputs, p.core.pool.usage) == ([], 0)
    assert d.core.pool.usage > 0


def test_write_of_a_prompt_that_was_stopped_is_done_all_the_same():
    engines, p, d = pair("WRITE")
    engines.answer(p, PROMPT, 1, to_p(), id=name(), stop_token_ids=frozenset(range(1 << 16)))
    run = engines.answer(d, PROMPT, 8, to_d(), id=name())
    assert run.over == "length"
    assert run.tokens != plain()
    engines.answer(p, PROMPT, 1, to_p("1"), id=name("1"), stop_token_ids=frozenset(range(1 << 16)))
    engines.run(engines.now + 61)
    waits = engines.ask(d, PROMPT, 8, to_d("1"), id=name("1"))
    engines.run(engines.now + 100)
    assert waits.outputs == []


@pytest.mark.parametrize(
    ("role", "kind"), [("prefill", "blocks"), ("decode", "release"), ("decode", "blocks")]
)
def test_a_message_that_is_not_expected_ends_the_listener(role, kind):
    engines, p, d = pair("WRITE")
    (p if role == "prefill" else d).core.connector.reported(kind, "tx-9", ())
    run = engines.ask(d, PROMPT, 8, to_d(), id=name())
    engines.answer(p, PROMPT, 1, to_p(), id=name())
    engines.run(engines.now + 1000)
    assert (run.outputs, p.core.pool.usage) == ([], 0)


def test_d_that_prefills_keeps_its_blocks_for_ever():
    engines, _, d = pair("READ")
    assert engines.answer(d, PROMPT, 1, to_p(), id=name()).handle
    engines.run(engines.now + 1e6)
    assert d.core.pool.usage > 0


def test_a_release_before_p_s_end_counts():
    engines, p, _ = pair("WRITE")
    run = engines.ask(p, PROMPT, 1, to_p(), id=name())
    p.core.connector.reported("release", "tx-0", ())
    engines.run(engines.now + 1)
    assert run.over == "length"
    assert p.core.pool.usage == 0


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_read_that_fails(policy):
    engines, p, d = pair("READ", kv_load_failure_policy=policy)
    handle = engines.answer(p, PROMPT, 1, to_p(), id=name()).handle
    p.dead = True
    run = engines.answer(d, PROMPT, 8, handle, id=name())
    assert run.over == ("error" if policy == "fail" else "length")
    assert run.tokens == ([] if policy == "fail" else plain(PROMPT))
    assert d.core.pool.usage == 0
