"""Pictures to ask engines about: real PNGs, within the body or behind URLs."""

import base64
import random
import struct
import zlib
from typing import Any

SQUARE = 14
"""The side of a picture's coloured squares, in pixels."""


def png(seed: object, width: int = 56, height: int = 56) -> bytes:
    """Return a picture of random coloured squares, the same for the same arguments. `width` and
    `height` are in pixels.
    """
    draw = random.Random(f"{seed} {width} {height}")
    columns, lines = -(-width // SQUARE), -(-height // SQUARE)
    squares = [[draw.randbytes(3) for _ in range(columns)] for _ in range(lines)]
    rows = [b"".join(colour * SQUARE for colour in line)[: 3 * width] for line in squares]
    data = b"".join(b"\0" + rows[y // SQUARE] for y in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(data)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


def url(picture: bytes) -> str:
    """Return the URL that holds a picture itself."""
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def asking(*content: str | bytes) -> dict[str, Any]:
    """Return a user's message of texts and pictures, which are bytes or the text of a URL."""
    return {"role": "user", "content": [part(one) for one in content]}


def part(content: str | bytes) -> dict[str, Any]:
    """Return a text or a picture as a part of a message."""
    if isinstance(content, str) and "://" not in content:
        return {"type": "text", "text": content}
    where = url(content) if isinstance(content, bytes) else content
    return {"type": "image_url", "image_url": {"url": where}}
