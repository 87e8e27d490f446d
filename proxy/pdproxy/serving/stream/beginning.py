"""What the first events of a stream show besides its data: the ids of its prompt, and whether a
parser makes its events. Pure.
"""

from __future__ import annotations

import msgspec

from pdproxy.wire import tokens

_DELTA = b'"delta":'
_PARSED = (
    b'"delta":{}',
    b'"delta": {}',
    b'"reasoning":"',
    b'"reasoning": "',
    b'"reasoning_content":',
    b'"tool_calls":',
)
"""In a chat's events, where a quote cannot be a model's text. Searched one by one: that is faster
than a pattern.
"""


class StreamBeginning(msgspec.Struct, frozen=True):
    """What a stream has begun with.

    `prompt_ids`: the prompt's ids as a JSON array, b"" if the engine did not send them.
    `is_parsed`: a parser of the engine makes the events: reasoning or calls of the text so far, or
    it has held text back.
    """

    prompt_ids: bytes = b""
    is_parsed: bool = False


UNKNOWN = StreamBeginning()


def shown(batch: bytes, prompt_ids: bytes) -> StreamBeginning:
    """Return what the first events of a stream show. `prompt_ids`: those that were cut out of them,
    b"" if none were.
    """
    if not prompt_ids:
        batch, prompt_ids = tokens.split_prompt(batch)
    is_parsed = _DELTA in batch and any(mark in batch for mark in _PARSED)
    return StreamBeginning(prompt_ids, is_parsed)
