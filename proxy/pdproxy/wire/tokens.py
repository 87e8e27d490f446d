r"""Token ids that an engine was asked for on our behalf: read off its stream, and put back to the `null` of a plain answer.

A raw quote cannot occur inside a JSON string, so the patterns match structure and never a model's text. Source: vLLM 0.32.0
`entrypoints/openai/*/serving.py`, fields `token_ids` (each event) and `prompt_token_ids` (the first).
"""

from __future__ import annotations

from array import array

IDS = b'"token_ids":['
_PROMPT_IDS = b'"prompt_token_ids":['
WITHHELD = b'"delta":{},"logprobs":null,"finish_reason":null'
"""In an event that a plain answer would not have: a parser held the text back, and only the ids made an event of it."""


def new() -> array[int]:
    """Return room for ids: 4 bytes each."""
    return array("I")


def take(text: bytes, ids: array[int]) -> None:
    """Add ids to `ids` as they stand in an event: numbers and commas. What is none is not taken."""
    try:
        if text.isdigit():
            ids.append(int(text))
        elif text:
            ids.extend([int(one) for one in text.split(b",")])
    except (ValueError, OverflowError):
        return


def taken(batch: bytes, ids: array[int]) -> bytes:
    """Return events without their ids, which are added to `ids`."""
    return _nulled(batch, IDS, ids)


def without_prompt(batch: bytes) -> bytes:
    """Return events without the ids of the prompt."""
    return _nulled(batch, _PROMPT_IDS, None)


def _nulled(batch: bytes, key: bytes, ids: array[int] | None) -> bytes:
    at = batch.find(key)
    if at < 0:
        return batch
    kept: list[bytes] = []
    done = 0
    while at >= 0:
        begin = at + len(key)
        end = batch.find(b"]", begin)
        if end < 0:
            break
        if ids is not None:
            take(batch[begin:end], ids)
        kept.append(batch[done : begin - 1])
        done = end + 1
        at = batch.find(key, done)
    kept.append(batch[done:])
    return b"null".join(kept)
