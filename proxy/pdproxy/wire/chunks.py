"""HTTP/1.1 chunks as bytes: the framing of a stream, read and written without a parser.

Servers write the size of a chunk in lower-case hexadecimal digits without leading zeros. A whole
chunk in this form is known by its length alone. The parser reads every other form.
"""

from __future__ import annotations

MAX_CHUNK = 4096
"""Bytes of a chunk with its framing that the tables below know. Longer chunks are rare."""
_NO_SIZE_LINE = b"no chunk has this length"


def _size_line(length: int) -> bytes:
    for digits in (1, 2, 3):
        line = b"%x\r\n" % max(0, length - digits - 4)
        if len(line) == digits + 2 and line != b"0\r\n":
            return line
    return _NO_SIZE_LINE


SIZE_LINE_OF_CHUNK = [_size_line(length) for length in range(MAX_CHUNK)]
"""The size line of a whole chunk, by the length of the chunk in bytes with all of its framing."""
SIZE_LINE_OF_PAYLOAD = [b"%x\r\n" % size for size in range(MAX_CHUNK + 8)]
"""The size line of a chunk, by the bytes of its payload."""
PAYLOAD_SIZE = {b"%x" % size: size for size in range(14, MAX_CHUNK)}
"""Bytes of the payload, by the size line without its end. The smallest is that of a stream's end
mark: thousands of smaller chunks are faster in the parser.
"""
MAX_SIZE_LINE = 5
"""Bytes of such a line with its end."""


def whole_chunks(data: bytes) -> tuple[list[bytes], int]:
    """Return the payloads of the whole chunks at the beginning of `data`, and the offset of the
    rest.
    """
    payloads: list[bytes] = []
    at = 0
    while (line := data.find(b"\r\n", at, at + MAX_SIZE_LINE)) > 0:
        size = PAYLOAD_SIZE.get(data[at:line])
        if size is None:
            break
        end = line + 2 + size
        if data[end : end + 2] != b"\r\n":
            break
        payloads.append(data[line + 2 : end])
        at = end + 2
    return payloads, at


def chunk(payload: bytes) -> bytes:
    """Return `payload`, at least one byte, as a chunk."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)
