"""Bytes that come in pieces are whole again, whatever holds them meanwhile."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdproxy.kit.pieces import FEW, Pieces, added, in_buffer, joined

PIECES = st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=3 * FEW)


def held(pieces: list[bytes]) -> Pieces:
    found: Pieces = pieces[0]
    for piece in pieces[1:]:
        found = added(found, piece)
    return found


@given(PIECES)
def test_what_was_added_is_joined(pieces: list[bytes]) -> None:
    """All pieces come out, in their order."""
    assert joined(held(pieces)) == b"".join(pieces)
    assert joined(in_buffer(held(pieces))) == b"".join(pieces)


def test_many_pieces_are_no_list() -> None:
    """A list of them would cost many times their bytes."""
    few, many = held([b"x"] * FEW), held([b"x"] * (FEW + 1))
    assert isinstance(few, list)
    assert isinstance(many, bytearray)


def test_large_pieces_are_not_copied_before_they_are_joined() -> None:
    """Each is the object that came."""
    pieces = [bytes([number]) * 1000 for number in range(3)]
    found = held(pieces)
    assert isinstance(found, list)
    assert all(one is piece for one, piece in zip(found, pieces, strict=True))
    assert joined(pieces[0]) is pieces[0]
