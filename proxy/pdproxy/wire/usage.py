"""Token counts of several answers as those of one, with all fields that an engine's version has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

_DETAILS = "prompt_tokens_details"
_COUNTS = {
    name: re.compile(rb'"%s":\d+' % name)
    for name in (b"cached_tokens", b"created_cache_tokens", b"cache_write_tokens")
}


def add_up(usages: Sequence[bytes], *, details_of: int | None) -> bytes:
    """Return one `usage` object from several: numbers are added, objects field by field; a field
    that is null in all stays null.

    `details_of`: the index of the one whose `prompt_tokens_details` are returned. vLLM adds
    everything else up, but reports those of the last prompt in a whole answer and of the first one
    in a stream (0.32.0, `entrypoints/openai/completion/serving.py`). None: no details of any kind
    are returned, as vLLM's batches of chats have none (`chat_completion/batch_serving.py`).

    Raises:
        msgspec.MsgspecError: one of them is not JSON.
    """
    values = [msgspec.json.decode(usage) for usage in usages]
    total = _sum(values)
    if isinstance(total, dict):
        if details_of is None:
            total |= {name: None for name in total if name.endswith("_details")}
        elif _DETAILS in total:
            total[_DETAILS] = values[details_of].get(_DETAILS)
    return msgspec.json.encode(total)


def with_cache(answer: bytes, *, cached: int | None, created: int | None) -> bytes:
    """Return a whole answer, or a stream's usage event, with the prefix cache counts of the prefill
    engine.

    A decode engine reports its own: there nearly all of the prompt is `cached`, by the KV transfer,
    and almost nothing `created`. None leaves a count unchanged, and a missing one stays missing. In
    a text the quotes would be escaped.
    """
    if cached is None and created is None:
        return answer
    counts = (
        (b"cached_tokens", cached),
        (b"created_cache_tokens", created),
        (b"cache_write_tokens", created),  # of Responses
    )
    for name, tokens in counts:
        if tokens is not None and (at := answer.rfind(b'"%s":' % name)) >= 0:
            answer = answer[:at] + _COUNTS[name].sub(b'"%s":%d' % (name, tokens), answer[at:], 1)
    return answer


def _sum(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if all(isinstance(value, dict) for value in known):
        names = dict.fromkeys(name for value in known for name in value)
        return {name: _sum([value.get(name) for value in known]) for name in names}
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in known):
        return sum(known)
    return known[0]
