"""Which part of a decode engine's handle another prompt may use."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.transfer.turns import (
    DecodeHandle,
    TurnRules,
    at_host,
    fit,
    ids_text,
    read,
    release_body,
)

PARAMS = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [[3, 1, 4, 15]],
    "remote_engine_id": "d",
    "remote_request_id": "cmpl-1-0-abcdef01",
    "remote_host": "127.0.0.1",
    "remote_port": 5703,
    "tp_size": 1,
    "remote_num_tokens": 61,
    "remote_blocks_expiry_time": 7095.059126116,
    "transfer_mode": "pull",
    "new_field": {"kept": [1]},
}


def handle(**fields):
    found = read(json.dumps(PARAMS | fields).encode())
    assert isinstance(found, DecodeHandle), found
    return found


def part(common, prompt=1000, known=62, min_tokens=1, block_size=16, **fields):
    return fit(
        handle(**fields),
        known=known,
        common=common,
        prompt=prompt,
        block_size=block_size,
        min_tokens=min_tokens,
    )


def test_a_handle_as_recorded():
    found = handle()
    assert (found.tokens, found.blocks, found.groups) == (61, 4, 1)
    assert json.loads(found.params) == PARAMS


@pytest.mark.parametrize(
    "wrong",
    [
        {"do_remote_decode": False},
        {"do_remote_prefill": True},
        {"remote_block_ids": [[]]},
        {"remote_block_ids": []},
        {"remote_block_ids": None},
        {"remote_block_ids": [["1"]]},
        {"remote_num_tokens": 0},
        {"remote_num_tokens": None},
        {"remote_engine_id": None},
        {"remote_engine_id": ""},
        {"remote_request_id": "x" * 600},
        {"remote_host": None},
        {"remote_port": "5703"},
    ],
)
def test_what_is_no_handle(wrong):
    assert isinstance(read(json.dumps(PARAMS | wrong).encode()), str)


@pytest.mark.parametrize("text", [b"", b"null", b"[]", b"{", b"\xff", b"[" * 10_000])
def test_what_is_not_even_an_object(text):
    assert isinstance(read(text), str)


def test_whole_it_is_sent_as_it_came():
    found = part(61)
    assert found is not None
    assert not found.trimmed
    assert found.params == handle().params


def test_trimmed_both_fields_change_and_nothing_else():
    found = part(50)
    assert found is not None
    assert (found.tokens, found.trimmed) == (48, True)
    assert json.loads(found.params) == PARAMS | {
        "remote_num_tokens": 48,
        "remote_block_ids": [[3, 1, 4]],
    }


@pytest.mark.parametrize(
    ("why", "more"),
    [
        ("nothing in common", {"common": 0}),
        ("less than a block", {"common": 15}),
        ("less than the threshold", {"common": 60, "min_tokens": 64}),
        ("all of it is less than the threshold", {"common": 61, "min_tokens": 64}),
        ("groups of layers", {"common": 61, "remote_block_ids": [[1, 2, 3, 4], [5]]}),
        ("a prompt of one block", {"common": 16, "prompt": 16}),
    ],
)
def test_what_is_not_used(why, more):
    assert part(**more) is None, why


def test_the_last_token_of_a_prompt_is_not_used():
    found = part(61, prompt=61)
    assert found is not None
    assert (found.tokens, found.trimmed) == (48, True)


def test_tokens_whose_ids_are_not_known_are_not_used():
    found = part(61, known=47)
    assert found is not None
    assert found.tokens == 32


def test_blocks_that_were_taken_ahead_are_not_sent():
    """Blocks are paired from the end: one more than the tokens need would shift them all."""
    found = part(61, remote_block_ids=[[3, 1, 4, 15, 9]])
    assert found is not None
    assert json.loads(found.params)["remote_block_ids"] == [[3, 1, 4]]


def test_a_handle_with_too_few_blocks_is_cut_to_what_they_hold():
    found = part(61, remote_block_ids=[[3, 1]])
    assert found is not None
    assert (found.tokens, json.loads(found.params)["remote_block_ids"]) == (32, [[3, 1]])


@given(
    tokens=st.integers(1, 200),
    blocks=st.integers(1, 20),
    known=st.integers(0, 210),
    common=st.integers(0, 210),
    prompt=st.integers(1, 210),
    block_size=st.sampled_from([1, 16]),
)
def test_never_more_than_is_common_and_known(tokens, blocks, known, common, prompt, block_size):
    given_ = handle(remote_num_tokens=tokens, remote_block_ids=[list(range(blocks))])
    found = fit(
        given_, known=known, common=common, prompt=prompt, block_size=block_size, min_tokens=1
    )
    if found is None:
        return
    params = json.loads(found.params)
    (ids,) = params["remote_block_ids"]
    assert params["remote_num_tokens"] == found.tokens <= min(tokens, known, common, prompt - 1)
    assert len(ids) == -(-found.tokens // block_size)
    assert ids == list(range(len(ids)))
    if found.trimmed:
        assert found.tokens % block_size == 0


def test_a_release_turns_the_direction_around():
    body = json.loads(release_body("tiny", handle()))
    params = body.pop("kv_transfer_params")
    assert body == {"model": "tiny", "prompt": "x", "max_tokens": 0, "stream": False}
    assert params == PARAMS | {"do_remote_prefill": True, "do_remote_decode": False}
    assert "model" not in json.loads(release_body(None, handle()))


@pytest.mark.parametrize(
    "ids",
    [b"", b"[", b"]", b"[]", b"null", b"{}", b"[-1]", b"[1.5]", b'["1"]', b"[1e400]", b"[[1]]"],
)
def test_ids_that_are_none(ids):
    assert ids_text(ids) is None


def test_ids_as_texts():
    assert ids_text(b"[1, 256,\n4294967295]") == b"1,256,4294967295,"
    assert ids_text(b"[7]") == b"7,"
    assert TurnRules().read is read


def test_a_handle_at_another_host() -> None:
    """All other fields stay as the engine wrote them."""
    handle = read(
        b'{"do_remote_decode":true,"remote_engine_id":"e","remote_request_id":"r","remote_host":'
        b'"h","remote_port":1,'
        b'"remote_block_ids":[[1,2]],"remote_num_tokens":20,"more":1.50}'
    )
    assert isinstance(handle, DecodeHandle)
    placed = at_host(handle, "nat")
    assert placed.params == handle.params.replace(b'"h"', b'"nat"')
    assert (placed.tokens, placed.blocks, placed.request_id) == (20, 2, "r")
