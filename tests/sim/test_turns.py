"""D's KV as P's for the conversation's next turn, each case of it, in virtual time."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy_lab.sim.facts import SimFacts
from tests.sim.engines import PROMPT, Engines, plain

BOTH = {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 60.0}
MORE = tuple(range(500, 540))
NOTIFY = "tcp://127.0.0.1:7500"


class Pair(Engines):
    """P and D, whose KV moves both ways."""

    def __init__(self, p=(), d=(), **facts):
        super().__init__()
        self.p = self.add(SimFacts(role="prefill", **(BOTH | facts | dict(p))))
        self.d = self.add(SimFacts(role="decode", **(BOTH | facts | dict(d))))

    def turn(self, prompt=PROMPT, tokens=8, **more):
        """One turn; its tokens, and D's handle of it."""
        run = self.answer(self.d, prompt, tokens, self.handle(self.p, prompt), **more)
        return run.tokens, run.handle

    def evict(self):
        """P has nothing of earlier prompts any more."""
        self.p.core.pool.forget_all()

    def next(self, prompt, handle):
        """What P makes of the next turn's prompt with D's handle, and D of that."""
        prefill = self.answer(self.p, prompt, 1, handle)
        if prefill.over != "length":
            return prefill, None
        return prefill, self.answer(self.d, prompt, 8, prefill.handle).tokens


def pulled(engine):
    return engine.stats.prompt_tokens_by_source["external_kv_transfer"]


def test_the_handle_of_an_answer_is_the_recorded_one():
    """Recorded: the last token's KV is not part of it, and it says when its blocks are freed."""
    pair = Pair()
    run = pair.answer(pair.d, PROMPT, 8, pair.handle(pair.p), id="cmpl-1-0-abcdef01")
    handle = run.handle
    assert 59 < handle.pop("remote_blocks_expiry_time") - run.times[-1] <= 60
    assert handle == {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]],
        "remote_engine_id": "engine-1",
        "remote_request_id": "cmpl-1-0-abcdef01",
        "remote_host": "127.0.0.1",
        "remote_port": 2,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 107,
        "transfer_mode": "pull",
    }


@pytest.mark.parametrize("kv", [None, {}])
def test_an_answer_without_params_keeps_nothing(kv):
    pair = Pair()
    assert pair.answer(pair.d, PROMPT, 8, kv).outputs[-1].kv_transfer_params is None
    assert not pair.d.core.nixl.held


def test_a_turn_pulled_twice_gives_wrong_tokens():
    pair = Pair()
    other = pair.add(pair.p.facts)
    said, handle = pair.turn()
    prompt = (*PROMPT, *said, *MORE)
    pair.evict()
    assert pair.next(prompt, dict(handle))[1] == plain(prompt)
    pair.answer(pair.p)  # the first contact: P reports the blocks in a step after the handshake
    assert handle["remote_request_id"] not in pair.d.core.nixl.held
    pair.d.core.pool.forget_all()
    prefill = pair.answer(other, prompt, 1, handle)
    assert prefill.over == "length"
    assert pulled(other) == 107
    assert pair.answer(pair.d, prompt, 8, prefill.handle).tokens != plain(prompt)


def test_without_the_option_nothing_is_kept():
    pair = Pair(bidirectional_kv_xfer=False)
    run = pair.answer(pair.d, PROMPT, 8, pair.handle(pair.p))
    assert run.outputs[-1].kv_transfer_params is None
    assert not pair.d.core.nixl.held


@given(
    st.integers(1, 90),
    st.integers(1, 40),
    st.integers(1, 90),
    st.sampled_from([1, 5, 16]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_next_turn_says_what_one_engine_says(length, tokens, more, block_size, warm):
    prompt = tuple(range(300, 300 + length))
    facts = {"block_size": block_size, "max_model_len": 500, "kv_recompute_threshold": 0}
    pair = Pair(**facts)
    said, handle = pair.turn(prompt, tokens)
    if not warm:
        pair.evict()
    history = (*prompt, *said, *range(600, 600 + more))
    _, answer = pair.next(history, handle)
    assert answer == plain(history, **facts)
    assert pulled(pair.p) == (
        length + tokens - 1 - (0 if not warm else length // block_size * block_size)
    )
    pair.run(pair.now + 61)
    assert pair.p.core.pool.usage == pair.d.core.pool.usage == 0
    # The second turn's, which nobody read. The first one's, too, where nothing was pulled before P
    # had contact with D.
    assert pair.d.stats.kv_expired == (1 if pulled(pair.p) else 2)


def test_what_p_has_is_not_pulled_again():
    """Recorded: the tokens behind its own whole blocks."""
    pair = Pair()
    said, handle = pair.turn(tokens=90)
    pair.next((*PROMPT, *said, *MORE), handle)
    assert pulled(pair.p) == 189 - 96


@pytest.mark.parametrize(("tokens", "moved"), [(63, 0), (64, 64)])
def test_few_tokens_are_computed_and_the_blocks_given_back(tokens, moved):
    pair = Pair()
    said, handle = pair.turn(PROMPT[:40], tokens - 39)
    assert handle["remote_num_tokens"] == tokens
    pair.evict()
    prompt = (*PROMPT[:40], *said, *MORE)
    assert pair.next(prompt, handle)[1] == plain(prompt)
    assert pulled(pair.p) == moved
    pair.answer(pair.p)  # the first contact: P reports the blocks in a step after the handshake
    assert handle["remote_request_id"] not in pair.d.core.nixl.held


def test_a_handle_of_no_tokens_only_gives_the_blocks_back():
    pair = Pair()
    said, handle = pair.turn()
    prompt = (*PROMPT, *said, *MORE)
    _, answer = pair.next(prompt, handle | {"remote_num_tokens": 0})
    assert answer == plain(prompt)
    pair.answer(pair.p)
    assert handle["remote_request_id"] not in pair.d.core.nixl.held


def test_a_refused_request_gives_them_back_too():
    """With the directions swapped: P's API server refuses a request as D's does, and its connector
    notifies D.
    """
    pair = Pair()
    _, handle = pair.turn()
    pair.p.core.reject(handle | {"do_remote_prefill": True, "do_remote_decode": False})
    pair.answer(pair.p)
    assert not pair.d.core.nixl.held
    assert pair.p.core.pool.usage == pair.d.core.pool.usage == 0


def test_blocks_that_nobody_reads_are_freed_after_their_time():
    pair = Pair()
    pair.turn()
    assert pair.d.core.pool.usage > 0
    pair.run(pair.now + 61)
    assert pair.d.core.pool.usage == 0
    assert pair.d.stats.kv_expired == 1


# -- what goes wrong without an error


def test_another_history_gets_wrong_tokens_and_poisons_p():
    """Recorded: P compares no tokens."""
    pair = Pair()
    said, handle = pair.turn()
    other = (*range(700, 800), *said, *MORE)
    _, answer = pair.next(other, handle)
    assert answer != plain(other)
    assert pair.answer(pair.p, other).tokens != plain(other)


def test_a_changed_last_block_gets_wrong_tokens():
    pair = Pair()
    said, handle = pair.turn()
    pair.evict()
    prompt = (*PROMPT, *said[:-2], 999, *MORE)
    _, answer = pair.next(prompt, handle)
    assert answer != plain(prompt)


def test_trimmed_to_the_common_blocks_it_is_right():
    pair = Pair()
    said, handle = pair.turn()
    pair.evict()
    prompt = (*PROMPT, *said[:-2], 999, *MORE)
    trimmed = handle | {
        "remote_num_tokens": 96,
        "remote_block_ids": [handle["remote_block_ids"][0][:6]],
    }
    _, answer = pair.next(prompt, trimmed)
    assert answer == plain(prompt)
    assert pulled(pair.p) == 96
    assert handle["remote_request_id"] not in pair.d.core.nixl.held


@pytest.mark.parametrize("field", ["remote_num_tokens", "remote_block_ids"])
def test_trimming_one_without_the_other_is_wrong_or_fatal(field):
    """Blocks are paired from the end."""
    pair = Pair()
    said, handle = pair.turn()
    pair.evict()
    prompt = (*PROMPT, *said[:-2], 999, *MORE)
    trimmed = {"remote_num_tokens": 96, "remote_block_ids": [handle["remote_block_ids"][0][:6]]}
    prefill, answer = pair.next(prompt, handle | {field: trimmed[field]})
    if field == "remote_block_ids":
        assert prefill.over == "error"
        assert pair.p.dead
    else:
        assert answer != plain(prompt)


def test_used_blocks_that_are_still_whole_serve_again_and_reused_ones_are_wrong():
    pair = Pair(d={"num_gpu_blocks": 30, "max_model_len": 400})
    said, handle = pair.turn()
    prompt = (*PROMPT, *said, *MORE)
    without = handle | {"remote_blocks_expiry_time": None}
    pair.answer(pair.p, prompt, 1, handle)
    pair.evict()
    assert pair.answer(pair.p, prompt, 1, without).handle
    assert pair.d.stats.late_notifications == 1
    pair.answer(pair.d, tuple(range(900, 1200)), 60)
    pair.evict()
    assert pair.next(prompt, without)[1] != plain(prompt)


# -- what fails


def test_p_without_the_option_hangs_and_keeps_its_blocks_when_it_is_left():
    pair = Pair(p={"bidirectional_kv_xfer": False})
    said, handle = pair.turn()
    pair.evict()
    prompt = (*PROMPT, *said, *MORE)
    pair.run(pair.now + 60)
    run = pair.ask(pair.p, prompt, 1, handle, id="hangs")
    pair.run(pair.now + 600)
    assert run.outputs == []
    used = pair.p.core.pool.usage
    assert used > 0
    pair.abort(pair.p, "hangs")
    assert pair.p.core.pool.usage == used
    assert not pair.p.dead
    assert pair.answer(pair.p, prompt).tokens == plain(prompt)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_close_to_its_end_a_handle_is_declined(policy):
    """Recorded: 500 in 10 ms, and counted as expired, not as a failed transfer."""
    pair = Pair(p={"kv_load_failure_policy": policy})
    said, handle = pair.turn()
    pair.evict()
    prompt = (*PROMPT, *said, *MORE)
    pair.run(handle["remote_blocks_expiry_time"] - 4.9)
    prefill, answer = pair.next(prompt, handle)
    assert (prefill.over, answer) == (
        ("error", None) if policy == "fail" else ("length", plain(prompt))
    )
    assert pair.p.stats.kv_expired == 1
    assert pair.p.stats.failed_transfers == 0
    assert pulled(pair.p) == 0


def test_d_that_has_restarted_fails_the_pull():
    pair = Pair()
    said, handle = pair.turn()
    pair.evict()
    prompt = (*PROMPT, *said, *MORE)
    assert pair.next(prompt, handle | {"remote_engine_id": "earlier"})[0].over == "error"


# -- notices


def test_the_notifier_says_what_d_keeps():
    pair = Pair(notify=NOTIFY)
    first = pair.answer(
        pair.p, PROMPT, 1, {"do_remote_decode": True}, id="cmpl-leg-0-abcdef01"
    ).handle
    run = pair.answer(pair.d, PROMPT, 8, first, id="cmpl-client-0-00000000")
    (kept,) = (one.message for _, one in pair.d.notices if one.message["event"] == "kept")
    assert msgspec.json.decode(kept.pop("params")) == run.handle
    assert kept == {
        "type": "PdproxyKV",
        "v": 1,
        "event": "kept",
        "req_id": "leg",
        "internal_id": "cmpl-client-0-00000000",
        "remote_req_id": "cmpl-leg-0-abcdef01",
        "engine_id": "engine-1",
        "role": "D",
    }
    pair.run(pair.now + 61)
    expired = pair.d.notices[-1][1].message
    assert (expired["event"], expired["role"], expired["remote_req_id"]) == (
        "expired",
        "D",
        "cmpl-leg-0-abcdef01",
    )


def test_the_notifier_says_when_p_has_read_it():
    pair = Pair(notify=NOTIFY)
    said, handle = pair.turn()
    pair.evict()
    pair.next((*PROMPT, *said, *MORE), handle)
    assert [one.message["event"] for _, one in pair.d.notices][:3] == ["loaded", "kept", "released"]
