"""The tables of chunks: each length of a whole chunk has the size line that a server writes, and no
other length has one.
"""

from __future__ import annotations

from pdproxy.wire.chunks import (
    MAX_CHUNK,
    MAX_SIZE_LINE,
    PAYLOAD_SIZE,
    SIZE_LINE_OF_CHUNK,
    SIZE_LINE_OF_PAYLOAD,
    chunk,
)


def test_the_tables_know_what_a_server_writes() -> None:
    written = {len(chunk(bytes(size))): b"%x\r\n" % size for size in range(1, MAX_CHUNK)}
    for length, line in enumerate(SIZE_LINE_OF_CHUNK):
        if length in written:
            assert line == written[length] == SIZE_LINE_OF_PAYLOAD[int(line, 16)]
            assert len(line) <= MAX_SIZE_LINE
        else:
            assert not line[:1].isdigit(), length
    assert PAYLOAD_SIZE[b"fff"] == 0xFFF
    assert b"0" not in PAYLOAD_SIZE
