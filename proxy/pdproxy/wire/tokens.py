r"""Token ids that pdproxy asked an engine for: they are read from its stream and replaced by the
`null` of a plain answer.

A raw quote cannot occur inside a JSON string, so the patterns match structure and never a model's
text. Source: vLLM 0.32.0 `entrypoints/openai/*/serving.py`, fields `token_ids` (each event) and
`prompt_token_ids` (the first).
"""

from __future__ import annotations

import re
from array import array

import msgspec

from pdproxy.wire.sse import END

DIGITS = 9
"""Digits of an id at the most."""
WITHHELD = b'"delta":{},"logprobs":null,"finish_reason":null'
"""Marks an event that a plain answer would not have: a parser held its text back, and it was sent
only for its ids.
"""
_IDS = re.compile(rb'"token_ids": ?\[([0-9, ]*)\]')
_SPACED = b'"token_ids": '
_MIN_CHECKED = 64
"""Lists of ids up to which a batch is not checked."""
MAX_KEPT = 1 << 18
"""Ids of one stream that are kept, a megabyte. Further ones are only counted."""
_read = msgspec.json.Decoder(list[int]).decode
_PROMPT_IDS = re.compile(rb'"prompt_token_ids": ?\[')


def new() -> array[int]:
    """Return an empty array of ids, 4 bytes each."""
    return array("I")


def are_too_many(batch: bytes) -> bool:
    """Return whether a batch has more lists of ids than events: each list costs as much as an
    event.
    """
    if len(batch) < _MIN_CHECKED * len(b'"token_ids":'):
        return False
    lists = batch.count(b'"token_ids":')
    return lists > _MIN_CHECKED and lists > batch.count(b"\n\n")


def taken(batch: bytes) -> tuple[bytes, list[bytes]]:
    """Return a batch without its ids, and each list of ids that is not empty, with commas between
    the ids.
    """
    parts = _IDS.split(batch)
    if len(parts) == 1:
        return batch, []
    rest = (b'"token_ids": null' if batch.find(_SPACED) >= 0 else b'"token_ids":null').join(
        parts[::2]
    )
    return rest, [ids for ids in parts[1::2] if ids]


def keep(listed: bytes, ids: array[int]) -> int:
    """Add ids to those of a stream, `MAX_KEPT` at most. Return how many of them were not kept."""
    count = listed.count(b",") + 1
    if len(ids) + count > MAX_KEPT:
        return count
    try:
        ids.extend(array("I", _read(b"[%b]" % listed)))  # all of them, or none
    except (msgspec.DecodeError, OverflowError):  # invalid ids are dropped
        valid = [int(one) for one in listed.split(b",") if one.isdigit() and len(one) <= DIGITS]
        ids.extend(valid)
        return count - len(valid)
    return 0


def without_withheld(batch: bytes) -> bytes:
    """Return whole events without those that hold `WITHHELD`."""
    return b"".join([event + END for event in batch.split(END) if event and WITHHELD not in event])


def without_prompt(batch: bytes) -> bytes:
    """Return the first events of a stream without the ids of the prompt, thousands in one event."""
    return split_prompt(batch)[0]


def split_prompt(batch: bytes) -> tuple[bytes, bytes]:
    """Return the first events of a stream without the ids of the prompt, and these as a JSON array;
    b"" if there are none.
    """
    found = _PROMPT_IDS.search(batch)
    end = batch.find(b"]", found.end()) if found else -1
    if found is None or end < 0:
        return batch, b""
    start = found.end() - 1
    return b"%bnull%b" % (batch[:start], batch[end + 1 :]), batch[start : end + 1]
