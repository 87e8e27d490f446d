"""The keys of a prompt's blocks."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.scheduling.prefix import keys
from pdproxy.tokens.ids import TokenIds, from_numbers

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=200)


@given(IDS, st.integers(1, 70))
def test_each_form_of_the_ids_gives_the_same_keys(ids, unit):
    start = keys.root()
    expected = keys.chain(start, keys.pack(ids[: len(ids) // unit * unit]), unit * keys.TOKEN_BYTES)
    assert len(expected) == len(ids) // unit
    assert keys.of_ids(ids, unit, start).all() == expected
    assert keys.of_ids(tuple(ids), unit, start).all() == expected
    assert keys.of_ids(from_numbers(ids), unit, start).all() == expected
    assert (
        keys.of_ids(TokenIds(json.dumps(ids, indent=1).encode(), len(ids)), unit, start).all()
        == expected
    )
    assert keys.of_packed(keys.pack(ids), unit, start).all() == expected


@given(IDS, IDS, st.integers(1, 9))
def test_keys_are_equal_as_far_as_the_beginnings_are(one, other, unit):
    common = next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    first, second = (keys.of_ids(ids, unit, keys.root()).all() for ids in (one, other))
    assert first[: common // unit] == second[: common // unit]
    assert not set(first[common // unit :]) & set(second[common // unit :])


@pytest.mark.parametrize("count", [599, 600, 601, 5000, 20000])
def test_long_prompts_are_read_in_steps(count):
    ids = [number * 7919 % 150000 for number in range(count)]
    steps = list(keys.of_ids(from_numbers(ids), 16, keys.root()))
    assert [key for step in steps for key in step] == keys.of_packed(
        keys.pack(ids), 16, keys.root()
    ).all()
    assert len(steps) > count // 2000


def test_a_step_is_made_when_it_is_asked_for_and_once():
    made = []

    def steps():
        for number in range(3):
            made.append(number)
            yield [number]

    prompt = keys.PromptKeys(1, steps())
    assert made == []
    one, other = iter(prompt), iter(prompt)
    assert next(one) == next(other) == [0]
    assert made == [0]
    assert list(prompt) == [[0], [1], [2]]
    assert list(other) == [[1], [2]]
    assert made == [0, 1, 2]


def test_roots_separate_adapters_salts_and_texts():
    roots = [
        make(*args)
        for make in (keys.root, keys.text_root)
        for args in ((), ("a",), ("b",), (None, "a"), ("a", "a"))
    ]
    assert len(set(roots)) == len(roots)
    assert keys.root("", "") == keys.root(None, None)


def test_a_long_salt_is_not_kept():
    salt = "".join(["salt "] * 1_000_000)
    keys.root("a", salt)
    keys.root(None, salt)
    assert sys.getrefcount(salt) == 2


def test_keys_take_one_pair_of_digits():
    assert all(
        0 <= key <= keys.MASK for key in keys.of_ids(list(range(1000)), 16, keys.root()).all()
    )


def test_a_text_has_keys_of_whole_units():
    text = "déjà vu ".encode() * 500
    whole = keys.of_text(text, 64, keys.text_root()).all()
    assert len(whole) == len(text) // 64
    assert keys.of_text(text[:640], 64, keys.text_root()).all() == whole[:10]
    assert keys.of_text(text[:63], 64, keys.text_root()).all() == []


@pytest.mark.parametrize("odd", [-1, 2**32, 2**80, 1.5, "1", None, [1]])
def test_odd_ids_end_the_keys(odd):
    good = list(range(4096))
    known = keys.of_ids(good, 16, keys.root()).all()
    for found in (
        keys.of_ids([*good, odd, *good], 16, keys.root()).all(),
        keys.of_ids(
            TokenIds(json.dumps([*good, odd, *good]).encode(), 8193), 16, keys.root()
        ).all(),
    ):
        assert found == known[: len(found)]
        assert len(found) > 100


@pytest.mark.parametrize(
    "odd", [b"", b"[", b"[]", b"[1,2", b"nonsense", b"[[1,2,3]]", b'{"a":1}', b"[,,,,,,]" * 5000]
)
def test_odd_json_has_no_keys(odd):
    assert keys.of_ids(TokenIds(odd, 0), 1, keys.root()).all() == []
