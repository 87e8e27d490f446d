"""What a generator has to know of the engines it asks: their model's name, sizes, and token ids
that mean something.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dialect:
    """One kind of engines.

    `ids`: token ids that are ordinary text, first and one past the last. `eos`: the id that ends.
    `half`: the id of the first byte of a character of two bytes.
    """

    model: str
    block_size: int
    max_model_len: int
    vocab_size: int
    ids: tuple[int, int]
    eos: int
    half: int
    long_prompt: int
    """Tokens of a long prompt: several times what one step of an engine takes, if the engines are
    fast enough.
    """
    longest_answer: int
