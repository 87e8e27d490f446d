"""How an answer's bytes are written: slowly, cut into pieces, or several chunks at once. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class WriteStyle:
    """How to write. Delays are in seconds."""

    delay: float = 0.0
    """Before every write."""
    cuts: int | None = None
    """Places at which a write is cut; 0: everywhere, None: nowhere."""
    cut_delay: float = 0.0
    """Between the pieces of one write."""
    join: int | None = None
    """Chunks per write; 0: all, None: each is written at once."""
    chance: random.Random | None = None
    """Draws the places of cuts."""


PLAIN = WriteStyle()


def cut(data: bytes, cuts: int, chance: random.Random) -> list[bytes]:
    """Cut data at `cuts` random places, or everywhere (0)."""
    most = len(data) - 1
    places = (
        range(1, most + 1)
        if not cuts or cuts >= most
        else sorted(chance.sample(range(1, most + 1), cuts))
    )
    edges = [0, *places, len(data)]
    return [data[start:end] for start, end in pairwise(edges) if end > start]
