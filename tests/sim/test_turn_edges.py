"""KV that goes back to the prefill engine: how much of it is pulled, when it is declined, and what
is given back.
"""

from __future__ import annotations

import msgspec
import pytest

from pdproxy_lab.sim.nixl import EXPIRY_MARGIN
from tests.sim.engines import PREFILL, PROMPT, plain
from tests.sim.test_turns import MORE, Pair, pulled

BLOCK = 16
FAR = tuple(range(700, 780))
"""Tokens that nothing else has."""


@pytest.mark.parametrize("left", [-10.0, 0.0, 2.0, EXPIRY_MARGIN, EXPIRY_MARGIN + 1, 1000.0, None])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_blocks_that_will_soon_be_freed_are_not_read(left: float | None, policy: str) -> None:
    """`left`: seconds to their end, when the next turn comes. A handle that does not name one is
    read.
    """
    pair = Pair(p={"kv_load_failure_policy": policy}, decoder_kv_blocks_ttl=2000.0)
    said, handle = pair.turn()
    pair.evict()
    prompt = (*PROMPT, *said, *MORE)
    handle["remote_blocks_expiry_time"] = None if left is None else pair.now + left
    prefill, answer = pair.next(prompt, handle)
    declined = left is not None and left <= EXPIRY_MARGIN
    assert pair.p.stats.kv_expired == declined
    assert pair.p.stats.failed_transfers == 0
    assert pulled(pair.p) == (0 if declined else handle["remote_num_tokens"])
    if declined and policy == "fail":
        assert (prefill.over, answer) == ("error", None)
    else:
        assert answer == plain(prompt)


def test_where_nothing_is_read_the_time_does_not_matter() -> None:
    """P has the whole beginning itself."""
    pair = Pair(p={"kv_load_failure_policy": "fail"})
    met, earlier = pair.turn(FAR)
    pair.next((*FAR, *met, *MORE), earlier)  # the first contact of P and D takes a handshake
    before = pulled(pair.p)
    said, handle = pair.turn(tokens=13)  # 112 tokens have KV: whole blocks
    prompt = (*PROMPT, *said, *MORE)
    assert pair.answer(pair.p, prompt, 1, dict(PREFILL)).over == "length"
    handle["remote_blocks_expiry_time"] = pair.now - 10
    assert pair.next(prompt, handle)[1] == plain(prompt)
    assert (pair.p.stats.kv_expired, pulled(pair.p) - before) == (0, 0)
    assert handle["remote_request_id"] not in pair.d.core.nixl.held, "D need not keep what P has"


@pytest.mark.parametrize(
    ("threshold", "tokens", "moved"),
    [(256, 48, 0), (64, 48, 0), (48, 48, 48), (0, 48, 48), (0, 1, 1), (256, 256, 256)],
)
def test_fewer_tokens_than_the_threshold_are_computed(
    threshold: int, tokens: int, moved: int
) -> None:
    pair = Pair(kv_recompute_threshold=threshold, max_model_len=500)
    first = tuple(range(300, 300 + max(tokens - 7, 1)))
    said, handle = pair.turn(first, tokens - len(first) + 1)
    assert handle["remote_num_tokens"] == tokens
    pair.evict()
    prompt = (*first, *said, *MORE)
    assert pair.next(prompt, handle)[1] == plain(prompt)
    assert pulled(pair.p) == moved


@pytest.mark.parametrize(
    ("kept", "prompt"),
    [
        pytest.param(40, 56, id="a last block that is not full"),
        pytest.param(32, 72, id="whole blocks, less than the prompt"),
        pytest.param(40, 41, id="all but one token"),
        pytest.param(1, 41, id="one token"),
    ],
)
def test_so_many_tokens_are_pulled_and_the_others_computed(kept: int, prompt: int) -> None:
    pair = Pair(kv_recompute_threshold=0)
    said, handle = pair.turn(FAR[:kept], 1)
    assert handle["remote_num_tokens"] == kept
    assert len(handle["remote_block_ids"][0]) == -(-kept // BLOCK)
    pair.evict()
    next_prompt = (*FAR[:kept], *said, *MORE)[:prompt]
    before = pair.p.stats.prompt_tokens_by_source["local_compute"]
    assert pair.next(next_prompt, handle)[1] == plain(next_prompt)
    assert pulled(pair.p) == kept
    assert pair.p.stats.prompt_tokens_by_source["local_compute"] - before == len(next_prompt) - kept


def test_of_a_handle_that_is_longer_than_the_prompt_not_more_than_the_prompt_is_counted() -> None:
    """Blocks are paired from the end, so the tokens are wrong: a proxy must not send such a handle
    whole.
    """
    pair = Pair(kv_recompute_threshold=0)
    _, handle = pair.turn(FAR, 1)
    pair.evict()
    prompt = FAR[:40]
    run = pair.answer(pair.p, prompt, 1, handle)
    assert run.over == "length"
    assert pulled(pair.p) == len(prompt)
    assert pair.next(prompt, run.handle)[1] != plain(prompt)


@pytest.mark.parametrize("tokens", [1, 2, 8, 13, 28])
def test_a_handle_never_names_more_tokens_than_its_blocks_hold(tokens: int) -> None:
    """The answer's last token has no KV."""
    pair = Pair()
    _, handle = pair.turn(tokens=tokens)
    assert handle["remote_num_tokens"] == len(PROMPT) + tokens - 1
    blocks = len(handle["remote_block_ids"][0])
    assert handle["remote_num_tokens"] <= blocks * BLOCK
    assert blocks == -(-handle["remote_num_tokens"] // BLOCK)


def test_the_first_turn_pulls_nothing_and_keeps_its_blocks_for_d() -> None:
    pair = Pair()
    handle = pair.handle(pair.p)
    assert pulled(pair.p) == 0
    assert (handle["do_remote_prefill"], handle["do_remote_decode"]) == (True, False)
    assert handle["remote_block_ids"][0]
    assert handle["remote_request_id"] in pair.p.core.nixl.held


def test_a_prefill_that_is_aborted_keeps_nothing_for_d() -> None:
    pair = Pair()
    pair.ask(pair.p, PROMPT, 100, dict(PREFILL), id="gone")
    pair.run(pair.now + 0.001)
    pair.abort(pair.p, "gone")
    pair.run(pair.now + 1)
    assert not pair.p.core.nixl.held
    assert pair.p.core.pool.usage == 0


@pytest.mark.parametrize("count", [1, 3])
def test_several_turns_at_once_are_each_read_once(count: int) -> None:
    """Also by a request that waited for its KV: it is scheduled twice, and reads once."""
    pair = Pair(max_model_len=500)
    turns = []
    for number in range(count):
        prompt = tuple(range(1000 + 200 * number, 1100 + 200 * number))
        turns.append((prompt, *pair.turn(prompt)))
    pair.evict()
    held = set(pair.d.core.nixl.held)
    runs = [pair.ask(pair.p, (*prompt, *said, *MORE), 1, handle) for prompt, said, handle in turns]
    pair.run(pair.now + 1)
    assert [run.over for run in runs] == ["length"] * count
    assert pulled(pair.p) == sum(handle["remote_num_tokens"] for _, _, handle in turns)
    assert not held & set(pair.d.core.nixl.held)
    assert pair.d.stats.late_notifications == 0
    for (prompt, said, _), run in zip(turns, runs, strict=True):
        whole = (*prompt, *said, *MORE)
        assert pair.answer(pair.d, whole, 8, run.handle).tokens == plain(whole, max_model_len=500)


def test_a_handle_goes_through_json_unchanged() -> None:
    """What the proxy keeps is bytes."""
    pair = Pair()
    said, handle = pair.turn()
    pair.evict()
    prompt = (*PROMPT, *said, *MORE)
    again = msgspec.json.decode(msgspec.json.encode(handle))
    assert pair.next(prompt, again)[1] == plain(prompt)
    assert pulled(pair.p) == handle["remote_num_tokens"]
