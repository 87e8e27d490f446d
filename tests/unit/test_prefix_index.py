"""The longest common beginning, among many sequences."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.tokens.prefix_index import PrefixIndex, common_prefix

SHORT = st.binary(max_size=6).map(lambda one: bytes(byte % 3 for byte in one))


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=40))
def test_common_prefix(begin, one, other):
    pairs = zip(begin + one, begin + other, strict=False)
    expected = next(
        (at for at, (a, b) in enumerate(pairs) if a != b), len(begin) + min(len(one), len(other))
    )
    assert common_prefix(begin + one, begin + other) == expected


@given(st.lists(SHORT, max_size=30), SHORT, st.integers(1, 40))
def test_nearest_is_what_a_full_search_finds(keys, wanted, limit):
    index = PrefixIndex[int]()
    for number, key in enumerate(keys):
        index.add(key, number)
    found = list(index.nearest(wanted, limit))
    lengths = sorted((common_prefix(key, wanted) for key in keys), reverse=True)
    assert [length for length, _ in found] == lengths[:limit]
    assert all(common_prefix(keys[number], wanted) == length for length, number in found)
    assert len({number for _, number in found}) == len(found)


@given(st.lists(SHORT, min_size=1, max_size=20), st.data())
def test_what_is_removed_is_not_found(keys, data):
    index, values = PrefixIndex[list[bytes]](), [[key] for key in keys]
    for value in values:
        index.add(value[0], value)
    gone = data.draw(st.sampled_from(values))
    index.remove(gone[0], gone)
    assert len(index) == len(keys) - 1
    assert all(value is not gone for _, value in index.nearest(gone[0], 30))
    with pytest.raises(KeyError):
        index.remove(gone[0], gone)


def test_an_empty_index_finds_nothing():
    assert list(PrefixIndex[int]().nearest(b"x", 3)) == []
