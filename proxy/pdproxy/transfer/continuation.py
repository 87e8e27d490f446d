"""The request by which another engine goes on with an answer: a completion behind the ids so far.
Pure.
"""

from __future__ import annotations

from array import array

import msgspec

from pdproxy.transfer.chat_chunks import body_decoder
from pdproxy.transfer.contract import raw
from pdproxy.wire.continuable import Continuable
from pdproxy.wire.request import Parsed
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Prompt

_TRUE = raw(b"true")


def continued(
    kept: Continuable, prompt_ids: bytes, ids: array[int], *, limit: int
) -> tuple[Parsed, Prompt]:
    """Return the request that goes on behind `ids` of an answer, and its prompt.

    `prompt_ids`: those of the prompt, a JSON array that is not empty. `limit`: tokens that the
    answer may have in all, more than `ids` are.
    """
    done = len(ids)
    listed = prompt_ids
    if done:
        listed = (
            prompt_ids[: prompt_ids.rindex(b"]")] + b"," + msgspec.json.encode(ids.tolist())[1:]
        )
    given = raw(listed)
    fields = body_decoder.decode(kept.sampling)
    if kept.model is not None:
        fields["model"] = raw(msgspec.json.encode(kept.model))
    fields["prompt"] = given
    fields["max_tokens"] = raw(b"%d" % (limit - done))
    if kept.min_tokens > done:
        fields["min_tokens"] = raw(b"%d" % (kept.min_tokens - done))
    fields["stream"] = _TRUE
    if kept.shows_ids:
        fields["return_token_ids"] = _TRUE
    prompt = Prompt(given, listed.count(b",") + 1, 0)
    size = len(listed) + len(kept.sampling)
    return Parsed(
        Route.COMPLETIONS, fields, kept.model, True, kept.wants_usage, False, (prompt,), None, size
    ), prompt
