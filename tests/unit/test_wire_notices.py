"""Notices of engines: three wires end as one struct, and no bytes at all make the reader raise."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdproxy.wire import lmcache_telemetry
from pdproxy.wire.notices import MAX_BYTES, Notice, NoticeEvent, decode, request_id_of

OURS = {
    "type": "PdproxyKV",
    "v": 1,
    "event": "ready",
    "req_id": "pd-1",
    "internal_id": "cmpl-pd-1-0-0123abcd",
    "remote_req_id": "cmpl-pd-1-0-0123abcd",
    "engine_id": "e",
    "role": "P",
    "t": 12.5,
    "wall": 1.7e9,
    "tokens": 4,
    "cached": 2,
    "created": 1,
    "blocks": 1,
    "params": b'{"remote_block_ids":[[1]]}',
    "prompt_ids": b"[1,2,3,4]",
    "dropped": 3,
}
WILD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


def _packed(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)


def test_ours() -> None:
    """Every field arrives under its name, and one that a later release adds does no harm."""
    assert decode(_packed(OURS | {"later": {"x": [1]}})) == Notice(
        event=NoticeEvent.READY,
        request_id="pd-1",
        remote_request_id="cmpl-pd-1-0-0123abcd",
        role="P",
        engine_id="e",
        at=12.5,
        tokens=4,
        cached_tokens=2,
        created_cache_tokens=1,
        blocks=1,
        params=b'{"remote_block_ids":[[1]]}',
        token_ids=b"[1,2,3,4]",
        dropped=3,
    )
    moved = {
        "type": "PdproxyKV",
        "v": 1,
        "event": "loaded",
        "req_id": "x",
        "bytes": 1 << 40,
        "seconds": 0.25,
        "rank": 1,
    }
    assert decode(_packed(moved | {"world": 2})) == Notice(
        event=NoticeEvent.LOADED, request_id="x", moved_bytes=1 << 40, seconds=0.25, rank=1, world=2
    )


@pytest.mark.parametrize("event", list(NoticeEvent))
def test_events(event: NoticeEvent) -> None:
    """Each event has its word."""
    notice = decode(_packed(OURS | {"event": event.value}))
    assert notice is not None
    assert notice.event is event


@pytest.mark.parametrize(
    "tag", [{"type": "ProxyNotif"}, {"type": "NixlProxyNotif"}, {"type": None}, {}]
)
def test_lmcache(tag: dict[str, Any]) -> None:
    """Three generations of LMCache say nothing but whose KV is ready; their further fields are
    theirs.
    """
    assert decode(_packed(tag | {"req_id": "a", "tokens": "many", "event": 3})) == Notice(
        event=NoticeEvent.READY, request_id="a"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "Other"},
        {"type": 1},
        {"v": 2},
        {"v": None},
        {"event": "melted"},
        {"req_id": ""},
        {"req_id": 7},
        {"req_id": None},
        {"req_id": "x" * 513},
        {"tokens": -1},
        {"tokens": 1.5},
        {"tokens": 1 << 60},
        {"bytes": "1"},
        {"t": float("nan")},
        {"t": float("inf")},
        {"seconds": -0.1},
        {"dropped": None},
        {"rank": True},
        {"reason": "x" * 201},
        {"params": {}},
        {"params": b"[]"},
        {"params": b'{"a":'},
        {"params": b'{"a":1}}'},
        {"params": b""},
        {"prompt_ids": b"{}"},
        {"prompt_ids": b""},
        {"prompt_ids": b"["},
        {"prompt_ids": b"1,2"},
        {"prompt_ids": b"[1,,2]"},
        {"prompt_ids": b"[1,2],[3]"},
        {"prompt_ids": b"[1.5]"},
        {"prompt_ids": b"[01]"},
        {"prompt_ids": b"[1]\n"},
    ],
    ids=repr,
)
def test_what_is_no_notice(wrong: dict[str, Any]) -> None:
    """A wrong type or value anywhere makes the whole message nobody's; the rest of it is not
    believed either.
    """
    assert decode(_packed(OURS)) is not None
    assert decode(_packed(OURS | wrong)) is None


@pytest.mark.parametrize("missing", ["req_id", "v", "event"])
def test_what_must_be_there(missing: str) -> None:
    """Without an id there is nobody to tell; without the rest nothing to be told."""
    assert decode(_packed({key: value for key, value in OURS.items() if key != missing})) is None


def test_the_bound() -> None:
    """A message of just the bound's length is read, one byte more is not."""
    frame = len(_packed(OURS | {"params": b"{}" + b" " * 70000})) - 70000
    room = MAX_BYTES - frame
    assert decode(_packed(OURS | {"params": b"{}" + b" " * room})) is not None
    assert decode(_packed(OURS | {"params": b"{}" + b" " * (room + 1)})) is None


@given(st.binary())
@example(b"")
@example(b"\x91" * 5000)
@example(b"\x81\xa4type" * 3000)
@example(b"\x81\xa6req_id\xa2\xff\xfe")
@example(b"\xdf\xff\xff\xff\xff")
@example(b'{"req_id":"x"}')
def test_any_bytes(payload: bytes) -> None:
    """Whatever comes, it is a notice or none."""
    assert isinstance(decode(payload), Notice | None)


@given(
    st.dictionaries(
        st.sampled_from([*sorted(OURS), "bytes", "seconds", "rank", "world", "reason"]), WILD
    )
)
def test_any_values(changed: dict[str, Any]) -> None:
    """Fields of any type never raise; what is a notice has sound values."""
    notice = decode(_packed(OURS | changed))
    assert isinstance(notice, Notice | None)
    if notice is not None and notice.params is not None:
        assert isinstance(json.loads(notice.params), dict)


@given(st.lists(st.integers(0, 2**31)))
def test_any_ids(ids: list[int]) -> None:
    """Token ids come through to the digit."""
    notice = decode(_packed(OURS | {"prompt_ids": msgspec.json.encode(ids)}))
    assert notice is not None
    assert notice.token_ids is not None
    assert json.loads(notice.token_ids) == ids


@given(st.text(min_size=1), st.integers(0, 2**32 - 1), st.integers(0, 99))
def test_internal_ids(request_id: str, suffix: int, index: int) -> None:
    """The id that was minted is found in what vLLM makes of it, whatever is in it."""
    assert request_id_of(f"cmpl-{request_id}-{index}-{suffix:08x}") == request_id
    assert request_id_of(f"chatcmpl-{request_id}-{suffix:08x}") == request_id
    assert request_id_of(f"generate-tokens-{request_id}-{suffix:08x}") == request_id


def test_the_internal_id_of_a_response() -> None:
    """Engines add the number of its turn."""
    assert request_id_of("ab12_0-0123abcd") == "ab12"


@pytest.mark.parametrize(
    "other",
    ["", "x", "cmpl-x", "cmpl-x-0", "resp_1-0123abcd", "cmpl-x-0-0123ABCD", "cmpl--0-01234567"],
)
def test_other_ids(other: str) -> None:
    """An id of another form is left as it is."""
    assert request_id_of(other) == other


@pytest.mark.parametrize("more", [{"rank": 1 << 16}, {"world": (1 << 16) + 1}])
def test_numbers_of_ranks_that_no_engine_has(more: dict[str, int]) -> None:
    """They would have to be waited for, and named."""
    assert decode(_packed(OURS)) is not None
    assert decode(_packed(OURS | more)) is None


def test_telemetry_of_many_requests() -> None:
    """Each name costs microseconds, and a post may hold 300,000."""
    few = [f"cmpl-{number}-0-9cc849e2" for number in range(lmcache_telemetry.MAX_NAMES)]
    post = {"event": lmcache_telemetry.STORED, "request_ids_set": few}
    assert (
        len(lmcache_telemetry.notices(msgspec.json.encode(post)) or [])
        == lmcache_telemetry.MAX_NAMES
    )
    post["request_ids_set"] = [*few, "one more"]
    assert lmcache_telemetry.notices(msgspec.json.encode(post)) is None
