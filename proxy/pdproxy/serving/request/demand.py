"""What a request asks for, as far as that is known before an engine works on it: tokens, priority."""

from __future__ import annotations

import msgspec

from pdproxy.scheduling.outputs import limit_of
from pdproxy.wire.request import Parsed

BYTES_PER_TOKEN = 4
"""Of a text. What it is exactly is known at the end."""
MOST_TOKENS = 2**20
"""Of a prompt: images in base64 are many bytes and few tokens."""
_SMALLEST, _LARGEST = -(2**63), 2**63 - 1
_integer: msgspec.json.Decoder[int] = msgspec.json.Decoder(int)


class Demand(msgspec.Struct, frozen=True):
    """What a request asks for. `prompt`: tokens of all its prompts; `answers`: how many it wants, 0 for a route without any.

    `limit`: the most tokens of one answer, None if it has none. `priority` as vLLM reads it: the smallest is the most urgent.
    """

    prompt: int = 1
    answers: int = 0
    limit: int | None = None
    priority: int = 0


NO_DEMAND = Demand()


def demand_of(parsed: Parsed) -> Demand:
    """Return what a generating request asks for."""
    prompts = parsed.prompts
    if prompts:
        tokens = sum([one.tokens if one.tokens is not None else one.text_bytes // BYTES_PER_TOKEN for one in prompts])
    else:
        tokens = parsed.body_bytes // BYTES_PER_TOKEN
    fields = parsed.fields
    choices = _number(fields.get("n")) if "n" in fields else None
    return Demand(
        prompt=min(max(tokens, 1), MOST_TOKENS),
        answers=max(len(prompts), 1) * min(max(choices or 1, 1), MOST_TOKENS),
        limit=limit_of(parsed),
        priority=(_number(fields["priority"]) or 0) if "priority" in fields else 0,
    )


def passed_demand(size: int, *, generates: bool) -> Demand:
    """Return what a request asks for that one engine gets whole. `size`: bytes of its body."""
    return Demand(prompt=min(max(size // BYTES_PER_TOKEN, 1), MOST_TOKENS), answers=int(generates))


def _number(raw: msgspec.Raw | None) -> int | None:
    """Return an integer of 64 bits, None for anything else."""
    if raw is None or memoryview(raw).nbytes > 20:
        return None
    try:
        found = _integer.decode(raw)
    except msgspec.DecodeError:
        return None
    return found if _SMALLEST <= found <= _LARGEST else None
