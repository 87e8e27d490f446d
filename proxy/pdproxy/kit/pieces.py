"""Bytes that come in pieces: a few stay as they came until all are joined, many go to one buffer.

A list of many small pieces would cost many times their bytes. A buffer that grows copies large ones
again and again.
"""

from __future__ import annotations

FEW = 16
"""Pieces that stay as they came."""
Pieces = bytes | bytearray | list[bytes]
"""One piece, all of them in one buffer, or a few."""


def added(held: Pieces, piece: bytes) -> Pieces:
    """Return what is held with one piece more. `held` may change, and is not empty.

    To a buffer, callers add by themselves: there may be a piece for each byte.
    """
    if isinstance(held, bytes):
        return [held, piece]
    if isinstance(held, list):
        if len(held) < FEW:
            held.append(piece)
            return held
        held = bytearray().join(held)
    held += piece
    return held


def in_buffer(held: Pieces) -> Pieces:
    """Return what is held, in one buffer if it is several pieces."""
    return bytearray().join(held) if isinstance(held, list) else held


def joined(held: Pieces) -> bytes:
    """Return the bytes of all pieces."""
    if isinstance(held, bytes):
        return held
    return b"".join(held) if isinstance(held, list) else bytes(held)
