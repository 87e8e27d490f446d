"""Long prompts are encoded in segments, so that only the new part of a conversation is encoded.

Owns where a text may be cut into segments, and the ids of segments that were encoded, limited in
bytes. A tokenizer first searches the raw text for its added tokens, leftmost and longest, and
normalizes, splits and merges each text between two of them separately. So the ids of a text are
those of its segments, if each segment but the first begins with such a token:

- the search has no memory beyond the end of a match, so it finds the same tokens in the segments as
  in the whole text;
- a text behind a token in a segment is behind it in the whole text as well: rules for the first
  word of a text do not apply.

Texts are not cut at tokens that include white space before them, that begin with it, or that are
searched in normalized text. They are not cut at all if a token is matched only as a separate word,
which depends on its neighbours.
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
"""Characters of a segment at least, but for the last one: a look-up must cost less than it
saves.
"""
WINDOW = 64 * 1024
"""Characters per search: a search holds the interpreter's lock, and so the event loop, for as long
as it takes.
"""
UNSURE = 8
"""Ids at the end of a text that is cut anywhere: with what follows they might be others."""
_ENTRY = 400
"""Bytes that a cache entry takes besides its text and ids, about: its scope is one of them."""

_END = ""
"""The end of a word in a trie: not a character."""


class AddedToken(Protocol):
    """A token that a tokenizer searches in the raw text, as the tokenizers library describes it."""

    content: str
    single_word: bool
    lstrip: bool
    normalized: bool


_Trie = dict[str, "_Trie"]


class SegmentBoundaries:
    """Where a text may be cut, for one tokenizer."""

    def __init__(self, added: Iterable[AddedToken]) -> None:
        raw = [token for token in added if not token.normalized and token.content]
        self._starts = frozenset(
            t.content for t in raw if not t.lstrip and not t.content[0].isspace()
        )
        whole = not any(token.single_word for token in raw)
        self._pattern = (
            re.compile(_longest(token.content for token in raw)) if self._starts and whole else None
        )
        self._longest = max((len(token.content) for token in raw), default=0)

    def segments(self, text: str) -> Iterator[str]:
        """Yield the segments of a text, in order. Texts with the same beginning share its segments,
        but for the last.
        """
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
        """Yield the matches of `pattern.finditer`, from windows that overlap by the longest
        token.
        """
        at = 0
        while at < len(text):
            after = at + WINDOW
            found = pattern.search(text, at, after + self._longest)
            if found is None or found.start() >= after:
                at = after  # a match that begins here may continue behind the window
                continue
            yield found
            at = found.end()


def _longest(words: Iterable[str]) -> str:
    """Return a pattern for the longest of the words at a place. It is a tree, since a model may
    have thousands of them.
    """
    root: _Trie = {}
    for word in words:
        node = root
        for letter in word:
            node = node.setdefault(letter, {})
        node[_END] = {}
    return _branch(root)


def _branch(node: _Trie) -> str:
    tail = ""
    while len(node) == 1 and _END not in node:  # a single branch: letter after letter
        ((letter, node),) = node.items()
        tail += re.escape(letter)
    branches = [
        re.escape(letter) + _branch(child) for letter, child in node.items() if letter != _END
    ]
    if not branches:
        return tail
    return f"{tail}(?:{'|'.join(branches)}){'?' if _END in node else ''}"


class _Segment(msgspec.Struct, frozen=True):
    """A segment's `count` ids, as JSON numbers with commas between them. `size`: bytes of its cache
    entry.
    """

    json: bytes
    count: int
    size: int


class SegmentCache:
    """Encodes texts by segments, and keeps the ids of the most recently used ones, up to `capacity`
    bytes.

    `encode` returns the ids of several texts, without the special tokens that a tokenizer adds
    around a prompt. Several threads may call this object at once.
    """

    def __init__(
        self,
        boundaries: SegmentBoundaries,
        encode: Callable[[Sequence[str]], Sequence[Sequence[int]]],
        capacity: int,
    ) -> None:
        self._boundaries = boundaries
        self._encode = encode
        self.capacity = capacity
        """In bytes. Read only; 0: nothing is kept, since texts are not the sums of segments."""
        self._kept: OrderedDict[tuple[bytes, str], _Segment] = OrderedDict()  # by scope and text
        self._size = 0
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"<SegmentCache {len(self._kept)}, {self._size} of {self.capacity} bytes>"

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return self._size

    def encode(self, text: str, scope: bytes = b"") -> tuple[bytes, int, int]:
        """Return a text's ids as JSON numbers with commas between them, their number, and how many
        of them had been kept.

        Segments are kept for one `scope`: how long another text takes says nothing of them.
        """
        segments = list(self._boundaries.segments(text))
        with self._lock:
            found = [self._kept_segment(scope, segment) for segment in segments]
        unknown = [segment for segment, known in zip(segments, found, strict=True) if known is None]
        kept = sum(known.count for known in found if known is not None)
        fresh = iter(
            [self._segment(p, ids) for p, ids in zip(unknown, self._encode(unknown), strict=True)]
            if unknown
            else ()
        )
        whole = [next(fresh) if known is None else known for known in found]
        with self._lock:
            for segment, known, made in zip(segments, found, whole, strict=True):
                if known is None:
                    self._keep(scope, segment, made)
        return (
            b",".join(segment.json for segment in whole if segment.count),
            sum(segment.count for segment in whole),
            kept,
        )

    def beginning(self, text: str, fresh: int, scope: bytes = b"") -> tuple[bytes, int, int, int]:
        """Return the ids of a text's beginning as `encode` does: of the segments that are kept, and
        of up to `fresh` characters behind them.

        The result: the ids as JSON, their number, the characters that were read, and how many ids
        those have. If they are not the whole text, the last `UNSURE` ids are left out, and the
        others are only probably the text's own.
        """
        parts: list[bytes] = []
        count = read = 0
        for segment in self._boundaries.segments(text):
            with self._lock:
                found = self._kept_segment(scope, segment)
            if found is None and fresh < UNSURE:
                break
            if found is None and len(segment) > fresh:
                piece = segment[: max(segment.rfind(" ", 0, fresh), 0) or fresh]
                (ids,) = self._encode([piece])
                made = self._segment(piece, ids[:-UNSURE])
                read += len(piece)
                parts += [made.json] if made.count else []
                return b",".join(parts), count + made.count, read, count + len(ids)
            if found is None:
                (ids,) = self._encode([segment])
                found = self._segment(segment, ids)
                fresh -= len(segment)
                with self._lock:
                    self._keep(scope, segment, found)
            count, read = count + found.count, read + len(segment)
            parts += [found.json] if found.count else []
        return b",".join(parts), count, read, count

    def _kept_segment(self, scope: bytes, text: str) -> _Segment | None:
        known = self._kept.get((scope, text))
        if known is not None:
            self._kept.move_to_end((scope, text))
        return known

    @staticmethod
    def _segment(text: str, ids: Sequence[int]) -> _Segment:
        json = msgspec.json.encode(ids)[1:-1]
        return _Segment(json, len(ids), sys.getsizeof(text) + len(json) + _ENTRY)

    def _keep(self, scope: bytes, text: str, made: _Segment) -> None:
        # A short tail is cheap to encode, and one text may not evict all others.
        if len(text) < MIN_SEGMENT or made.size > self.capacity // 4 or (scope, text) in self._kept:
            return
        self._kept[scope, text] = made
        self._size += made.size
        while self._size > self.capacity:
            _, evicted = self._kept.popitem(last=False)
            self._size -= evicted.size
