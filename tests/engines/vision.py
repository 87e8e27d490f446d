"""A tiny vision-language model, its launcher, and pictures to ask engines about."""

import base64
import dataclasses
import random
import re
import struct
import zlib
from pathlib import Path
from typing import Any

from .build import Built, ensure_overlay, ensure_vision_model
from .engine import Engine
from .launcher import Launcher

FLAGS = """--limit-mm-per-prompt '{"image": 8, "video": 0}' --enable-logging-iteration-details"""
"""Additional flags for `vllm serve`. The details are `encoded`'s source."""
ENCODED = re.compile(r"encoder inputs: (\d+)")
SQUARE = 14
"""The side of a picture's coloured squares, in pixels."""


def vision_launcher(built: Built) -> Launcher:
    """Return a launcher whose engines serve the vision-language model.

    Raises EnginesUnavailable.
    """
    overlay = ensure_overlay(built, "vision")
    model = ensure_vision_model(built, overlay)
    return Launcher(dataclasses.replace(built, model=model), overlay)


def encoded(engine: Engine) -> int:
    """Return how many pictures the engine's encoder has computed so far, by its log: no metric says
    it.
    """
    text = Path(engine.log).read_text(errors="replace")
    return sum(int(found[1]) for found in ENCODED.finditer(text))


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
    return {"role": "user", "content": [_part(part) for part in content]}


def _part(part: str | bytes) -> dict[str, Any]:
    if isinstance(part, str) and "://" not in part:
        return {"type": "text", "text": part}
    return {
        "type": "image_url",
        "image_url": {"url": url(part) if isinstance(part, bytes) else part},
    }
