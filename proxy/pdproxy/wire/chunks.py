"""HTTP/1.1 chunks as bytes: the framing of a stream, recognised and made without a parser.

Servers write the size of a chunk in lower-case hexadecimal digits without zeros before them. One that is framed so, and whole, is
known by its length alone; everything else, though it may be right, is for the parser.
"""

from __future__ import annotations

LONGEST = 4096
"""Bytes with the framing. Longer ones are rare, and a table for them would be memory for nothing."""
_NO_HEAD = b"no chunk is as long as this"


def _head(length: int) -> bytes:
    for digits in (1, 2, 3):
        head = b"%x\r\n" % max(0, length - digits - 4)
        if len(head) == digits + 2 and head != b"0\r\n":
            return head
    return _NO_HEAD


HEADS = [_head(length) for length in range(LONGEST)]
"""What a whole chunk begins with, by its length in bytes with all of its framing."""
LINES = [b"%x\r\n" % size for size in range(LONGEST + 8)]
"""What stands before a chunk's payload, by the bytes of the payload."""
SIZES = {b"%x" % size: size for size in range(14, LONGEST)}
"""Bytes of the payload, by the line before it without its end. The least is that of a stream's end mark; thousands of
smaller ones are for the parser, which is faster."""
LONGEST_LINE = 5
"""Bytes of such a line with its end."""


def whole(data: bytes) -> tuple[list[bytes], int]:
    """Return the payloads of the whole chunks at the beginning of `data`, and where the rest begins."""
    found: list[bytes] = []
    at = 0
    while (line := data.find(b"\r\n", at, at + LONGEST_LINE)) > 0:
        size = SIZES.get(data[at:line])
        if size is None:
            break
        end = line + 2 + size
        if data[end : end + 2] != b"\r\n":
            break
        found.append(data[line + 2 : end])
        at = end + 2
    return found, at


def chunk(payload: bytes) -> bytes:
    """Frame bytes, at least one, as a chunk."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)
