"""What a fingerprint depends on, and what it costs at most."""

from __future__ import annotations

import json
from functools import partial

import msgspec
import pytest

from pdproxy.serving.dispatch.fingerprint import MOST, MOST_FIELDS, PART, fields_of, keyed

BODY = {"model": "m", "prompt": "x" * 300, "max_tokens": 4}

KEY = b"a key"


def body(**fields: object) -> bytes:
    return json.dumps({**BODY, **fields}).encode()


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (
            body(
                stream=True, user="somebody", request_id="7", stream_options={"include_usage": True}
            ),
            True,
        ),
        (json.dumps(dict(reversed(BODY.items()))).encode(), True),
        (body(max_tokens=5), False),
        (body(prompt="x" * 301), False),
        (body(cache_salt="a"), False),
        (b"no JSON", False),
        (b'{"a":1,' * 2, False),
    ],
)
def test_the_same_request_has_the_same_one(other: bytes, same: bool) -> None:
    fingerprint = partial(keyed(KEY), "/a")
    assert (fingerprint(fields_of(other)) == fingerprint(fields_of(body()))) is same


def test_another_key_makes_other_ones() -> None:
    assert keyed(KEY)("/a", fields_of(body())) != keyed(b"other")("/a", fields_of(body()))


def test_each_route_has_its_own() -> None:
    fingerprint = keyed(KEY)
    assert fingerprint("/a", fields_of(body())) != fingerprint("/b", fields_of(body()))


def test_names_and_values_are_kept_apart() -> None:
    fingerprint = partial(keyed(KEY), "/a")
    assert fingerprint({"ab": msgspec.Raw(b"c")}) != fingerprint({"a": msgspec.Raw(b"bc")})


def test_of_large_fields_their_ends_and_lengths_count() -> None:
    """So it takes no more time than for `MOST` bytes, however large a body is and however many
    fields it has.
    """
    fingerprint = partial(keyed(KEY), "/a")
    middle = bytes(PART * 3)
    found = {
        fingerprint({"a": msgspec.Raw(one)})
        for one in (b"1" + middle, b"2" + middle, middle + b"2", middle)
    }
    assert len(found) == 4
    assert fingerprint({"a": msgspec.Raw(middle + b"1" + middle)}) == fingerprint(
        {"a": msgspec.Raw(middle + b"2" + middle)}
    )


def test_of_many_fields_the_first_and_their_number_count() -> None:
    fingerprint = partial(keyed(KEY), "/a")
    fields = {f"{number:03}": msgspec.Raw(b"1") for number in range(MOST_FIELDS + 1)}
    assert fingerprint(fields) == fingerprint({**fields, "064": msgspec.Raw(b"2")})
    assert fingerprint(fields) != fingerprint({**fields, "063": msgspec.Raw(b"2")})
    assert fingerprint(fields) != fingerprint({**fields, "065": msgspec.Raw(b"1")})


def test_what_is_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0

    class Counting:
        def __init__(self, **_: object) -> None: ...

        def update(self, data: bytes) -> None:
            nonlocal read
            read += len(data)

        def digest(self) -> bytes:
            return b""

    monkeypatch.setattr("hashlib.blake2b", Counting)
    keyed(KEY)("/a", {str(number): msgspec.Raw(bytes(3 * PART)) for number in range(40)})
    assert MOST <= read < MOST + 40 * 100
    large = b'{"a":"' + bytes(MOST).replace(b"\0", b"x") + b'"}'
    assert [*fields_of(large)] == [""]
