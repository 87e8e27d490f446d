"""Long prompts are encoded in pieces, so that of a conversation only what is new is encoded again.

Owns where a text may be cut, and the ids of pieces that were seen, bounded in bytes. A tokenizer first looks for its added
tokens in the raw text, leftmost and longest, and what lies between two of them is normalized, split and merged by itself. So
the ids of a text are those of its pieces, if each piece but the first begins with such a token:

- the search has no memory beyond the end of a match, so it finds the same tokens in the pieces as in the whole;
- what comes behind a token in a piece stands behind it in the whole, too: "first word of a text" rules see no difference.

Not cut at: tokens that take white space before them, that begin with it, or that are found in normalized text; and not at all
where a token is found only as a word of its own, which depends on its neighbours.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Lock
from typing import Protocol

import msgspec

MIN_SEGMENT = 256
"""Characters of a piece at the least, but for the last: a look-up must cost less than it spares."""
WINDOW = 64 * 1024
"""Characters that are searched in one go: the search holds the interpreter's lock, and the event loop with it, for as long."""
_ENTRY = 200
"""Bytes that a cache entry takes beside its text and ids, about."""

_end = ""  # the mark of a word's end in a trie: no character


class Added(Protocol):
    """A token that a tokenizer looks for in the raw text, as the tokenizers library describes it."""

    content: str
    single_word: bool
    lstrip: bool
    normalized: bool


_Trie = dict[str, "_Trie"]


class SegmentBoundaries:
    """Where a text may be cut, for one tokenizer."""

    def __init__(self, added: Iterable[Added]) -> None:
        raw = [token for token in added if not token.normalized and token.content]
        self._starts = frozenset(t.content for t in raw if not t.lstrip and not t.content[0].isspace())
        whole = not any(token.single_word for token in raw)
        self._pattern = re.compile(_longest(token.content for token in raw)) if self._starts and whole else None
        self._longest = max((len(token.content) for token in raw), default=0)

    def pieces(self, text: str) -> Iterator[str]:
        """Yield the pieces of a text, in order. A text that begins alike has the same first pieces, but for the last one."""
        if self._pattern is None or len(text) < MIN_SEGMENT:
            yield text
            return
        begin = 0
        for found in self._found(self._pattern, text):
            at = found.start()
            if at - begin >= MIN_SEGMENT and found.group() in self._starts:
                yield text[begin:at]
                begin = at
        yield text[begin:]

    def _found(self, pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
        """Yield what `pattern.finditer` would, from windows that overlap by the longest token."""
        at = 0
        while at < len(text):
            after = at + WINDOW
            found = pattern.search(text, at, after + self._longest)
            if found is None or found.start() >= after:
                at = after  # one that begins here has not been seen whole
                continue
            yield found
            at = found.end()


def _longest(words: Iterable[str]) -> str:
    """Return a pattern that finds the longest of the words at a place; a tree, since a model may have thousands of them."""
    root: _Trie = {}
    for word in words:
        node = root
        for letter in word:
            node = node.setdefault(letter, {})
        node[_end] = {}
    return _branch(root)


def _branch(node: _Trie) -> str:
    tail = ""
    while len(node) == 1 and _end not in node:  # no choice: letter after letter
        ((letter, node),) = node.items()
        tail += re.escape(letter)
    branches = [re.escape(letter) + _branch(child) for letter, child in node.items() if letter != _end]
    if not branches:
        return tail
    return f"{tail}(?:{'|'.join(branches)}){'?' if _end in node else ''}"


class _Segment(msgspec.Struct, frozen=True):
    """A piece's ids, as JSON numbers between commas."""

    json: bytes
    count: int
    size: int


class SegmentCache:
    """Encodes texts piece by piece; keeps the ids of `capacity` bytes of pieces, the least recently used go first.

    `encode` gives the ids of several texts, without the special tokens that a tokenizer adds around a prompt. To be called by
    several threads.
    """

    def __init__(
        self, cuts: SegmentBoundaries, encode: Callable[[Sequence[str]], Sequence[Sequence[int]]], capacity: int
    ) -> None:
        self._cuts = cuts
        self._encode = encode
        self._capacity = capacity
        self._kept: OrderedDict[str, _Segment] = OrderedDict()
        self._size = 0
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"<SegmentCache {len(self._kept)}, {self._size} of {self._capacity} bytes>"

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return self._size

    def encoded(self, text: str) -> tuple[bytes, int, int]:
        """Return a text's ids as JSON numbers between commas, how many they are, and how many of them had been kept."""
        pieces = list(self._cuts.pieces(text))
        with self._lock:
            found = [self._look(piece) for piece in pieces]
        unknown = [piece for piece, known in zip(pieces, found, strict=True) if known is None]
        kept = sum(known.count for known in found if known is not None)
        fresh = iter(
            [self._made(p, ids) for p, ids in zip(unknown, self._encode(unknown), strict=True)] if unknown else ()
        )
        whole = [next(fresh) if known is None else known for known in found]
        with self._lock:
            for piece, known, made in zip(pieces, found, whole, strict=True):
                if known is None:
                    self._keep(piece, made)
        return b",".join(piece.json for piece in whole if piece.count), sum(piece.count for piece in whole), kept

    def _look(self, piece: str) -> _Segment | None:
        known = self._kept.get(piece)
        if known is not None:
            self._kept.move_to_end(piece)
        return known

    @staticmethod
    def _made(piece: str, ids: Sequence[int]) -> _Segment:
        json = msgspec.json.encode(ids)[1:-1]
        return _Segment(json, len(ids), sys.getsizeof(piece) + len(json) + _ENTRY)

    def _keep(self, piece: str, made: _Segment) -> None:
        # A short tail is cheap to encode; one text may not push out all others.
        if len(piece) < MIN_SEGMENT or made.size > self._capacity // 4 or piece in self._kept:
            return
        self._kept[piece] = made
        self._size += made.size
        while self._size > self._capacity:
            _, gone = self._kept.popitem(last=False)
            self._size -= gone.size
