"""The built-in tokenizer: reversible, no files, fast enough for prompts of a megabyte.

Ids 0 to 7 are special, the next 256 are single bytes, the rest are frequent English and code words,
each with and without a leading space. A word that is not among them is cut into the longest pieces
that are, and the remainder goes byte by byte; so characters outside ASCII are several tokens, as
with any byte-level BPE.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from pdproxy_lab.sim.vocabulary import BREAKS, WORDS

BOS, EOS, IM_START, IM_END = 0, 1, 2, 3
SPECIAL = (
    "<|bos|>",
    "<|eos|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)
THINK, THINK_END = SPECIAL.index("<think>"), SPECIAL.index("</think>")
TOOL_CALL = SPECIAL.index("<tool_call>")
FIRST_BYTE = len(SPECIAL)
FIRST_PIECE = FIRST_BYTE + 256

_SPLIT = re.compile(r" ?[A-Za-z_]+|[0-9]|\s+|[^A-Za-z_0-9\s]+", re.ASCII)
_SPECIALS = re.compile("(" + "|".join(re.escape(name) for name in SPECIAL) + ")")


def _pieces() -> tuple[bytes, ...]:
    words = list(dict.fromkeys(WORDS.split()))
    texts = [*(" " + word for word in words), *words, *BREAKS]
    return tuple(piece.encode() for piece in dict.fromkeys(texts) if len(piece) > 1)


PIECES = _pieces()
WITH_SPACE = range(
    FIRST_PIECE,
    FIRST_PIECE + sum(piece[:1] == b" " and piece.strip().isalpha() for piece in PIECES),
)
"""The ids of the words with a leading space: what running text is made of."""
_IDS = {piece: FIRST_PIECE + number for number, piece in enumerate(PIECES)}
_LONGEST = max(map(len, PIECES))
_BYTES = tuple(bytes([value]) for value in range(256))
_KNOWN = (*(name.encode() for name in SPECIAL), *_BYTES, *PIECES)
VOCABULARY = (*_KNOWN, *(f"<|reserved_{number}|>".encode() for number in range(len(_KNOWN), 4096)))
"""Reserved ids come neither from text nor from the model; a prompt of ids may have them."""
PLACEHOLDER = len(VOCABULARY) - 1
"""The reserved id that a model that sees has in the place of pictures."""


@lru_cache(maxsize=16384)
def _encode_part(part: str) -> tuple[int, ...]:
    data = part.encode("utf-8", "surrogatepass")
    whole = _IDS.get(data)
    if whole is not None:
        return (whole,)
    ids, place = [], 0
    while place < len(data):
        for length in range(min(_LONGEST, len(data) - place), 1, -1):
            found = _IDS.get(data[place : place + length])
            if found is not None:
                ids.append(found)
                place += length
                break
        else:
            ids.append(FIRST_BYTE + data[place])
            place += 1
    return tuple(ids)


class BuiltInTokenizer:
    """Text to ids and back."""

    def __init__(self, add_bos: bool = False) -> None:
        """Make a tokenizer; `add_bos` puts `<|bos|>` first where special tokens are asked for."""
        self.add_bos = add_bos
        self.vocab_size = len(VOCABULARY)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. Special tokens' names in the text become those tokens."""
        ids = [BOS] if add_special_tokens and self.add_bos else []
        for stretch in _SPECIALS.split(text):
            if stretch in SPECIAL:
                ids.append(SPECIAL.index(stretch))
            else:
                for part in _SPLIT.findall(stretch):
                    ids.extend(
                        _encode_part(part) if len(part) <= 64 else _encode_part.__wrapped__(part)
                    )
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD, ids beyond the vocabulary
        are skipped.
        """
        first = THINK if skip_special_tokens else 0
        return b"".join(
            VOCABULARY[token] for token in ids if first <= token < self.vocab_size
        ).decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        """Return a token's own bytes (a special token's: its name)."""
        return VOCABULARY[token]

    def is_special(self, token: int) -> bool:
        """Return whether an id is left out of text. The marks of thinking and of calls are not, as
        in most real vocabularies.
        """
        return token < THINK
