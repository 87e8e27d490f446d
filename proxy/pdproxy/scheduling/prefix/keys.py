"""The keys of a prompt's blocks: a key stands for a block and all before it, so equal keys mean
equal beginnings.

A unit is the number of tokens per key: the engines' block size, or a multiple of it. Of a prompt,
whole units count only. key = hash(key before, the unit's token ids as packed 32-bit integers), the
first one behind a root. `hash` of bytes is SipHash with a secret of the process (unless
PYTHONHASHSEED is set), so nobody outside can make two prompts with one key. A collision would cost
a wrong prediction, never a wrong answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from struct import Struct

import msgspec

from pdproxy.tokens.ids import TokenIds

MASK = (1 << 60) - 1
"""Keys have 60 bits: an integer of two digits, which takes 32 bytes where one of 64 bits takes
48.
"""

TOKEN_BYTES = array("I").itemsize

_STEP_BYTES = 4096
"""How much JSON is read at a time: about 600 token ids."""
_STEP_UNITS = 64

_decoder = msgspec.json.Decoder(list[int])


@lru_cache(maxsize=64)
def units_of(size: int) -> Struct:
    """Return what cuts bytes into units of `size` bytes each."""
    return Struct(f"{size}s")


def root(lora_name: str | None = None, salt: str | None = None) -> int:
    """Return the key before a prompt's first unit: it separates adapters, and clients with
    different `cache_salt`.

    It is not cached: an engine's events may have salts of megabytes.
    """
    return hash(("ids", lora_name or "", salt or "")) & MASK


def text_root(lora_name: str | None = None, salt: str | None = None) -> int:
    """Return the root for keys of text. They never equal keys of token ids."""
    return hash(("text", lora_name or "", salt or "")) & MASK


def behind(key: int, extra: object) -> int:
    """Return the key for what follows `key` if the next unit depends on more than its tokens, such
    as an image.
    """
    return hash((key, "extra", repr(extra))) & MASK


def following(key: int, unit: bytes) -> int:
    """Return the key of one unit behind `key`."""
    return hash((key, unit)) & MASK


def chain(key: int, data: bytes, size: int) -> list[int]:
    """Return the keys of bytes behind `key`, in units of `size` bytes. `data` is a whole number of
    units.
    """
    keys: list[int] = []
    add = keys.append
    for (unit,) in units_of(size).iter_unpack(data):
        key = hash((key, unit)) & MASK  # `following`, without the call
        add(key)
    return keys


def pack(ids: Sequence[int]) -> bytes:
    """Return token ids as 32-bit integers of this machine's byte order.

    Raises:
        OverflowError, TypeError: one is no integer of 0 to 2^32 - 1.
    """
    return array("I", ids).tobytes()


class PromptKeys:
    """The keys of one prompt, made in steps when they are asked for, and once only.

    Iterating gives lists of keys, in order. A search in an index stops where no engine matches any
    more, so most of a prompt that no engine knows is neither parsed nor hashed.
    """

    def __init__(self, unit: int, steps: Iterator[list[int]]) -> None:
        self.unit = unit
        """Tokens per key, or bytes of text. Read only."""
        self._steps = steps
        self._made: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        at = 0
        while True:
            if at == len(self._made):
                step = next(self._steps, None)
                if step is None:
                    return
                self._made.append(step)
            yield self._made[at]
            at += 1

    def all(self) -> list[int]:
        """Return all keys of the prompt."""
        return [key for step in self for key in step]


def of_ids(
    ids: Sequence[int] | TokenIds, unit: int, start: int, most: int | None = None
) -> PromptKeys:
    """Return the keys of a prompt's token ids behind the root `start`, `most` at most.

    Ids that no engine would take, such as negative ones, end the keys early.
    """
    parts = _numbers(ids.json) if isinstance(ids, TokenIds) else _cut(ids, unit)
    steps = _steps((pack(part) for part in parts), unit * TOKEN_BYTES, start)
    return PromptKeys(unit, steps if most is None else _first(steps, most))


def of_packed(data: bytes, unit: int, start: int) -> PromptKeys:
    """Return the keys of token ids that are packed already (`pack`)."""
    size = unit * TOKEN_BYTES * _STEP_UNITS
    return PromptKeys(
        unit,
        _steps(
            (data[at : at + size] for at in range(0, len(data), size)), unit * TOKEN_BYTES, start
        ),
    )


def of_text(text: bytes, unit: int, start: int) -> PromptKeys:
    """Return the keys of a text in units of `unit` bytes behind `text_root`: approximate, where no
    ids are known.
    """
    size = unit * _STEP_UNITS
    return PromptKeys(
        unit, _steps((text[at : at + size] for at in range(0, len(text), size)), unit, start)
    )


def _cut(ids: Sequence[int], unit: int) -> Iterator[Sequence[int]]:
    size = unit * _STEP_UNITS
    for at in range(0, len(ids), size):
        yield ids[at : at + size]


def _numbers(json: bytes) -> Iterator[list[int]]:
    """Yield the ids of a JSON array, piece by piece."""
    at = json.find(b"[") + 1
    while at:
        end = json.find(b",", at + _STEP_BYTES)
        if end < 0:
            yield _decoder.decode(b"[" + json[at:])
            return
        yield _decoder.decode(b"[" + json[at:end] + b"]")
        at = end + 1


def _first(steps: Iterator[list[int]], most: int) -> Iterator[list[int]]:
    """Yield steps until they have `most` keys, and cut the last one there."""
    for step in steps:
        if most <= len(step):
            yield step[:most]
            return
        most -= len(step)
        yield step


def _steps(parts: Iterable[bytes], size: int, key: int) -> Iterator[list[int]]:
    carried = b""
    try:
        for part in parts:
            data = carried + part if carried else part
            whole = len(data) - len(data) % size
            carried = data[whole:]
            keys = chain(key, data[:whole] if carried else data, size)
            if keys:
                key = keys[-1]
                yield keys
    except (OverflowError, TypeError, msgspec.MsgspecError):
        return
