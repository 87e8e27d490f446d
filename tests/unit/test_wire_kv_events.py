"""Reading of KV events: recorded ones, older encodings, and everything that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.wire.kv_events import (
    END,
    MAX_BLOCKS,
    MAX_EVENTS,
    MAX_HASH,
    MAX_PARTS,
    MAX_TOKENS,
    Cleared,
    Event,
    EventPublisher,
    Removed,
    Stored,
    Unreadable,
    address_of,
    read_batch,
    read_event,
    read_sequence,
    read_sources,
    replayed,
    zmq_address,
)

RECORDED = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "kv_events.jsonl").read_text().splitlines()
]
NAMES = {"BlockStored": Stored, "BlockRemoved": Removed, "AllBlocksCleared": Cleared}
FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "token_ids": list(range(32)),
    "block_size": 16,
}
encode = msgspec.msgpack.encode


def read(event: object) -> tuple[Event | Unreadable, bool]:
    return read_event(encode(event))


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda one: f"{one['topic']}-{one['seq']}")
def test_recorded_messages_are_read_whole(recorded: dict[str, Any]) -> None:
    payload = bytes.fromhex(recorded["hex"])
    ts, events, rank = msgspec.msgpack.decode(payload)
    batch = read_batch(payload)
    assert batch is not None
    assert (batch.ts, batch.rank, len(batch.events)) == (ts, rank, len(events))
    for raw, expected in zip(batch.events, events, strict=True):
        event, unknown = read_event(raw)
        assert not unknown
        assert isinstance(event, NAMES[expected["type"]])
        for name in (
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "medium",
            "group_idx",
        ):
            if name in expected:
                assert getattr(event, name) == expected[name]
        if isinstance(event, Stored):
            assert (event.counts, event.consistent) == (True, True)


def test_recordings_have_integers_and_bytes_as_hashes() -> None:
    kinds = set()
    for one in RECORDED:
        for event in msgspec.msgpack.decode(bytes.fromhex(one["hex"]))[1]:
            kinds |= {type(found) for found in event.get("block_hashes", ())}
    assert kinds == {int, bytes}


@pytest.mark.parametrize("count", range(4, len(FIELDS) + 1))
def test_arrays_of_older_releases_have_fewer_fields(count: int) -> None:
    values = [[1, 2], 7, list(range(32)), 16, None, "CPU", "adapter", [["adapter"], None]]
    event, unknown = read(["BlockStored", *values[:count]])
    assert isinstance(event, Stored)
    assert not unknown
    assert (event.block_hashes, event.parent_block_hash, event.block_size) == ([1, 2], 7, 16)
    assert event.medium == ("CPU" if count > 5 else None)
    assert event.lora_name == ("adapter" if count > 6 else None)
    assert event.extra_keys == ([("adapter",), None] if count > 7 else None)


def test_other_events_as_arrays() -> None:
    event, _ = read(["BlockRemoved", [b"x" * 32]])
    assert isinstance(event, Removed)
    assert (event.block_hashes, event.medium, event.group_idx) == ([b"x" * 32], None, None)
    assert isinstance(read(["AllBlocksCleared"])[0], Cleared)


@pytest.mark.parametrize(
    "event",
    [
        STORED | {"from_the_future": {"a": [1]}},
        ["BlockStored", [1, 2], None, list(range(32)), 16, *[None] * 10, "more"],
        {"type": "AllBlocksCleared", "why": "x"},
        ["BlockRemoved", [1], "GPU", 0, None, None, "more"],
    ],
)
def test_unknown_fields_are_reported_and_the_event_is_read(event: object) -> None:
    found, unknown = read(event)
    assert isinstance(found, Stored | Removed | Cleared)
    assert unknown


@pytest.mark.parametrize("event", [{"type": "BlockMoved", "x": 1}, ["BlockMoved", 1]])
def test_unknown_events_are_skipped(event: object) -> None:
    assert read(event) == (Unreadable.UNKNOWN, False)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\xc0",
        b"\x80",
        b"\x90",
        b"\x91" * 100_000,
        encode("BlockStored"),
        encode(["BlockStored"]),
        encode([7, [1]]),
        encode({"type": 7}),
        encode({"type": "BlockStored"}),
        encode(STORED | {"block_size": -1}),
        encode(STORED | {"block_size": "16"}),
        encode(STORED | {"token_ids": [-1]}),
        encode(STORED | {"token_ids": [1 << 32]}),
        encode(STORED | {"token_ids": ["a"]}),
        encode(STORED | {"block_hashes": [b"x" * (MAX_HASH + 1)]}),
        encode(STORED | {"block_hashes": [1.5]}),
        encode(STORED | {"medium": "x" * 2000}),
        encode(STORED | {"group_idx": 1 << 16}),
        encode(STORED | {"extra_keys": [[{"a": 1}], None]}),
        encode(STORED | {"extra_keys": [[[["too deep"]]], None]}),
        encode(STORED | {"block_hashes": [1] * (MAX_BLOCKS + 1)}),
        encode(STORED | {"token_ids": [1] * (MAX_TOKENS + 1)}),
        encode(STORED | {"extra_keys": [None] * (MAX_BLOCKS + 1)}),
        encode(STORED | {"extra_keys": [["a"] * (MAX_PARTS + 1), None]}),
        encode(STORED | {"extra_keys": [[["a"] * (MAX_PARTS + 1)], None]}),
        encode({"type": "BlockRemoved", "block_hashes": [1] * (MAX_BLOCKS + 1)}),
        encode(STORED)[:-1],
        encode(STORED)[:-20] + b"\xdd\xff\xff\xff\xff",
    ],
    ids=lambda raw: f"{raw[:12].hex()}-{len(raw)}",
)
def test_what_is_no_event_is_skipped(raw: bytes) -> None:
    assert read_event(raw)[0] is Unreadable.UNDECODABLE


def test_extra_keys_are_tuples_that_can_be_keys() -> None:
    event, _ = read(STORED | {"extra_keys": [["lora", ["image", 3], "salt", b"digest"], None]})
    assert isinstance(event, Stored)
    assert event.extra_keys == [("lora", ("image", 3), "salt", b"digest"), None]
    assert len(set(event.extra_keys)) == 2


def test_extra_keys_of_one_kind_stay_as_they_are() -> None:
    given = [("a", "b", 1, 2.5, True, b"digest", None), ("a",), None]
    event, _ = read(STORED | {"extra_keys": given})
    assert isinstance(event, Stored)
    assert event.extra_keys == given


def test_the_longest_event_is_read() -> None:
    hashes, ids = [1] * MAX_BLOCKS, [1] * MAX_TOKENS
    event, _ = read(
        STORED | {"block_hashes": hashes, "token_ids": ids, "extra_keys": [["a"] * MAX_PARTS] * 2}
    )
    assert isinstance(event, Stored)
    assert (len(event.block_hashes), len(event.token_ids)) == (MAX_BLOCKS, MAX_TOKENS)


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        (None, True),
        ("full_attention", True),
        ("mla_attention", True),
        ("sliding_window", False),
        ("mamba", False),
        ("unknown", False),
    ],
)
def test_only_groups_with_full_attention_count(kind: str | None, counts: bool) -> None:
    event, _ = read(STORED | {"kv_cache_spec_kind": kind})
    assert isinstance(event, Stored)
    assert event.counts is counts


@pytest.mark.parametrize(
    ("changes", "consistent"),
    [
        ({}, True),
        ({"token_ids": []}, True),
        ({"token_ids": [1] * 31}, False),
        ({"extra_keys": [None]}, False),
        ({"block_size": 0}, False),
        ({"block_size": 0, "token_ids": []}, True),
        ({"token_ids": [1] * 64, "kv_cache_spec_kind": "sliding_window"}, True),
    ],
)
def test_numbers_of_blocks_and_tokens_must_agree(changes: dict[str, Any], consistent: bool) -> None:
    event, _ = read(STORED | changes)
    assert isinstance(event, Stored)
    assert event.consistent is consistent


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc0",
        b"\x90",
        encode([1.0]),
        encode([1.0, {}]),
        encode(["now", []]),
        encode([1.0, [], "rank"]),
        b"\x92\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff\x01",
        b"\x92\xcb" + bytes(8) + b"\x91" * 100_000,
        encode([1.0, [None] * (MAX_EVENTS + 1)]),
    ],
    ids=lambda payload: payload[:12].hex(),
)
def test_what_is_no_batch_is_none(payload: bytes) -> None:
    assert read_batch(payload) is None


def test_a_batch_may_lack_its_rank_and_have_more_fields() -> None:
    for payload, rank in ((encode([2, []]), None), (encode([2.5, [], 3, "more"]), 3)):
        batch = read_batch(payload)
        assert batch is not None
        assert (batch.events, batch.rank) == ([], rank)


@given(st.binary(max_size=200))
def test_no_bytes_make_it_fail(raw: bytes) -> None:
    event, _ = read_event(raw)
    assert isinstance(event, Stored | Removed | Cleared | Unreadable)
    batch = read_batch(raw)
    assert batch is None or len(batch.events) <= MAX_EVENTS


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.text(max_size=5)
    | st.binary(max_size=5)
)
ANYTHING = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
)


@given(st.dictionaries(st.sampled_from([*STORED, *FIELDS, "group_idx", "x"]), ANYTHING))
def test_any_values_of_fields_are_an_event_or_none(changes: dict[str, Any]) -> None:
    event, _ = read(STORED | changes)
    if isinstance(event, Stored):
        assert all(isinstance(one, int | bytes) for one in event.block_hashes)
        assert all(0 <= one < 1 << 32 for one in event.token_ids)
        hash(tuple(event.extra_keys or ()))


HASH = st.integers(0, (1 << 64) - 1) | st.binary(min_size=32, max_size=32)


@given(
    st.lists(HASH, min_size=1, max_size=8),
    st.none() | HASH,
    st.integers(1, 32),
    st.sampled_from(["GPU", "CPU", None]),
)
def test_both_encodings_say_the_same(
    hashes: list[int | bytes], parent: int | bytes | None, size: int, medium: str | None
) -> None:
    values = (hashes, parent, list(range(size * len(hashes))), size, None, medium)
    as_map, _ = read({"type": "BlockStored", **dict(zip(FIELDS, values, strict=False))})
    as_array, _ = read(["BlockStored", *values])
    assert isinstance(as_map, Stored)
    assert isinstance(as_array, Stored)
    for name in (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "medium",
        "extra_keys",
        "group_idx",
    ):
        assert getattr(as_map, name) == getattr(as_array, name)


def test_sequence_numbers() -> None:
    assert read_sequence(bytes(7) + b"\x05") == 5
    assert [
        read_sequence(frame) for frame in (b"", bytes(7), bytes(9), END, b"\x80" + bytes(7))
    ] == [None] * 5


def test_answers_to_a_replay() -> None:
    number = (9).to_bytes(8, "big")
    assert replayed([b"", b"topic", number, b"payload"]) == (9, b"payload")
    assert replayed([b"", number, b"payload"]) == (9, b"payload")  # without a topic
    assert replayed([b"", b"", END, b""]) is None
    assert replayed([b"", END, b""]) is None
    for wrong in ([], [b""], [b"x", b"", number, b""], [b"", b"", b"12", b""], [b""] * 5):
        with pytest.raises(ValueError, match="no "):
            replayed(wrong)


def test_sources_of_an_engine() -> None:
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:1",
        "replay_endpoint": None,
    }
    body = json.dumps(
        {"1": config, "0": config | {"topic": "t", "hwm": 3}, "2": config | {"publisher": "null"}}
    )
    assert read_sources(body.encode()) == {
        0: EventPublisher("tcp://*:1", None, "t"),
        1: EventPublisher("tcp://*:1"),
    }
    assert read_sources(b"{}") == {}
    for wrong in (
        b"",
        b"[]",
        b'{"a": {}}',
        b'{"-1": {}}',
        b'{"0": 1}',
        b'{"0": {"endpoint": 5}}',
        b"\xff",
    ):
        assert read_sources(wrong) is None


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://*:5557", ("engine", 5557, True)),
        ("tcp://0.0.0.0:5557", ("engine", 5557, True)),
        ("tcp://[::]:5557", ("engine", 5557, True)),
        ("tcp://10.0.0.1:5557", ("10.0.0.1", 5557, False)),
        ("tcp://[fd00::1]:5557", ("fd00::1", 5557, False)),
        ("tcp://host.example:1", ("host.example", 1, False)),
        ("tcp://*:0", None),
        ("tcp://*:65536", None),
        ("tcp://*", None),
        ("tcp://:5557", None),
        ("tcp://a b:5557", None),
        ("tcp://a;b:5557", None),
        ("ipc:///tmp/x", None),
        ("inproc://x", None),
        ("", None),
        ("tcp://*:²", None),
    ],
)
def test_endpoints(endpoint: str, expected: tuple[str, int, bool] | None) -> None:
    assert address_of(endpoint, "engine") == expected


def test_addresses_for_zmq() -> None:
    assert zmq_address("fd00::1", 5) == "tcp://[fd00::1]:5"
    assert zmq_address("a", 5) == "tcp://a:5"
