r"""Token ids that an engine was asked for on our behalf: read off its stream, and put back to the `null` of a plain answer.

A raw quote cannot occur inside a JSON string, so the patterns match structure and never a model's text. Source: vLLM 0.32.0
`entrypoints/openai/*/serving.py`, fields `token_ids` (each event) and `prompt_token_ids` (the first).
"""

from __future__ import annotations

import re
from array import array

import msgspec

DIGITS = 9
"""Of an id at the most."""
WITHHELD = b'"delta":{},"logprobs":null,"finish_reason":null'
"""In an event that a plain answer would not have: a parser held the text back, and only the ids made an event of it."""
_IDS = re.compile(rb'"token_ids": ?\[([0-9, ]*)\]')
_SPACED = b'"token_ids": '
_FEW = 64
"""Lists of ids in what nobody counts."""
MOST = 1 << 18
"""Ids of one stream that are kept, a megabyte; of a longer answer the rest is counted."""
_read = msgspec.json.Decoder(list[int]).decode
_PROMPT_IDS = re.compile(rb'"prompt_token_ids": ?\[')


def new() -> array[int]:
    """Return room for ids: 4 bytes each."""
    return array("I")


def are_too_many(batch: bytes) -> bool:
    """Tell whether events hold more lists of ids than events: each costs as much as an event."""
    if len(batch) < _FEW * len(b'"token_ids":'):
        return False
    lists = batch.count(b'"token_ids":')
    return lists > _FEW and lists > batch.count(b"\n\n")


def taken(batch: bytes) -> tuple[bytes, bytes]:
    """Return events without their ids, and the ids with commas between them."""
    parts = _IDS.split(batch)
    if len(parts) == 1:
        return batch, b""
    rest = (b'"token_ids": null' if batch.find(_SPACED) >= 0 else b'"token_ids":null').join(parts[::2])
    return rest, b",".join([ids for ids in parts[1::2] if ids])


def keep(listed: bytes, ids: array[int]) -> int:
    """Add ids to those of a stream. Return how many of them were not kept: `ids` has `MOST` of them."""
    count = listed.count(b",") + 1
    if len(ids) + count > MOST:
        return count
    try:
        ids.extend(_read(b"[%b]" % listed))
    except (msgspec.DecodeError, OverflowError):  # no ids that a tokenizer has; they are not the client's all the same
        ids.extend([int(one) for one in listed.split(b",") if one.isdigit() and len(one) <= DIGITS])
    return 0


def without_prompt(batch: bytes) -> bytes:
    """Return the first events of a stream without the ids of the prompt: thousands, in one event."""
    found = _PROMPT_IDS.search(batch)
    end = batch.find(b"]", found.end()) if found else -1
    if found is None or end < 0:
        return batch
    return b"%bnull%b" % (batch[: found.end() - 1], batch[end + 1 :])
