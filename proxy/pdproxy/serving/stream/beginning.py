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


def split(batch: bytes, *, takes_ids: bool = True) -> tuple[bytes, StreamBeginning]:
    """Return the first events of a stream, and what they show.

    `takes_ids`: without the prompt's ids, thousands in one event.
    """
    rest, prompt_ids = tokens.split_prompt(batch)
    is_parsed = _DELTA in rest and any(mark in rest for mark in _PARSED)
    return rest if takes_ids else batch, StreamBeginning(prompt_ids, is_parsed)
